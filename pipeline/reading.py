"""Open a stretch of a source file and yield the books in it, or the reason why it cannot be read.

In: a ``Part`` of a file: all of it, a range of bytes, of row groups, or of archive members. Out: books in
a fixed order. Only one book is held at a time, however large the file.
"""

import gzip
import json
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from infra.command import UserError
from pipeline.config import SAMPLE, TokenizeConfig
from pipeline.files import open_file
from pipeline.sources import TEXT, SourceFile

_BLOCK = 1 << 20
_TITLES = ("title", "short_book_title")
_DAMAGE = (EOFError, zlib.error, gzip.BadGzipFile, zipfile.BadZipFile, pa.ArrowException, NotImplementedError)


@dataclass(frozen=True, order=True)
class Part:
    """A stretch of a file, from ``start`` up to ``stop`` (None: its end); ``size`` estimates its text in bytes."""

    file: SourceFile
    size: int
    start: int = 0
    stop: int | None = None


@dataclass(frozen=True)
class RawBook:
    """A book as its source holds it."""

    id: str
    source: str
    data: bytes
    title: str | None = None
    author: str | None = None
    language: str | None = None


@dataclass(frozen=True)
class Unreadable:
    """A file, or a place in one, that gave no book."""

    id: str
    reason: str


def read_books(part: Part, settings: TokenizeConfig) -> Iterator[RawBook | Unreadable]:
    """The books of ``part`` in a fixed order; what is damaged is named and ends the part.

    Raises ``UserError`` when the file is gone or the disk fails: that says nothing about the books, and
    quarantining what a lost disk held would call the data set finished without it.
    """
    file = part.file
    try:
        with open_file(file.uri) as opened:
            yield from _books(part, opened, settings)
    except FileNotFoundError as gone:
        raise UserError(
            f"{file.uri} was there when the work was planned and is gone: put it back, or run the same command "
            "again to go on without it."
        ) from gone
    except PermissionError as refused:
        yield Unreadable(file.id, f"{refused.strerror}")
    except _DAMAGE as damage:
        yield Unreadable(file.id, f"damaged: {damage or type(damage).__name__}")
    except OSError as failure:
        if failure.errno is not None:
            raise UserError(
                f"{file.uri} cannot be read ({failure.strerror}): mend it and run the same command again."
            ) from failure
        yield Unreadable(file.id, f"damaged: {failure}")  # Arrow's codecs raise OSError without a number


def _books(part: Part, opened: BinaryIO, settings: TokenizeConfig) -> Iterator[RawBook | Unreadable]:
    file = part.file
    if file.form == "parquet":
        yield from _parquet(part, opened, settings.text_column)
    elif file.form == "zip":
        yield from _archive(part, opened)
    elif file.form == "sample":
        yield from _sample(opened)
    else:
        stream = _decompressed(opened, file.compression)
        if file.form == "lines":
            yield from _lines(part, stream, settings.text_field)
        elif settings.doc_separator:
            yield from _separated(part, stream, settings.doc_separator.encode())
        else:
            yield RawBook(file.id, file.id, stream.read())


def _decompressed(opened: BinaryIO, compression: str | None) -> BinaryIO:
    if compression == "gzip":
        return gzip.GzipFile(fileobj=opened)  # type: ignore[return-value] Arrow's reader takes a truncated file for whole
    if compression == "zstd":
        return pa.CompressedInputStream(pa.PythonFile(opened), "zstd")  # type: ignore[return-value]
    return opened


def _documents(stream: BinaryIO, separator: bytes, start: int, stop: int | None) -> Iterator[tuple[int, bytes]]:
    """Offset and bytes of each document that begins in the range; the last may reach beyond it."""
    position = max(0, start - len(separator))
    if position:
        stream.seek(position)
    buffer = b""
    begin = scanned = 0
    inside = start == 0
    while True:
        at = buffer.find(separator, scanned)
        if at < 0:
            rest = len(buffer) - begin
            if block := stream.read(_BLOCK):
                buffer = buffer[begin:] + block
                begin, scanned = 0, max(0, rest - len(separator) + 1)
                continue
            if inside and rest and (stop is None or position < stop):
                yield position, buffer[begin:]
            return
        if inside:
            if stop is not None and position >= stop:
                return
            yield position, buffer[begin:at]
        inside = True
        position += at + len(separator) - begin
        begin = scanned = at + len(separator)


def _separated(part: Part, stream: BinaryIO, separator: bytes) -> Iterator[RawBook]:
    for offset, data in _documents(stream, separator, part.start, part.stop):
        if data.strip():
            yield RawBook(f"{part.file.id}#{offset}", part.file.id, data)


def _lines(part: Part, stream: BinaryIO, name: str) -> Iterator[RawBook | Unreadable]:
    for offset, line in _documents(stream, b"\n", part.start, part.stop):
        if not line.strip():
            continue
        place = f"{part.file.id}#{offset}"
        try:
            values = json.loads(line)
        except ValueError as wrong:
            yield Unreadable(place, f"not a line of JSON: {wrong}")
            continue
        if not isinstance(values, dict) or not isinstance(values.get(name), str):
            yield Unreadable(place, f"no text in the field {name!r} (--text-field)")
            continue
        yield _described(place, part.file.id, values[name], values)


def _parquet(part: Part, opened: BinaryIO, name: str) -> Iterator[RawBook | Unreadable]:
    table = pq.ParquetFile(opened)
    columns = {column.lower(): column for column in reversed(table.schema_arrow.names)}
    text = columns.get(name.lower())
    if text is None:
        yield Unreadable(
            part.file.id, f"no column {name!r} (--text-column) among {', '.join(table.schema_arrow.names)}"
        )
        return
    wanted = [text, *(columns[c] for c in (*_TITLES, "author", "language") if c in columns and columns[c] != text)]
    groups = range(part.start, table.num_row_groups if part.stop is None else part.stop)
    row = sum(table.metadata.row_group(group).num_rows for group in range(part.start))
    for batch in table.iter_batches(batch_size=16, row_groups=list(groups), columns=wanted):
        for values in batch.to_pylist():
            place = f"{part.file.id}#{row}"
            row += 1
            if isinstance(values[text], str):
                yield _described(place, part.file.id, values[text], {k.lower(): v for k, v in values.items()})
            else:
                yield Unreadable(place, f"the column {text!r} holds no text here")


def _described(place: str, source: str, text: str, values: dict[str, Any]) -> RawBook:
    def word(*names: str) -> str | None:
        return next((values[name] for name in names if isinstance(values.get(name), str)), None)

    data = text.encode("utf-8", "replace")
    return RawBook(place, source, data, word(*_TITLES), word("author"), word("language"))


def members(opened: BinaryIO) -> list[zipfile.ZipInfo]:
    """The books in an archive, by name."""
    infos = zipfile.ZipFile(opened).infolist()
    return sorted((i for i in infos if PurePosixPath(i.filename.lower()).suffix in TEXT), key=lambda i: i.filename)


def _archive(part: Part, opened: BinaryIO) -> Iterator[RawBook | Unreadable]:
    archive = zipfile.ZipFile(opened)
    for info in members(opened)[part.start : part.stop]:
        place = f"{part.file.id}/{info.filename}"
        try:
            yield RawBook(place, part.file.id, archive.read(info))
        except (*_DAMAGE, RuntimeError) as damage:  # RuntimeError: it is encrypted
            yield Unreadable(place, f"damaged: {damage}")


def _sample(opened: BinaryIO) -> Iterator[RawBook]:
    """The Bible's books in their order: one line a verse, chapters set apart by an empty line and a heading."""
    book, chapter, lines = "", 0, []
    for verse in map(json.loads, opened):
        if verse["book"] != book:
            if lines:
                yield _sample_book(book, lines)
            book, chapter, lines = verse["book"], 0, [verse["book"], ""]
        if verse["chapter"] != chapter:
            chapter = verse["chapter"]
            lines += ["", f"Chapter {chapter}", ""]
        lines.append(verse["text"])
    if lines:
        yield _sample_book(book, lines)


def _sample_book(name: str, lines: list[str]) -> RawBook:
    text = "\n".join(lines) + "\n"
    return RawBook(f"{SAMPLE}/{name}", SAMPLE, text.encode(), title=name, author="King James Version", language="en")
