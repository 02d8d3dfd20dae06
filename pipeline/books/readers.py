"""Readers of the books in a range of a source file, one at a time and in a fixed order; unreadable ones are dropped."""

import bz2
import io
import json
import lzma
import sys
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import groupby
from operator import itemgetter
from typing import IO, Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from infra.errors import UserError
from infra.schema import strict
from pipeline.books.charset import Decoded, to_utf8, undecodable_lines
from pipeline.books.sources import SourceFile, find_hidden_path, has_unknown_type, is_plain_text
from pipeline.config import SAMPLE, ReadingConfig

MAX_BOOK_BYTES = 1_000_000_000
"""Maximum size of a book in bytes. enwik9, the largest text that is commonly used as one document, has this size.

Processing a book takes five times its size in memory. A larger file is a corpus whose books need a separator, or a
decompression bomb.
"""
MAX_JSON_LINE_BYTES = 100_000_000
"""Maximum size in bytes of a line of JSON, whose parsed values can take twenty times as much memory."""
TOO_LARGE = "too large"

_BLOCK_BYTES = 1 << 20
_PACKED_BLOCK_BYTES = 1 << 18
_MAX_HEADER_BYTES = 18
"""Maximum number of bytes before the content of a compressed stream, in any of the formats."""
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_TITLE_NAMES = ("title", "short_book_title")
DAMAGE_ERRORS = (
    EOFError, zlib.error, zipfile.BadZipFile, pa.ArrowException, UnicodeDecodeError, NotImplementedError,
)  # fmt: skip
"""Exceptions that readers raise for a corrupt file, in addition to an ``OSError`` without a number."""


@dataclass(frozen=True, order=True)
class FileRange:
    """Range of a file, in bytes, row groups or archive members. ``size`` estimates its bytes of text."""

    file: SourceFile
    size: int
    start: int = 0
    stop: int | None = None


@dataclass(frozen=True)
class RawBook:
    """Book in the form in which its source stores it."""

    id: str
    source: str
    data: bytes
    title: str | None = None
    author: str | None = None
    language: str | None = None
    decoded: Decoded | None = None
    """Result of decoding ``data``, if the file had to be decoded to parse it; else None."""


@strict
@dataclass(frozen=True)
class DroppedBook:
    """Dropped book, or kept book that is flagged. ``reason`` is a label to count; ``detail`` explains the case."""

    book: str
    reason: str
    detail: str


def read_books(file_range: FileRange, settings: ReadingConfig) -> Iterator[RawBook | DroppedBook]:
    """Yield the books of ``file_range`` in a fixed order; corrupt data is reported as dropped and ends the range.

    Raises ``UserError`` if the file was deleted or changed, or if the disk fails, because a data set without its books
    would look finished.
    """
    file = file_range.file
    try:
        with file.open() as opened:
            file.check_unchanged()
            yield from _read_file(file_range, opened, settings)
            file.check_unchanged()
    except FileNotFoundError as error:
        raise UserError(
            f"{file.uri} was deleted while the command was running. Restore it, or run the same command again to "
            "continue without it."
        ) from error
    except PermissionError as error:
        yield DroppedBook(file.id, "unreadable", f"{error.strerror}")
    except DAMAGE_ERRORS as damage:
        file.check_unchanged()  # The file may have been replaced while it was read.
        yield DroppedBook(file.id, "unreadable", f"damaged: {str(damage) or type(damage).__name__}")
    except OSError as failure:
        if failure.errno is not None:
            raise UserError(
                f"Cannot read {file.uri}: {failure.strerror}. Fix this, then run the same command again."
            ) from failure
        file.check_unchanged()
        # Arrow's codecs raise an OSError without a number for corrupt data.
        yield DroppedBook(file.id, "unreadable", f"damaged: {failure}")


def _read_file(file_range: FileRange, opened: BinaryIO, settings: ReadingConfig) -> Iterator[RawBook | DroppedBook]:
    file = file_range.file
    if file.format == "parquet":
        yield from _read_parquet(file_range, opened, settings.text_column)
    elif file.format == "zip":
        yield from _read_archive(file_range, opened, settings.doc_separator)
    elif file.format == "sample":
        yield from _read_sample(opened)
    else:
        unpacked = _DecompressedFile(opened, file.compression) if file.compression else None
        stream: BinaryIO = io.BufferedReader(unpacked, _BLOCK_BYTES) if unpacked else opened  # type: ignore[assignment]
        if file.format in ("lines", "json"):
            yield from _read_json(file_range, stream, settings.text_field)
        elif settings.doc_separator:
            documents = _split_documents(
                stream, settings.doc_separator.encode(), file_range.start, file_range.stop, MAX_BOOK_BYTES
            )
            yield from _make_books(file.id, file.id, documents)
        elif file.compression:
            yield _make_book(file.id, file.id, _read_limited(stream, MAX_BOOK_BYTES))
        else:
            yield _make_book(file.id, file.id, stream.read() if file.size <= MAX_BOOK_BYTES else None)
        if unpacked and unpacked.has_other_data:
            detail = f"data after the {file.compression} stream is not {file.compression} and was ignored"
            yield DroppedBook(file.id, "unreadable", detail)


def _zstd_decompressor() -> Any:
    """Return a decompressor of the standard library (Python 3.14 or later) or of its backport.

    It accepts dumps that were compressed with --long=31, whose window takes up to 2 GB of memory.
    """
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
    return zstd.ZstdDecompressor(options={int(zstd.DecompressionParameter.window_log_max): 31})


_DECOMPRESSORS: dict[str, Callable[[], Any]] = {
    "gzip": partial(zlib.decompressobj, 16 + zlib.MAX_WBITS),
    "bz2": bz2.BZ2Decompressor,
    "xz": lzma.LZMADecompressor,
    "zstd": _zstd_decompressor,
}
"""Factories of decompressors by compression. The interfaces are equal, except that zlib returns unused input."""


class _DecompressedFile(io.RawIOBase):
    """Content of a compressed file: consecutive streams with zeros between them, up to data of another kind."""

    def __init__(self, packed: BinaryIO, compression: str) -> None:
        self._packed, self._compression = packed, compression
        self._new_decompressor = _DECOMPRESSORS[compression]
        self._decompressor = self._new_decompressor()
        self._input = b""
        self._is_first, self._has_output, self._consumed_bytes = True, False, 0
        self.has_other_data = False
        """Whether data of a different kind follows the compressed data."""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self.has_other_data:
            if self._decompressor.eof and not self._next_stream():
                return 0
            block, is_end = self._input, False
            if not block and getattr(self._decompressor, "needs_input", True):
                block = self._packed.read(_PACKED_BLOCK_BYTES)
                is_end = not block
            self._consumed_bytes += len(block)
            try:
                data = self._decompressor.decompress(block, len(buffer))
            except Exception as damage:  # noqa: BLE001 each library raises its own exceptions
                self._fail(str(damage), damage)
                continue
            # Only zlib returns unconsumed input; the other decompressors buffer it.
            self._input = getattr(self._decompressor, "unconsumed_tail", b"")
            if data:
                self._has_output = True
                buffer[: len(data)] = data
                return len(data)
            if is_end and not self._decompressor.eof:
                self._fail("the end of the stream is missing")
        return 0

    def _next_stream(self) -> bool:
        """Begin the next stream after the end of one; return False at the end of the file."""
        unused_data = self._decompressor.unused_data
        while not (unused_data := unused_data.lstrip(b"\0")):
            if not (unused_data := self._packed.read(_PACKED_BLOCK_BYTES)):
                return False
        self._decompressor, self._input = self._new_decompressor(), unused_data
        self._is_first, self._has_output, self._consumed_bytes = False, False, 0
        return True

    def _fail(self, message: str, damage: Exception | None = None) -> None:
        """Raise ``OSError`` for damage, or record that the data after the first stream is not compressed."""
        if self._is_first or self._has_output:
            prefix = "" if self._has_output or damage is None else f"not {self._compression} data: "
            raise OSError(prefix + message) from damage
        if damage is None and self._consumed_bytes >= _MAX_HEADER_BYTES:
            raise OSError(message)
        self.has_other_data = True


def _read_limited(stream: IO[bytes], max_bytes: int) -> bytes | None:
    """Read a stream of unknown size; stop and return None above ``max_bytes``."""
    data = bytearray()
    while len(data) <= max_bytes:
        if not (block := stream.read(_BLOCK_BYTES)):
            return bytes(data)
        data += block
    return None


def _make_book(book_id: str, source: str, data: bytes | None) -> RawBook | DroppedBook:
    """Return a book without metadata; a dropped book if ``data`` is None because it was too large."""
    if data is None:
        return DroppedBook(
            book_id,
            TOO_LARGE,
            f"larger than {MAX_BOOK_BYTES:,} bytes; if it contains several books, set --doc-separator",
        )
    return RawBook(book_id, source, data)


def _split_documents(
    stream: IO[bytes], separator: bytes, start: int, stop: int | None, max_bytes: int
) -> Iterator[tuple[int, bytes | None]]:
    """Yield (offset, bytes) of each document that begins in the range; the last document may extend beyond it.

    Reads no further than needed, and between documents only buffers a possible beginning of a separator. A document of
    more than ``max_bytes`` bytes is not kept in memory, and its bytes are None.
    """
    position = max(0, start - len(separator))
    if position:
        stream.seek(position)
    buffer = bytearray()  # Bytes of the file from ``position`` on; removing the first bytes of a bytearray is cheap.
    scanned_bytes = 0
    document_start = 0 if start == 0 else None  # Start of the document that contains ``position``.
    while stop is None or (position + len(separator) if document_start is None else document_start) < stop:
        at = buffer.find(separator, scanned_bytes)
        searched_bytes = max(0, len(buffer) - len(separator) + 1)
        if at >= 0:
            if document_start is not None:
                yield document_start, bytes(buffer[:at]) if position + at - document_start <= max_bytes else None
            passed_bytes = at + len(separator)
            document_start = position + passed_bytes
        elif searched_bytes and (document_start is None or position + searched_bytes - document_start > max_bytes):
            passed_bytes = searched_bytes
        elif block := stream.read1(_BLOCK_BYTES):  # type: ignore[attr-defined] read1 returns the bytes before damage
            buffer += block
            scanned_bytes = searched_bytes
            continue
        else:
            if document_start is not None and position + len(buffer) > document_start:
                yield document_start, bytes(buffer) if position + len(buffer) - document_start <= max_bytes else None
            return
        del buffer[:passed_bytes]
        position, scanned_bytes = position + passed_bytes, 0


def _make_books(
    file_id: str, source: str, documents: Iterator[tuple[int, bytes | None]]
) -> Iterator[RawBook | DroppedBook]:
    for offset, data in documents:
        if data is None or data.strip():
            yield _make_book(f"{file_id}#{offset}", source, data)


def _read_json(file_range: FileRange, stream: Any, name: str) -> Iterator[RawBook | DroppedBook]:
    """Yield the documents of a JSON file with a document per line, an array of them, or one object on several lines."""
    first_block = b"" if file_range.start else stream.peek(_BLOCK_BYTES)
    first_line, remaining_lines, _ = first_block.removeprefix(b"\xef\xbb\xbf").lstrip().partition(b"\n")
    if first_block[:2] in _UTF16_MARKS:
        advice = "UTF-16 is not supported; convert the file with 'iconv -f UTF-16 -t UTF-8'"
        yield DroppedBook(file_range.file.id, "unreadable", advice)
    elif file_range.file.format == "json" and (
        first_line[:1] == b"[" or (remaining_lines and not _is_json(first_line))
    ):
        if (whole := _read_limited(stream, MAX_JSON_LINE_BYTES)) is None:
            yield DroppedBook(
                file_range.file.id,
                TOO_LARGE,
                f"JSON of more than {MAX_JSON_LINE_BYTES:,} bytes must have one document per line",
            )
            return
        try:
            values, decoded = _parse_json(whole)
        except (ValueError, RecursionError) as error:
            yield DroppedBook(file_range.file.id, "unreadable", f"not JSON: {error}")
            return
        for number, row in enumerate(values if isinstance(values, list) else [values]):
            yield _read_row(f"{file_range.file.id}#{number}", file_range.file.id, row, name, decoded)
    else:
        yield from _read_json_lines(file_range, stream, name)


def _read_json_lines(file_range: FileRange, stream: BinaryIO, name: str) -> Iterator[RawBook | DroppedBook]:
    sample = cache(partial(_read_undecodable_lines, file_range))
    for offset, line in _split_documents(stream, b"\n", file_range.start, file_range.stop, MAX_JSON_LINE_BYTES):
        book_id = f"{file_range.file.id}#{offset}"
        if line is None:
            yield DroppedBook(book_id, TOO_LARGE, f"a line of more than {MAX_JSON_LINE_BYTES:,} bytes")
        elif line.strip():
            try:
                values, decoded = _parse_json(line, sample)
            except (ValueError, RecursionError) as error:
                yield DroppedBook(book_id, "unreadable", f"not a line of JSON: {error}")
            else:
                yield _read_row(book_id, file_range.file.id, values, name, decoded)


def _parse_json(data: bytes, sample: Callable[[], bytes] | None = None) -> tuple[Any, Decoded | None]:
    """Return (JSON value in ``data``, decoded text if it is not UTF-8, else None). Raises like ``json.loads``."""
    try:
        return json.loads(data), None
    except UnicodeDecodeError:
        decoded = to_utf8(data, declared="utf-8", sample=sample)
        return json.loads(decoded.text), decoded


def _read_undecodable_lines(file_range: FileRange) -> bytes:
    """Return the first lines of ``file_range`` that are not UTF-8, because one line may not identify an encoding."""
    with suppress(OSError, *DAMAGE_ERRORS), file_range.file.open() as opened:
        if file_range.file.compression:
            unpacked: Any = _DecompressedFile(opened, file_range.file.compression)
            return undecodable_lines(io.BufferedReader(unpacked, _BLOCK_BYTES).read(_BLOCK_BYTES))
        opened.seek(file_range.start)
        return undecodable_lines(opened.read(_BLOCK_BYTES))
    return b""


def _is_json(line: bytes) -> bool:
    try:
        _parse_json(line)
    except (ValueError, RecursionError):
        return False
    return True


def _read_row(book_id: str, source: str, values: Any, name: str, decoded: Decoded | None) -> RawBook | DroppedBook:
    fields = _find_names(values, name) if isinstance(values, dict) else []
    if len(fields) > 1:
        return DroppedBook(book_id, "unreadable", _ambiguity_reason(fields, "--text-field"))
    if not fields or not isinstance(values[fields[0]], str):
        return DroppedBook(book_id, "unreadable", f"the field {name!r} (--text-field) is missing or not text")
    metadata = {field.lower(): value for field, value in reversed(values.items())} | values
    book = _with_metadata(book_id, source, values[fields[0]], metadata)
    if decoded is None or book.data.isascii():
        return book
    replaced = min(decoded.replaced_bytes, values[fields[0]].count("\ufffd"))
    return replace(book, decoded=replace(decoded, text=book.data, replaced_bytes=replaced))


def _find_names(names: Iterable[str], wanted: str) -> list[str]:
    """Return the ``names`` that equal ``wanted``, or else the names that differ from it only in case."""
    names = list(names)
    return [name for name in names if name == wanted] or [name for name in names if name.lower() == wanted.lower()]


def _ambiguity_reason(names: list[str], flag: str) -> str:
    name_list = " and ".join(map(repr, names))
    if len(set(names)) == 1:
        return f"{name_list} have the same name; rename all but one"
    return f"{name_list} differ only in case; choose one with {flag}"


def _read_parquet(file_range: FileRange, opened: BinaryIO, name: str) -> Iterator[RawBook | DroppedBook]:
    table = pq.ParquetFile(opened)
    names = table.schema_arrow.names
    columns = {column.lower(): column for column in reversed(names)} | {column: column for column in names}
    texts = _find_names(names, name)
    if len(texts) != 1:
        reason = f"the column {name!r} (--text-column) is missing; the columns are {', '.join(names)}"
        yield DroppedBook(
            file_range.file.id, "unreadable", _ambiguity_reason(texts, "--text-column") if texts else reason
        )
        return
    text = texts[0]
    selected_columns = [
        text,
        *(columns[c] for c in (*_TITLE_NAMES, "author", "language") if c in columns and columns[c] != text),
    ]
    groups = range(file_range.start, table.num_row_groups if file_range.stop is None else file_range.stop)
    row = sum(table.metadata.row_group(group).num_rows for group in range(file_range.start))
    for batch in table.iter_batches(batch_size=16, row_groups=list(groups), columns=selected_columns):
        for values in batch.to_pylist():
            book_id = f"{file_range.file.id}#{row}"
            row += 1
            if isinstance(values[text], str | bytes) and len(values[text]) > MAX_BOOK_BYTES:
                yield _make_book(book_id, file_range.file.id, None)
            elif isinstance(values[text], str | bytes):
                yield _with_metadata(
                    book_id, file_range.file.id, values[text], {k.lower(): v for k, v in values.items()}
                )
            else:
                yield DroppedBook(book_id, "unreadable", f"the value in column {text!r} is not text")


def _with_metadata(book_id: str, source: str, text: str | bytes, values: dict[str, Any]) -> RawBook:
    def find_text(*names: str) -> str | None:
        value = next((values[name] for name in names if isinstance(values.get(name), str)), None)
        # JSON may contain half a surrogate pair, which a shard cannot store.
        return None if value is None else value.encode("utf-8", "replace").decode()

    data = text.encode("utf-8", "replace") if isinstance(text, str) else text
    return RawBook(book_id, source, data, find_text(*_TITLE_NAMES), find_text("author"), find_text("language"))


def archive_members(archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    """Return the books in an archive, by name: its text files, or its only file if that has an unknown suffix."""
    files = [info for info in archive.infolist() if not info.is_dir() and not find_hidden_path(info.filename)]
    texts = [info for info in files if is_plain_text(info.filename)]
    if not texts and len(files) == 1 and has_unknown_type(files[0].filename):
        return files
    return sorted(texts, key=lambda info: info.filename)


def _read_archive(file_range: FileRange, opened: BinaryIO, separator: str | None) -> Iterator[RawBook | DroppedBook]:
    archive = zipfile.ZipFile(opened)
    infos = archive_members(archive)
    if not infos:
        yield DroppedBook(file_range.file.id, "unreadable", "the archive contains no .txt, .text or .md file")
    names = Counter(info.filename for info in infos)
    other_members = [info for info in archive.infolist() if info.filename not in names and not info.is_dir()]
    # Each hidden folder is reported once, in the order of the archive.
    hidden = {find_hidden_path(info.filename): None for info in other_members}
    if not file_range.start:
        for path in filter(None, hidden):
            yield DroppedBook(f"{file_range.file.id}/{path}", "hidden", "hidden and temporary files are not read")
    for info in other_members if infos and not file_range.start else ():
        if not find_hidden_path(info.filename):
            yield DroppedBook(
                f"{file_range.file.id}/{info.filename}",
                "not text",
                "only the .txt, .text and .md files of an archive are read",
            )
    for info in infos[file_range.start : file_range.stop]:
        book_id = f"{file_range.file.id}/{info.filename}"
        if names[info.filename] > 1:  # Appending to an archive may add a name a second time.
            book_id += f"#{info.header_offset}"
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            # zipfile decompresses a whole block of the other methods at once: 4 KiB of bzip2 can be 5 GB.
            yield DroppedBook(
                book_id, "unreadable", "unsupported compression method; re-create the archive with deflate"
            )
            continue
        try:
            with archive.open(info) as stream:
                if separator:
                    documents = _split_documents(stream, separator.encode(), 0, None, MAX_BOOK_BYTES)
                    yield from _make_books(book_id, file_range.file.id, documents)
                else:
                    yield _make_book(
                        book_id,
                        file_range.file.id,
                        _read_limited(stream, MAX_BOOK_BYTES) if info.file_size <= MAX_BOOK_BYTES else None,
                    )
        except (*DAMAGE_ERRORS, RuntimeError, OSError) as damage:  # zipfile raises RuntimeError for encrypted files.
            if isinstance(damage, OSError) and damage.errno is not None:
                raise
            yield DroppedBook(book_id, "unreadable", f"damaged: {str(damage) or type(damage).__name__}")


def _read_sample(opened: BinaryIO) -> Iterator[RawBook]:
    """Yield the books of the Bible in order, with one line per verse, and an empty line and a heading per chapter."""
    for name, book in groupby(map(json.loads, opened), itemgetter("book")):
        lines = [name, ""]
        for chapter, verses in groupby(book, itemgetter("chapter")):
            lines += ["", f"Chapter {chapter}", "", *(verse["text"] for verse in verses)]
        text = "\n".join(lines) + "\n"
        yield RawBook(f"{SAMPLE}/{name}", SAMPLE, text.encode(), title=name, author="King James Version", language="en")
