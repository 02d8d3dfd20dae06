"""Recognition of splits in the names of files and folders, as in data sets of the Hugging Face hub.

By keywords, the hub's library reads ``data/validation-00000-of-00001.parquet``, ``test.jsonl`` or ``dev/a.jsonl.gz`` as
splits. Because a book may have such a name, too, a keyword only counts together with a training file:

- for files of rows, a training file whose name is equal up to the keyword, or that is below the same data set card
- for texts, a training file whose name is equal except for the keyword, in a folder where all texts have a keyword
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

Label = Literal["train", "val", "test", "card"]
"""Split of a file; ``card`` stands for a file that describes the data set."""

_KEYWORDS: dict[str, Label] = {
    "train": "train", "training": "train", "validation": "val", "valid": "val", "dev": "val", "val": "val",
    "test": "test", "testing": "test", "eval": "test", "evaluation": "test",
}  # fmt: skip
"""Keywords of the library ``datasets``; the characters around one must not be letters."""
_KEYWORD = re.compile(rf"(?<![^-._ 0-9/])({'|'.join(sorted(_KEYWORDS, key=len, reverse=True))})(?![^-._ 0-9/])")
_CARDS = ("readme.md", "readme.txt", "license.md", "license.txt")
_DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json")


class NamedFile(NamedTuple):
    """File by its whole path with ``/`` as separator; ``is_text`` is False for files of rows."""

    path: str
    is_text: bool


def label_files(files: Sequence[NamedFile], read_start: Callable[[int], bytes]) -> dict[int, Label]:
    """Return the labels of labeled ``files`` by index; ``read_start(index)`` returns the first bytes of a file."""
    cards = {
        n: _parent_folder(file.path)
        for n, file in enumerate(files)
        if _lower_name(file.path) in (*_CARDS, *_DESCRIPTIONS)
    }
    other_indices = [n for n in range(len(files)) if n not in cards] if cards else ()
    rows = _find_folders(files[n].path for n in other_indices if not files[n].is_text)
    roots = {n: folder for n, folder in cards.items() if folder in rows and read_start(n).startswith(b"---")}
    split_labels = (
        _find_splits(files, set(roots.values())) if any("train" in file.path.lower() for file in files) else {}
    )
    data = rows | _find_folders(files[n].path for n in other_indices if n in split_labels)
    books = _find_folders(files[n].path for n in other_indices if n not in split_labels and files[n].is_text)
    for n, folder in cards.items():
        if folder in data and (folder not in books or n in roots or _lower_name(files[n].path) in _DESCRIPTIONS):
            split_labels[n] = "card"
    return split_labels


def _parent_folder(path: str) -> str:
    return path.rpartition("/")[0]


def _lower_name(path: str) -> str:
    return path.rpartition("/")[2].lower()


def _find_folders(paths: Iterable[str]) -> set[str]:
    """Return the folders of these files and the folders above them."""
    folders: set[str] = set()
    for folder in map(_parent_folder, paths):
        while folder and folder not in folders:
            folders.add(folder)
            folder = _parent_folder(folder)
    return folders


def _find_splits(files: Sequence[NamedFile], roots: set[str]) -> dict[int, Label]:
    """Return the splits of files by index; ``roots`` are folders with a data set card.

    A file with several keywords, such as ``train/test.jsonl``, is in the split furthest from training. Without
    validation files, training files have no split, so that some of their books are held out.
    """
    marks = {n: file_marks for n, file in enumerate(files) if (file_marks := _find_keywords(file, roots))}
    unnamed_folders = {
        _parent_folder(file.path)
        for n, file in enumerate(files)
        if file.is_text and _lower_name(file.path) not in _CARDS and all(map(_is_in_folder_name, marks.get(n, ())))
    }
    for n in [n for n in marks if files[n].is_text and _parent_folder(files[n].path) in unnamed_folders]:
        marks[n] = list(filter(_is_in_folder_name, marks[n]))
    splits: defaultdict[str, set[Label]] = defaultdict(set)
    for file_marks in marks.values():
        for group, split in file_marks:
            splits[group].add(split)
    split_by_file: dict[int, Label] = {}
    for n, file_marks in marks.items():
        required_splits = {group: {"train", "val"} if split == "train" else {"train"} for group, split in file_marks}
        possible_splits = {split for group, split in file_marks if required_splits[group] <= splits[group]}
        for split in ("test", "val", "train"):
            if split in possible_splits:
                split_by_file[n] = split
                break
    return split_by_file


def _is_in_folder_name(mark: tuple[str, Label]) -> bool:
    """Return whether the keyword of a text is in the name of a folder instead of its own name."""
    return mark[0].endswith("/{}/")


def _find_keywords(file: NamedFile, roots: set[str]) -> list[tuple[str, Label]]:
    """Return the keywords in a path, each as (group of files whose names must match, split)."""
    path = file.path if file.is_text else file.path.lower()  # Capitalized words of a text's name are part of a title.
    root = "" if file.is_text or not roots else _find_root(_parent_folder(file.path), roots)
    marks: list[tuple[str, Label]] = []
    for match in _KEYWORD.finditer(path, len(root)):
        begin, end = path[: match.start()], path[match.end() :]
        if not file.is_text:
            group = root or begin
        elif "/" not in end:
            group = begin + "{}" + re.sub(r"\d+", "#", end)
        elif begin.endswith("/") and end.startswith("/"):
            group = begin + "{}/"
        else:
            continue
        marks.append((group, _KEYWORDS[match[1]]))
    return marks


def _find_root(folder: str, roots: set[str]) -> str:
    """Return the nearest of ``roots`` that is ``folder`` or above it; an empty string if there is none."""
    while folder and folder not in roots:
        folder = _parent_folder(folder)
    return folder
