"""Raw bytes to a clean book, or the reason why it is left out."""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from pipeline.books.charset import Decoded, to_utf8
from pipeline.books.gutenberg import unwrap
from pipeline.books.normalize import count_characters, join_lines, normalize, trim
from pipeline.books.readers import DroppedBook, RawBook

BEGINNING = 20_000
"""Bytes of a text that are searched for separators."""
SUSPECT_PREFIX = "looks like"
"""With this begin the traits of what may not be a book."""
_SUSPECT_PATTERNS = (
    (
        f"{SUSPECT_PREFIX} HTML or XML",
        re.compile(rb"\s*<(?:[!?][^<>]{2,400}>|[a-z][^<>]{0,400}>[^<]{0,400}</?[a-z])", re.I),
    ),
    (f"{SUSPECT_PREFIX} JSON", re.compile(rb"\s*[\[{]\s*(?:\{\s*)?\"[^\"\n]{0,100}\"\s*[:,]")),
    (f"{SUSPECT_PREFIX} base64", re.compile(rb"\s*(?:[A-Za-z0-9+/]{60,76}\r?\n){8}")),
)  # fmt: skip
"""What else a text may be, and how it begins then. It is kept, and the summary says so."""
ENCODING_GUESSED = "character set guessed"
MIXED = "character sets mixed"
OVERRULED = "character set not as declared"
UNDECODABLE = "undecodable bytes"
"""What the quarantine says of books that were kept, but may have wrong letters."""


@dataclass(frozen=True)
class Book:
    """A cleaned book. ``text`` is valid UTF-8; ``chars`` counts its characters; ``sha256`` is of ``text``."""

    id: str
    source: str
    text: bytes
    chars: int
    sha256: str
    title: str | None
    author: str | None
    language: str | None
    released: str | None
    replaced: int
    """Undecodable bytes, replaced by U+FFFD, and zero bytes, left out, of a text that has one near its beginning."""
    traits: tuple[str, ...]
    """What was recognized and normalized, as labels to count."""
    doubts: tuple[DroppedBook, ...] = ()
    """What may be wrong in it, although it is kept."""
    removed: dict[str, int] = field(default_factory=dict)
    """Characters that were left out, by rule of cleaning; line ends and the blanks around the text are not counted."""


def clean(raw: RawBook, *, join: bool = False) -> Book | DroppedBook:
    """The book in ``raw`` without wrapping, normalized; or why it is left out. ``join`` joins hard-wrapped lines."""
    data = raw.data
    head = data[:4096]
    if head.count(b"\0") > 1 + len(head) // 1000 and not data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return DroppedBook(raw.id, "not text", "there are many zero bytes near its beginning")
    decoded = raw.decoded or to_utf8(data)
    zeros = decoded.text.count(b"\0") if b"\0" in head else 0
    replaced = decoded.replaced + zeros
    normalized = normalize(decoded.text)
    unwrapped = unwrap(normalized.text)
    body = trim(unwrapped.body)
    if not body:
        return DroppedBook(raw.id, "empty", f"nothing is left of {len(data):,} bytes")
    if join:
        body = join_lines(body)
    fields = unwrapped.fields
    labels = [f"gutenberg: {form}" for form in unwrapped.forms]
    if b"\r\n" in data[:1000]:
        labels.append("line ends: CRLF")
    if decoded.encoding != "utf-8" or replaced:
        doubts = ", damaged" * bool(replaced) + ", guessed" * decoded.guessed_encoding
        labels.append(f"encoding: {decoded.encoding}{doubts}")
    if normalized.repaired:
        labels.append("encoding: C1 codes read as cp1252")
    labels += [what for what, begins in _SUSPECT_PATTERNS if begins.match(body)]
    if body.count(b"<|endoftext|>", 0, BEGINNING) > 1:
        labels.append(f"{SUSPECT_PREFIX} several, between <|endoftext|>: name it by --doc-separator")
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
        replaced=replaced,
        traits=tuple(labels),
        doubts=tuple(_doubts(raw.id, decoded, zeros)),
        removed=normalized.removed | unwrapped.removed,
    )


def _doubts(book: str, decoded: Decoded, zeros: int) -> Iterator[DroppedBook]:
    """What may be wrong in a book that was ``decoded`` like this, and had ``zeros`` among its bytes."""
    if decoded.replaced:
        what = f"kept, with U+FFFD in the place of {decoded.replaced:,} bytes that are not {decoded.encoding}"
        yield DroppedBook(book, UNDECODABLE, what)
    if zeros:
        yield DroppedBook(book, UNDECODABLE, f"kept, without {zeros:,} zero bytes")
    if decoded.contradicted:
        yield DroppedBook(book, OVERRULED, f"kept, declared as {decoded.contradicted} and read as {decoded.encoding}")
    if " and " in decoded.encoding:
        yield DroppedBook(book, MIXED, f"kept, its lines are read as {decoded.encoding}")
    if decoded.guessed_encoding:
        yield DroppedBook(book, ENCODING_GUESSED, f"kept, read as {decoded.encoding}: too few letters tell it")
