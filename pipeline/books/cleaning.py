"""Cleaning of a book's raw bytes into text, or the reason why the book is dropped."""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from infra.cli.units import format_count
from pipeline.books.charset import MIN_NON_ASCII_BYTES, Decoded, to_utf8
from pipeline.books.gutenberg import unwrap
from pipeline.books.normalization import count_characters, join_lines, normalize, trim
from pipeline.books.readers import DroppedBook, RawBook

SEPARATOR_SEARCH_BYTES = 20_000
"""Number of bytes at the beginning of a text that are searched for separators."""
SUSPECT_PREFIX = "looks like"
"""Prefix of the labels of texts that may not be books."""
_SUSPECT_PATTERNS = (
    (
        f"{SUSPECT_PREFIX} HTML or XML",
        re.compile(rb"\s*<(?:[!?][^<>]{2,400}>|[a-z][^<>]{0,400}>[^<]{0,400}</?[a-z])", re.I),
    ),
    (f"{SUSPECT_PREFIX} JSON", re.compile(rb"\s*[\[{]\s*(?:\{\s*)?\"[^\"\n]{0,100}\"\s*[:,]")),
    (f"{SUSPECT_PREFIX} base64", re.compile(rb"\s*(?:[A-Za-z0-9+/]{60,76}\r?\n){8}")),
)  # fmt: skip
"""(label, pattern of the beginning) of texts that may not be books. They are kept and counted in the summary."""
ENCODING_GUESSED = "encoding guessed"
ENCODINGS_MIXED = "mixed encodings"
ENCODING_OVERRULED = "encoding not as declared"
UNDECODABLE_BYTES = "undecodable bytes"
"""Reasons why books are flagged. Flagged books are kept and listed in the quarantine, but may have wrong letters."""


@dataclass(frozen=True)
class Book:
    """Cleaned book. ``text`` is valid UTF-8, ``chars`` is its number of characters, and ``sha256`` is its hash."""

    id: str
    source: str
    text: bytes
    chars: int
    sha256: str
    title: str | None
    author: str | None
    language: str | None
    released: str | None
    replaced_bytes: int
    """Number of undecodable bytes, which U+FFFD replaces, and of removed zero bytes in a text that begins with some."""
    labels: tuple[str, ...]
    """Properties that were recognized or normalized, as labels to count."""
    flags: tuple[DroppedBook, ...] = ()
    """Possible errors in the kept text, for the quarantine."""
    removed: dict[str, int] = field(default_factory=dict)
    """Number of removed characters by cleaning rule, without line ends and the whitespace around the text."""


def clean(raw: RawBook, *, join: bool = False) -> Book | DroppedBook:
    """Return the book in ``raw``, normalized and without wrapping, or why it is dropped.

    ``join`` joins hard-wrapped lines.
    """
    data = raw.data
    head = data[:4096]
    if head.count(b"\0") > 1 + len(head) // 1000 and not data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return DroppedBook(raw.id, "not text", "many zero bytes near the beginning")
    decoded = raw.decoded or to_utf8(data)
    zeros = decoded.text.count(b"\0") if b"\0" in head else 0
    replaced = decoded.replaced_bytes + zeros
    normalized = normalize(decoded.text)
    unwrapped = unwrap(normalized.text)
    body = trim(unwrapped.body)
    if not body:
        return DroppedBook(raw.id, "empty", f"cleaning removed all {len(data):,} bytes")
    if join:
        body = join_lines(body)
    fields = unwrapped.fields
    labels = [f"gutenberg: {pattern}" for pattern in unwrapped.patterns]
    if b"\r\n" in data[:1000]:
        labels.append("line ends: CRLF")
    if decoded.encoding != "utf-8" or replaced:
        suffix = ", damaged" * bool(replaced) + ", guessed" * decoded.is_guessed
        labels.append(f"encoding: {decoded.encoding}{suffix}")
    if normalized.repaired:
        labels.append("encoding: C1 controls read as cp1252")
    labels += [label for label, beginning in _SUSPECT_PATTERNS if beginning.match(body)]
    if body.count(b"<|endoftext|>", 0, SEPARATOR_SEARCH_BYTES) > 1:
        labels.append(f"{SUSPECT_PREFIX} several books separated by <|endoftext|>; set --doc-separator")
    return Book(
        id=raw.id,
        source=raw.source,
        text=body,
        chars=count_characters(body),
        sha256=hashlib.sha256(body).hexdigest(),
        title=raw.title or fields.get("title"),
        author=raw.author or fields.get("author"),
        language=raw.language or fields.get("language"),
        released=fields.get("released"),
        replaced_bytes=replaced,
        labels=tuple(labels),
        flags=tuple(_find_flags(raw.id, decoded, zeros)),
        removed=normalized.removed | unwrapped.removed,
    )


def _find_flags(book: str, decoded: Decoded, zeros: int) -> Iterator[DroppedBook]:
    """Yield the possible errors of a ``decoded`` book that contained ``zeros`` zero bytes."""
    encoding = decoded.encoding
    if decoded.replaced_bytes:
        detail = f"kept; {format_count(decoded.replaced_bytes, 'byte')} not valid in {encoding}, replaced with U+FFFD"
        yield DroppedBook(book, UNDECODABLE_BYTES, detail)
    if zeros:
        yield DroppedBook(book, UNDECODABLE_BYTES, f"kept; {format_count(zeros, 'zero byte')} removed")
    if decoded.contradicted_encoding:
        detail = f"kept; declared as {decoded.contradicted_encoding}, decoded as {encoding}"
        yield DroppedBook(book, ENCODING_OVERRULED, detail)
    if " and " in encoding:
        yield DroppedBook(book, ENCODINGS_MIXED, f"kept; lines decoded as {encoding}")
    if decoded.is_guessed:
        detail = f"kept; encoding guessed as {encoding} from fewer than {MIN_NON_ASCII_BYTES} non-ASCII bytes"
        yield DroppedBook(book, ENCODING_GUESSED, detail)
