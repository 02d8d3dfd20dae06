"""UTF-8 text to GPT-2 token ids, exactly those of tiktoken's ``encode_ordinary``.

The fast encoder and the reference that checks it are built from one rank table that is package data, so
nothing is downloaded, and the table is checked against the hash that tiktoken itself pins. Neither knows
special tokens: a book that contains the characters ``<|endoftext|>`` must not end there.
"""

import base64
import hashlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Literal

import gigatoken
import numpy as np
import psutil
import tiktoken

from infra.errors import UserError
from pipeline.shards import END_OF_TEXT

VOCABULARY = Path(__file__).with_name("gpt2.tiktoken")
VOCABULARY_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"

# The pattern of r50k_base as tiktoken publishes it (tiktoken_ext/openai_public.py).
_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""

CHUNK = 500_000
"""Bytes per call of an encoder. tiktoken refuses a text with more than a million blanks in a row."""

CACHE = 100_000_000
"""Bytes by which this process may grow before the fast encoder is made again, which takes 0.2 s with learning the usual
words: it never forgets a word, at 63 bytes each in a table that doubles. This limit keeps it below 300 MB."""
LOOK = 4_000_000
"""Bytes of text between two looks at the size of this process."""

# Letters and digits new in Unicode 17, in UTF-8, and some of their neighbours: tiktoken and gigatoken have tables of
# different versions, and split words at them differently. By first byte, which few books contain: searching for one
# byte takes 1% of the time of encoding, and for a pattern 20%.
_NEWEST = {
    b"\xe0": re.compile(rb"\xe0(?:\xa2\x8f|[\xb1\xb3]\x9c)"),
    b"\xea": re.compile(rb"\xea\x9f[\x8e\x8f\x92\x94\xb1]"),
    b"\xf0": re.compile(
        rb"\xf0(?:\x90[\xa5\xbb]|\x91[\xb6\xb7]|\x96[\xba\xbb\xbf]|\x98[\x9f\xb4\xb6\xb7]|\x9e\x9b|\xab\x9c|\xac\xba"
        rb"|\xb2[\x8e-\xbf]|\xb3[\x80-\x91])"
    ),
}

# ASCII, general, Chinese and Japanese, fullwidth; Arabic, Devanagari, Tibetan, Burmese, Khmer.
_PUNCTUATION = (
    r"!-/:-@\u2010-\u2027\u3001-\u3003\u3008-\u3011\uff01-\uff0f\uff1a-\uff20"
    r"\u060c\u061b\u061f\u06d4\u0964\u0f0b\u104b\u17d4"
)
# Where text may be cut: a pre-token provably starts at whitespace after anything else, and at punctuation after a
# letter or digit. A run of whitespace but its last character is one pre-token, in which no token joins two of the
# blanks named here, except two line feeds.
_CUT = re.compile(
    rf"(?<=\S)(?=[ \n])|(?<=[^\W_])(?=[{_PUNCTUATION}])|(?<=[ \t\n\u3000])(?=[ \t\u3000])|(?<=[ \t\u3000])(?=\n)"
)
_CONTINUATION = bytes(range(0x80, 0xC0))
_WINDOW = 4096
_ALIKE = 16
"""Characters of the longest token that repeats one blank. The others have a power of two, but for what ends a run."""

EncoderName = Literal["gigatoken", "tiktoken"]


class EncodingMismatch(UserError):
    """The fast encoder and tiktoken gave different ids."""


def vocabulary() -> bytes:
    """The rank table's bytes; raises ``UserError`` when they are not the published ones."""
    table = VOCABULARY.read_bytes()
    found = hashlib.sha256(table).hexdigest()
    if found != VOCABULARY_SHA256:
        raise UserError(
            f"{VOCABULARY} is not GPT-2's vocabulary (its sha256 is {found}): install this program again with "
            "'pip install --force-reinstall --no-deps .' in its folder."
        )
    return table


@cache
def reference() -> tiktoken.Encoding:
    """tiktoken's GPT-2 encoding, built offline."""
    pairs = (line.split() for line in vocabulary().splitlines())
    ranks = {base64.b64decode(token): int(rank) for token, rank in pairs}
    return tiktoken.Encoding(
        "gpt2",
        pat_str=_PATTERN,
        mergeable_ranks=ranks,
        special_tokens={"<|endoftext|>": END_OF_TEXT},
        explicit_n_vocab=END_OF_TEXT + 1,
    )


class _Fast:
    """gigatoken, which remembers every word that it meets, made again before that takes too much memory."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._make()

    def _make(self) -> None:
        self._tokenizer = gigatoken.Tokenizer.from_tiktoken(VOCABULARY, pretokenizer="r50k", special_tokens={})
        self._smallest = self._process.memory_info().rss  # because large books come and go beside it
        self._since_look = 0

    def encode(self, text: bytes) -> np.ndarray:
        """The ids of ``text``, uint32."""
        self._since_look += len(text)
        if self._since_look > LOOK:
            self._since_look, size = 0, self._process.memory_info().rss
            self._smallest = min(self._smallest, size)
            if size > self._smallest + CACHE:
                del self._tokenizer  # before the next one needs memory
                self._make()
        return self._tokenizer.encode(text)


@cache
def _fast() -> _Fast:
    vocabulary()
    return _Fast()


def encode(text: bytes, encoder: EncoderName = "gigatoken") -> np.ndarray:
    """Token ids (uint16) of ``text``, which must be valid UTF-8; no end-of-text token is added.

    A chunk with one of the newest letters is always encoded by tiktoken.
    """
    ids = [_encode(chunk, encoder).astype(np.uint16) for chunk in chunks(text)]
    return ids[0] if len(ids) == 1 else np.concatenate(ids)


def _encode(text: bytes, encoder: EncoderName) -> np.ndarray:
    if encoder == "tiktoken" or any(first in text and letter.search(text) for first, letter in _NEWEST.items()):
        return reference().encode_to_numpy(text.decode(), disallowed_special=())
    return _fast().encode(text)


def chunks(text: bytes, size: int = CHUNK) -> Iterator[bytes]:
    """``text`` in chunks of about ``size`` bytes that encode to the same ids as the whole."""
    start = 0
    while len(text) - start > size and (cut := _cut(text, start, start + size)) < len(text):
        yield text[start:cut]
        start = cut
    yield text[start:] if start else text


def _cut(text: bytes, start: int, at: int) -> int:
    """The first place from ``at`` on where ``text`` may be cut, after a cut at ``start``."""
    for near in range(at, len(text), _WINDOW):
        head = text[near : near + 4]
        begin = near + len(head) - len(head.lstrip(_CONTINUATION))
        window = text[begin : begin + _WINDOW].decode(errors="ignore")
        if found := _CUT.search(window, 1):
            return begin + len(window[: found.start()].encode())
        blank = window[:1]
        if blank.isspace() and window.startswith(blank * (_ALIKE + 1)):
            # Line feeds or no-break spaces, which are joined by twos, fours and so on from the beginning of their run,
            # of which a space takes the first.
            before = text[start:begin].decode()
            other = before.rstrip(blank)
            alike = len(before) - len(other) - (blank != "\n" and other.endswith(" "))
            return begin + (_ALIKE - alike % _ALIKE) * len(blank.encode())
    return len(text)


VERIFIED_BYTES = 300_000
"""Bytes of a book that are compared: tiktoken takes 0.2 s for them."""


def verify(book: str, text: bytes, ids: np.ndarray) -> int:
    """Compare ``ids`` of ``text`` with tiktoken's, over about ``VERIFIED_BYTES``; return the bytes compared.

    Raises ``EncodingMismatch`` naming ``book`` and the first difference.
    """
    head = next(chunks(text, VERIFIED_BYTES))
    expected = reference().encode_to_numpy(head.decode(), disallowed_special=()).astype(np.uint16)
    found = ids[: len(expected)] if len(head) < len(text) else ids
    if np.array_equal(expected, found):
        return len(head)
    common = min(len(expected), len(found))
    differs = np.nonzero(expected[:common] != found[:common])[0]
    where = int(differs[0]) if len(differs) else common
    raise EncodingMismatch(
        f"the book {book} is encoded differently than by tiktoken from token {where:,} on "
        f"({found[where : where + 4].tolist()} instead of {expected[where : where + 4].tolist()}): "
        "use --encoder tiktoken, and report the versions of gigatoken and tiktoken with this book."
    )


def decode(ids: np.ndarray) -> str:
    """The text of ``ids``; a cut inside a character shows as a replacement character."""
    return reference().decode(ids.tolist())
