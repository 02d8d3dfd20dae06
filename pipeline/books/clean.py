"""Raw bytes to a clean book, or the reason why it is left out.

In: a ``RawBook``. Out: a ``Book`` in UTF-8 with ``\\n`` line ends and without Project Gutenberg's
wrapping, or a ``Dropped``, which becomes one line of ``quarantine.jsonl``.
"""

import hashlib
from dataclasses import dataclass

from pipeline.books.gutenberg import unwrap
from pipeline.books.normalize import count_characters, join_lines, normalize, to_utf8, trim
from pipeline.books.readers import Dropped, RawBook


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
    """Undecodable bytes, replaced by U+FFFD."""
    traits: tuple[str, ...]
    """What was recognized and normalized, as labels to count."""
    guessed: str | None = None
    """The character set, where it is not declared and too few letters tell it."""


def clean(raw: RawBook, *, join: bool = False) -> Book | Dropped:
    """The book in ``raw`` without wrapping, normalized; or why it is left out. ``join`` joins hard-wrapped lines."""
    data = raw.data
    if b"\0" in data[:4096] and not data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return Dropped(raw.id, "not text", "there are zero bytes near its beginning")
    decoded = to_utf8(data)
    unwrapped = unwrap(normalize(decoded.text) if decoded.text else b"")
    body = trim(unwrapped.body)
    if not body:
        return Dropped(raw.id, "empty", f"nothing is left of {len(data):,} bytes")
    if join:
        body = join_lines(body)
    fields = unwrapped.fields
    traits = [f"gutenberg: {form}" for form in unwrapped.forms]
    if b"\r\n" in data[:1000]:
        traits.append("line ends: CRLF")
    if decoded.encoding != "utf-8" or decoded.replaced:
        doubts = ", damaged" * bool(decoded.replaced) + ", guessed" * decoded.guessed
        traits.append(f"encoding: {decoded.encoding}{doubts}")
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
        replaced=decoded.replaced,
        traits=tuple(traits),
        guessed=decoded.encoding if decoded.guessed else None,
    )
