"""Splits that the names of files and folders tell, as in the data sets of the Hugging Face hub.

Its library reads ``data/validation-00000-of-00001.parquet``, ``test.jsonl`` or ``dev/a.jsonl.gz`` as splits by these
keywords. A book may have such a name, too. A name counts therefore only beside its counterpart for training: of files
of rows one that begins alike up to the keyword; of texts one that is equal but for the keyword, in a folder where all
texts have one.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

Label = Literal["train", "val", "test", "card"]
"""The split of a file, or that it describes a data set."""

_KEYWORDS: dict[str, Label] = {
    "train": "train", "training": "train", "validation": "val", "valid": "val", "dev": "val", "val": "val",
    "test": "test", "testing": "test", "eval": "test", "evaluation": "test",
}  # fmt: skip
"""Those of the library ``datasets``, where other characters than letters are around them."""
_KEYWORD = re.compile(rf"(?<![^-._ 0-9/])({'|'.join(sorted(_KEYWORDS, key=len, reverse=True))})(?![^-._ 0-9/])")
_CARDS = ("readme.md", "readme.txt", "license.md", "license.txt")
_DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json")


class NamedFile(NamedTuple):
    """A file by its whole path, with ``/`` between parts; ``is_text`` tells that it is a text and not of rows."""

    path: str
    is_text: bool


def labels(files: Sequence[NamedFile], read_start: Callable[[int], bytes]) -> dict[int, Label]:
    """The labels of those ``files`` that have one, by number; ``read_start`` returns how a file, by number, begins."""
    found = _splits(files) if any("train" in file.path.lower() for file in files) else {}
    cards = [n for n, file in enumerate(files) if _name(file.path) in (*_CARDS, *_DESCRIPTIONS)]
    if cards:
        others = set(range(len(files))) - set(cards)
        data = _folders(files[n].path for n in others if n in found or not files[n].is_text)
        books = _folders(files[n].path for n in others if n not in found and files[n].is_text)
        for n in cards:
            folder = files[n].path.rpartition("/")[0]
            if folder in data and (
                folder not in books or _name(files[n].path) in _DESCRIPTIONS or read_start(n).startswith(b"---")
            ):
                found[n] = "card"
    return found


def _name(path: str) -> str:
    return path.rpartition("/")[2].lower()


def _folders(paths: Iterable[str]) -> set[str]:
    """The folders in which these files are, and those above."""
    found: set[str] = set()
    for path in paths:
        folder = path.rpartition("/")[0]
        while folder and folder not in found:
            found.add(folder)
            folder = folder.rpartition("/")[0]
    return found


def _splits(files: Sequence[NamedFile]) -> dict[int, Label]:
    """The splits of files. One that is named by several, as in ``train/test.jsonl``, is in the one furthest from
    training. Training files without any for validation have none, so that some of their books are held out."""
    marks = {n: found for n, file in enumerate(files) if (found := _marks(file))}
    plain = {
        file.path.rpartition("/")[0]
        for n, file in enumerate(files)
        if file.is_text and _name(file.path) not in _CARDS and all(map(_is_of_folder, marks.get(n, ())))
    }
    for n in [n for n in marks if files[n].is_text and files[n].path.rpartition("/")[0] in plain]:
        marks[n] = list(filter(_is_of_folder, marks[n]))
    splits: defaultdict[str, set[Label]] = defaultdict(set)
    for found in marks.values():
        for group, split in found:
            splits[group].add(split)
    named: dict[int, Label] = {}
    for n, found in marks.items():
        needed = {group: {"train", "val"} if split == "train" else {"train"} for group, split in found}
        possible = {split for group, split in found if needed[group] <= splits[group]}
        for split in ("test", "val", "train"):
            if split in possible:
                named[n] = split
                break
    return named


def _is_of_folder(mark: tuple[str, Label]) -> bool:
    """Whether a mark of a text is in the name of a folder, and not in its own."""
    return mark[0].endswith("/{}/")


def _marks(file: NamedFile) -> list[tuple[str, Label]]:
    """The keywords in a path: the group of the files whose splits they tell, and the split."""
    path = file.path if file.is_text else file.path.lower()  # a title is capitalized
    found: list[tuple[str, Label]] = []
    for match in _KEYWORD.finditer(path):
        begin, end = path[: match.start()], path[match.end() :]
        if not file.is_text:
            group = begin
        elif "/" not in end:
            group = begin + "{}" + re.sub(r"\d+", "#", end)
        elif begin.endswith("/") and end.startswith("/"):
            group = begin + "{}/"
        else:
            continue
        found.append((group, _KEYWORDS[match[1]]))
    return found
