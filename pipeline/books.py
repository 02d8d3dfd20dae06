"""Raw bytes to a clean book: encoding, line ends, Project Gutenberg's wrapping, and the reasons to refuse one.

In: a ``RawBook``. Out: a ``Book`` in UTF-8 with ``\\n`` line ends, or a ``Dropped`` with its reason. It
works on bytes: decoding to text and back costs more than encoding to tokens.
"""

import hashlib
import re
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from pipeline.gutenberg import declared_encoding, unwrap
from pipeline.reading import RawBook

_BOMS = ((b"\xef\xbb\xbf", "utf-8"), (b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be"))
# Control characters other than tab, line feed and carriage return; form feed and vertical tab are line ends.
_CONTROLS = bytes(c for c in range(32) if c not in b"\t\n\v\f\r") + b"\x7f"
_LINE_ENDS = bytes.maketrans(b"\v\f", b"\n\n")
# U+0080 to U+009F (C1 controls) and U+00AD (soft hyphen). One literal first byte: that is what makes it fast.
_INVISIBLE = re.compile(rb"\xc2[\x80-\x9f\xad]")
_MARK = b"\xef\xbb\xbf"


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


@dataclass(frozen=True)
class Dropped:
    """A book that was left out, and why: ``reason`` is a kind to count by, ``detail`` a sentence about this one."""

    book: str
    reason: str
    detail: str


def clean(raw: RawBook) -> Book | Dropped:
    """The book in ``raw`` without wrapping, normalised; or why it is none."""
    data = raw.data
    if b"\0" in data[:4096] and not data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return Dropped(raw.id, "not text", "the file holds zero bytes near its beginning")
    text = normalise(to_utf8(data))
    unwrapped = unwrap(text)
    body = unwrapped.body.strip()
    if not body:
        return Dropped(raw.id, "empty", f"nothing is left of {len(data):,} bytes")
    body += b"\n"
    fields = unwrapped.fields
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
    )


def to_utf8(data: bytes) -> bytes:
    """``data`` as valid UTF-8 without a byte order mark; undecodable bytes become U+FFFD."""
    for mark, encoding in _BOMS:
        if data.startswith(mark):
            data = data[len(mark) :]
            if encoding != "utf-8":
                return data.decode(encoding, "replace").encode("utf-8", "replace")
    if data.isascii() or is_utf8(data):
        return data
    declared = (declared_encoding(data) or "").lower()
    encoding = "utf-8" if "utf" in declared else "cp1252"
    return data.decode(encoding, "replace").encode()


def is_utf8(data: bytes) -> bool:
    """Whether ``data`` is valid UTF-8, at Arrow's speed: 25 times that of decoding it."""
    offsets = pa.array([0, len(data)], pa.int64()).buffers()[1]
    try:
        pa.LargeStringArray.from_buffers(1, offsets, pa.py_buffer(data)).validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def normalise(text: bytes) -> bytes:
    """``text`` with ``\\n`` line ends, without control characters, soft hyphens and stray byte order marks.

    Carriage returns are the rule in real collections; kept, they cost 8% more tokens.
    """
    if b"\r" in text and _has_lone_return(text):
        text = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    text = text.translate(_LINE_ENDS, _CONTROLS + b"\r")
    if b"\xc2" in text:
        text = _INVISIBLE.sub(b"", text)
    return text.replace(_MARK, b"") if _MARK in text else text


def _has_lone_return(text: bytes) -> bool:
    """Whether a carriage return ends a line by itself; by NumPy, at twice the speed of a pattern."""
    codes = np.frombuffer(text, dtype=np.uint8)
    return bool(codes[-1] == 13 or np.any((codes[:-1] == 13) & (codes[1:] != 10)))


def count_characters(text: bytes) -> int:
    """Code points in valid UTF-8: all bytes but the continuation bytes 0x80 to 0xBF."""
    return len(text) - int(np.count_nonzero(np.frombuffer(text, dtype=np.int8) < -64))
