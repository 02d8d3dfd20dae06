"""Normalize text: UTF-8, ``\\n`` line ends, no control characters.

Works on bytes: decoding to str and back costs more than encoding to tokens. Only what is not valid UTF-8
is decoded, by the character set that the file declares or that a library detects.
"""

import codecs
import re
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from pipeline.books.gutenberg import declared_encoding

_MARKS = (
    (b"\xef\xbb\xbf", "utf-8"),
    (b"\xff\xfe\0\0", "utf-32-le"), (b"\0\0\xfe\xff", "utf-32-be"),  # the first begins like UTF-16's
    (b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be"),
)  # fmt: skip
# Codecs of Python that decode bytes but are not character sets.
_NO_CHARACTER_SETS = ("idna", "punycode", "undefined", "unicode-escape", "raw-unicode-escape")
_REPLACEMENT = "\ufffd"
# Texts in Latin-1 often contain the curly quotes of Windows, control characters in Latin-1.
_FULLER = {"iso8859-1": "cp1252"}
_DETECTION_SAMPLE = 32_000
_TELLING = 10
"""Letters beyond ASCII that tell a character set: of 36 texts with fewer, 13 were read in a wrong one."""
# Control characters other than tab, line feed and carriage return; form feed and vertical tab are line ends.
_CONTROLS = bytes(c for c in range(32) if c not in b"\t\n\v\f") + b"\x7f"
_LINE_ENDS = bytes.maketrans(b"\v\f", b"\n\n")
# U+0080 to U+009F (C1 controls) and U+00AD (soft hyphen). The literal first byte makes it fast.
_INVISIBLE = re.compile(rb"\xc2[\x80-\x9f\xad]")
_MARK = b"\xef\xbb\xbf"
# A wrapped line of prose is long, and its continuation is not indented: verse and tables are kept.
_WRAPPED = re.compile(rb"([^\n]{50})\n(?=[^\s*\[|=+-])")


@dataclass(frozen=True)
class Decoded:
    """``text`` is valid UTF-8, decoded as ``encoding``; ``replaced`` counts undecodable bytes.

    ``guessed`` if the encoding is not declared and too few letters tell it.
    """

    text: bytes
    encoding: str
    replaced: int = 0
    guessed: bool = False


def to_utf8(data: bytes) -> Decoded:
    """``data`` as valid UTF-8 without a byte order mark; undecodable bytes become U+FFFD and are counted."""
    for mark, encoding in _MARKS:
        if data.startswith(mark):
            if encoding != "utf-8":
                return _decode(data[len(mark) :], encoding)
            data = data[len(mark) :]
    if data.isascii() or is_utf8(data):
        return Decoded(data, "utf-8")
    damaged = _decode(data, "utf-8")
    if damaged.replaced * 20 < _non_ascii(data):
        return damaged
    if declared := _declared_codec(data):
        with suppress(LookupError, UnicodeError):  # hex and the like do not decode to text
            return _decode(data, declared)
    return _detected(data)


def _decode(data: bytes, encoding: str) -> Decoded:
    text = data.decode(encoding, "replace")
    return Decoded(text.encode("utf-8", "replace"), encoding, text.count(_REPLACEMENT))


def _declared_codec(data: bytes) -> str | None:
    """The codec of a declared character set, unless the bytes are already known not to be in it."""
    declared = (declared_encoding(data) or "").lower().replace("iso latin-1", "latin-1")
    try:
        name = codecs.lookup(declared).name
    except LookupError:
        return None
    return {**_FULLER, "utf-8": None, "ascii": None, **dict.fromkeys(_NO_CHARACTER_SETS)}.get(name, name)


def _detected(data: bytes) -> Decoded:
    """``data`` in the character set that its letters are most likely in, by models of 48 languages."""
    import chardet  # few books need its models

    foreign = bytearray()  # the lines that tell anything
    for line in data.splitlines(keepends=True):
        if not line.isascii():
            foreign += line[:_DETECTION_SAMPLE]
        if len(foreign) >= _DETECTION_SAMPLE:
            break
    eras = chardet.EncodingEra.ALL & ~chardet.EncodingEra.MAINFRAME
    codec = str(chardet.detect(bytes(foreign), encoding_era=eras, compat_names=False)["encoding"] or "cp1252")
    return replace(_decode(data, _FULLER.get(codec, codec)), guessed=_non_ascii(data) < _TELLING)


def is_utf8(data: bytes) -> bool:
    """Whether ``data`` is valid UTF-8; by Arrow, 25 times faster than decoding it."""
    offsets = pa.array([0, len(data)], pa.int64()).buffers()[1]
    try:
        pa.LargeStringArray.from_buffers(1, offsets, pa.py_buffer(data)).validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def normalize(text: bytes) -> bytes:
    """``text`` (UTF-8) with ``\\n`` line ends, without control characters, soft hyphens and stray byte order marks.

    Carriage returns are common in real collections; kept, they cost 8% more tokens.
    """
    if b"\r" in text:
        without = text.replace(b"\r", b"")  # dropping one byte is five times faster than replacing two
        all_end_lines = len(text) - len(without) == _count_crlf(text)
        text = without if all_end_lines else text.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    if _has_controls(text):
        text = text.translate(_LINE_ENDS, _CONTROLS)
    if text.isascii():
        return text
    if b"\xc2" in text and _has_invisible(text):
        text = _INVISIBLE.sub(b"", text)
    return text.replace(_MARK, b"") if _MARK[:1] in text else text


def trim(text: bytes) -> bytes:
    """``text`` stripped, with one line end if anything is left. Not copied if it is so already."""
    if text.endswith(b"\n") and not text[:1].isspace() and not text[-2:-1].isspace():
        return text
    text = text.strip()
    return text + b"\n" if text else text


def join_lines(text: bytes) -> bytes:
    """``text`` with the hard-wrapped lines of a paragraph joined by spaces."""
    return _WRAPPED.sub(rb"\1 ", text)


def count_characters(text: bytes) -> int:
    """Code points in valid UTF-8: all bytes but the continuation bytes 0x80 to 0xBF."""
    if text.isascii():
        return len(text)
    return len(text) - int(np.count_nonzero(np.frombuffer(text, dtype=np.int8) < -64))


def _count_crlf(text: bytes) -> int:
    """The number of ``\\r\\n``; six times faster than ``bytes.count``."""
    return sum(
        int(np.count_nonzero(np.frombuffer(text, "<u2", (len(text) - shift) // 2, shift) == 0x0A0D))
        for shift in (0, 1)
        if len(text) > shift + 1
    )


def _has_controls(text: bytes) -> bool:
    """Whether ``text`` contains a control character other than tab, line feed and carriage return.

    Four times faster than the translation, which most texts do not need.
    """
    codes = np.frombuffer(text, np.uint8)
    # Less 11, modulo 256: tab and line feed become 254 and 255, and the controls above them 0 to 20.
    return bool(len(codes)) and (int(codes.min()) < 9 or int((codes - np.uint8(11)).min()) < 21 or b"\x7f" in text)


def _has_invisible(text: bytes) -> bool:
    """Whether ``_INVISIBLE`` matches: most texts with its first byte contain hard spaces and pound signs only."""
    codes = np.frombuffer(text, np.uint8)
    second = codes[np.flatnonzero(codes[:-1] == 0xC2) + 1]
    return bool(np.any((second < 0xA0) | (second == 0xAD)))


def _non_ascii(data: bytes) -> int:
    return int(np.count_nonzero(np.frombuffer(data, dtype=np.uint8) > 127))
