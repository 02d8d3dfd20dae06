"""Normalization of UTF-8 text to ``\\n`` line ends, without control characters.

The functions work on bytes, because decoding to str and back takes longer than encoding to tokens.
"""

import re
from dataclasses import dataclass

import numpy as np

# Control characters other than tab, line feed and carriage return; form feed and vertical tab are line ends.
_CONTROLS = bytes(c for c in range(32) if c not in b"\t\n\v\f") + b"\x7f"
_LINE_ENDS = bytes.maketrans(b"\v\f", b"\n\n")
_SOFT_HYPHEN, _NEXT_LINE = b"\xc2\xad", b"\xc2\x85"
# C1 controls (U+0080 to U+009F) come from Windows text that was decoded as Latin-1. By the WHATWG Encoding Standard,
# each stands for the Windows-1252 character with its code, if there is one. The literal first byte makes the patterns
# fast.
_WINDOWS_1252 = {bytes([code]): bytes([code]).decode("cp1252", "ignore").encode() for code in range(0x80, 0xA0)}
_C1 = re.compile(rb"\xc2([\x80-\x9f])")
_UNDEFINED = re.compile(rb"\xc2[\x81\x8d\x8f\x90\x9d]")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# A wrapped line of prose is long, and its continuation is not indented, unlike verse and tables, which are kept.
_WRAPPED = re.compile(rb"([^\n]{50})\n(?=[^\s*\[|=+-])")


@dataclass(frozen=True)
class Normalized:
    """Normalized ``text``, and the number of removed characters by kind."""

    text: bytes
    removed: dict[str, int]
    repaired: int = 0
    """Number of C1 controls that were replaced with the Windows-1252 characters they stand for."""


def normalize(text: bytes) -> Normalized:
    """Return ``text`` (UTF-8) with ``\\n`` line ends, without control characters, soft hyphens and byte order marks.

    Carriage returns are common in real collections, and would increase the number of tokens by 8%.
    """
    removed: dict[str, int] = {}
    if b"\r" in text:
        shortened = text.replace(b"\r", b"")  # Removing one byte is five times as fast as replacing two.
        are_all_crlf = len(text) - len(shortened) == _count_crlf(text)
        text = shortened if are_all_crlf else text.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    if _has_controls(text):
        size = len(text)
        text = text.translate(_LINE_ENDS, _CONTROLS)
        if len(text) < size:
            removed["control characters"] = size - len(text)
    if text.isascii():
        return Normalized(text, removed)
    repaired_count = 0
    if b"\xc2" in text and _has_invisible(text):
        text = _remove_character(_SOFT_HYPHEN, text, removed, "soft hyphens")
        if b"\n" not in text and text.endswith(_NEXT_LINE):  # Texts from mainframes end lines with it.
            text = text.replace(_NEXT_LINE, b"\n")
        text, undefined_count = _UNDEFINED.subn(b"", text)
        if undefined_count:
            removed["control characters"] = removed.get("control characters", 0) + undefined_count
        text, repaired_count = _C1.subn(lambda match: _WINDOWS_1252[match[1]], text)
    return Normalized(_remove_character(_BYTE_ORDER_MARK, text, removed, "byte order marks"), removed, repaired_count)


def trim(text: bytes) -> bytes:
    """Return ``text`` stripped, with one line end if it is not empty; such a text is returned without a copy."""
    if text.endswith(b"\n") and not text[:1].isspace() and not text[-2:-1].isspace():
        return text
    text = text.strip()
    return text + b"\n" if text else text


def join_lines(text: bytes) -> bytes:
    """Return ``text`` with the hard-wrapped lines of each paragraph joined by spaces."""
    return _WRAPPED.sub(rb"\1 ", text)


def count_characters(text: bytes) -> int:
    """Count the code points in valid UTF-8, which are all bytes except the continuation bytes 0x80 to 0xBF."""
    if text.isascii():
        return len(text)
    return len(text) - int(np.count_nonzero(np.frombuffer(text, dtype=np.int8) < -64))


def _remove_character(character: bytes, text: bytes, removed: dict[str, int], name: str) -> bytes:
    """Return ``text`` without ``character``; add its number to ``removed`` under ``name``."""
    if character[:1] not in text or character not in text:  # Searching for a single byte is faster.
        return text
    shortened = text.replace(character, b"")
    removed[name] = (len(text) - len(shortened)) // len(character)
    return shortened


def _count_crlf(text: bytes) -> int:
    """Count ``\\r\\n``, six times as fast as ``bytes.count``."""
    return sum(
        int(np.count_nonzero(np.frombuffer(text, "<u2", (len(text) - shift) // 2, shift) == 0x0A0D))
        for shift in (0, 1)
        if len(text) > shift + 1
    )


def _has_controls(text: bytes) -> bool:
    """Return whether ``text`` contains a control character other than tab, line feed and carriage return.

    The check takes a quarter of the time of the translation, which most texts do not need.
    """
    codes = np.frombuffer(text, np.uint8)
    # Minus 11, modulo 256, tab and line feed become 254 and 255, and the controls above them 0 to 20.
    return bool(len(codes)) and (int(codes.min()) < 9 or int((codes - np.uint8(11)).min()) < 21 or b"\x7f" in text)


def _has_invisible(text: bytes) -> bool:
    """Return whether ``text`` contains a C1 control or soft hyphen, which most texts with their first byte 0xC2 do
    not."""
    codes = np.frombuffer(text, np.uint8)
    second = codes[np.flatnonzero(codes[:-1] == 0xC2) + 1]
    return bool(np.any((second < 0xA0) | (second == 0xAD)))
