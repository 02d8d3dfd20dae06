"""Raw bytes to a clean book, or the reason why it is left out."""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from pipeline.books.charset import Decoded, to_utf8
from pipeline.books.gutenberg import unwrap
from pipeline.books.normalize import count_characters, join_lines, normalize, trim
from pipeline.books.readers import Dropped, RawBook

BEGINNING = 20_000
"""Bytes of a text that are searched for separators."""
SEEMS = "looks like"
"""With this begin the traits of what may not be a book."""
_ODD = (
    (f"{SEEMS} HTML or XML", re.compile(rb"\s*<(?:[!?][^<>]{2,400}>|[a-z][^<>]{0,400}>[^<]{0,400}</?[a-z])", re.I)),
    (f"{SEEMS} JSON", re.compile(rb"\s*[\[{]\s*(?:\{\s*)?\"[^\"\n]{0,100}\"\s*[:,]")),
    (f"{SEEMS} base64", re.compile(rb"\s*(?:[A-Za-z0-9+/]{60,76}\r?\n){8}")),
)  # fmt: skip
"""What else a text may be, and how it begins then. It is kept, and the summary says so."""
GUESSED = "character set guessed"
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
    doubts: tuple[Dropped, ...] = ()
    """What may be wrong in it, although it is kept."""
    removed: dict[str, int] = field(default_factory=dict)
    """Characters that were left out, by rule of cleaning; line ends and the blanks around the text are not counted."""


def clean(raw: RawBook, *, join: bool = False) -> Book | Dropped:
    """The book in ``raw`` without wrapping, normalized; or why it is left out. ``join`` joins hard-wrapped lines."""
    data = raw.data
    head = data[:4096]
    if head.count(b"\0") > 1 + len(head) // 1000 and not data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return Dropped(raw.id, "not text", "there are many zero bytes near its beginning")
    decoded = raw.decoded or to_utf8(data)
    zeros = decoded.text.count(b"\0") if b"\0" in head else 0
    replaced = decoded.replaced + zeros
    normalized = normalize(decoded.text)
    unwrapped = unwrap(normalized.text)
    body = trim(unwrapped.body)
    if not body:
        return Dropped(raw.id, "empty", f"nothing is left of {len(data):,} bytes")
    if join:
        body = join_lines(body)
    fields = unwrapped.fields
    traits = [f"gutenberg: {form}" for form in unwrapped.forms]
    if b"\r\n" in data[:1000]:
        traits.append("line ends: CRLF")
    if decoded.encoding != "utf-8" or replaced:
        doubts = ", damaged" * bool(replaced) + ", guessed" * decoded.guessed
        traits.append(f"encoding: {decoded.encoding}{doubts}")
    if normalized.repaired:
        traits.append("encoding: C1 codes read as cp1252")
    traits += [what for what, begins in _ODD if begins.match(body)]
    if body.count(b"<|endoftext|>", 0, BEGINNING) > 1:
        traits.append(f"{SEEMS} several, between <|endoftext|>: name it by --doc-separator")
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
        traits=tuple(traits),
        doubts=tuple(_doubts(raw.id, decoded, zeros)),
        removed=normalized.removed | unwrapped.removed,
    )


def _doubts(book: str, decoded: Decoded, zeros: int) -> Iterator[Dropped]:
    """What may be wrong in a book that was ``decoded`` like this, and had ``zeros`` among its bytes."""
    if decoded.replaced:
        what = f"kept, with U+FFFD in the place of {decoded.replaced:,} bytes that are not {decoded.encoding}"
        yield Dropped(book, UNDECODABLE, what)
    if zeros:
        yield Dropped(book, UNDECODABLE, f"kept, without {zeros:,} zero bytes")
    if decoded.contradicted:
        yield Dropped(book, OVERRULED, f"kept, declared as {decoded.contradicted} and read as {decoded.encoding}")
    if " and " in decoded.encoding:
        yield Dropped(book, MIXED, f"kept, its lines are read as {decoded.encoding}")
    if decoded.guessed:
        yield Dropped(book, GUESSED, f"kept, read as {decoded.encoding}: too few letters tell it")
