"""Splitting of text into chunks that encode to the same ids as the whole text."""

import re
from collections.abc import Callable, Iterator

CHUNK_BYTES = 500_000
"""Bytes of text per call of an encoder. tiktoken rejects a text with more than a million consecutive spaces."""

# Punctuation: ASCII, general, Chinese and Japanese, fullwidth; Arabic, Devanagari, Tibetan, Burmese, Khmer.
_PUNCTUATION = (
    r"!-/:-@\u2010-\u2027\u3001-\u3003\u3008-\u3011\uff01-\uff0f\uff1a-\uff20"
    r"\u060c\u061b\u061f\u06d4\u0964\u0f0b\u104b\u17d4"
)
# Positions where text may be cut: a pre-token provably starts at whitespace after any other character, and at
# punctuation after a letter or digit. A run of whitespace without its last character is one pre-token, in which no
# token joins two of the whitespace characters listed here, except two line feeds.
_CUT_POSITION = re.compile(
    rf"(?<=\S)(?=[ \n])|(?<=[^\W_])(?=[{_PUNCTUATION}])|(?<=[ \t\n\u3000])(?=[ \t\u3000])|(?<=[ \t\u3000])(?=\n)"
)
# In every split pattern, a space after a character other than whitespace starts a pre-token.
_WORD_END = re.compile(rb"(?:(?<=[!-~])|(?<=[\xc3-\xdf][\x80-\xbf]))(?= )")
_CONTINUATION = bytes(range(0x80, 0xC0))
_WINDOW_BYTES = 4096
_MAX_REPEATED_TOKEN = 16
"""Length of the longest token that repeats one whitespace character; the lengths of shorter ones are powers of two."""


def split_into_chunks(text: bytes, size: int, find_cut: Callable[[bytes, int, int], int]) -> Iterator[bytes]:
    """Yield ``text`` in chunks of about ``size`` bytes.

    ``find_cut`` is :func:`find_boundary` or :func:`find_word_boundary`.
    """
    start = 0
    while len(text) - start > size and (end := find_cut(text, start, start + size)) < len(text):
        yield text[start:end]
        start = end
    yield text[start:] if start else text


def find_boundary(text: bytes, start: int, position: int) -> int:
    """Return the first position at or after ``position`` where ``text`` may be cut, after a cut at ``start``."""
    for window_start in range(position, len(text), _WINDOW_BYTES):
        head = text[window_start : window_start + 4]
        begin = window_start + len(head) - len(head.lstrip(_CONTINUATION))
        window = text[begin : begin + _WINDOW_BYTES].decode(errors="ignore")
        if match := _CUT_POSITION.search(window, 1):
            return begin + len(window[: match.start()].encode())
        character = window[:1]
        if character.isspace() and window.startswith(character * (_MAX_REPEATED_TOKEN + 1)):
            # Line feeds or no-break spaces are merged in twos, fours and so on from the start of their run. A space
            # before the run merges with its first character.
            preceding_text = text[start:begin].decode()
            preceding = preceding_text.rstrip(character)
            run_length = len(preceding_text) - len(preceding) - (character != "\n" and preceding.endswith(" "))
            return begin + (_MAX_REPEATED_TOKEN - run_length % _MAX_REPEATED_TOKEN) * len(character.encode())
    return len(text)


def find_word_boundary(text: bytes, start: int, position: int) -> int:
    """Return the first position at or after ``position`` where ``text`` may be cut for any split pattern and tokens."""
    match = _WORD_END.search(text, position)
    return match.start() if match else len(text)
