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
import tiktoken

from infra.errors import UserError
from pipeline.shards import END_OF_TEXT

VOCABULARY = Path(__file__).with_name("gpt2.tiktoken")
VOCABULARY_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"

# The pattern of r50k_base as tiktoken publishes it (tiktoken_ext/openai_public.py).
_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""

CHUNK = 8_000_000
"""Bytes per call of an encoder: the uint32 ids of a 2 GB book would otherwise need gigabytes."""

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

# A space between two ASCII letters always starts a new pre-token, so text may be cut before it.
_CUT = re.compile(rb"(?<=[A-Za-z]) (?=[A-Za-z])")

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


@cache
def _fast() -> gigatoken.Tokenizer:
    vocabulary()
    return gigatoken.Tokenizer.from_tiktoken(VOCABULARY, pretokenizer="r50k", special_tokens={})


def encode(text: bytes, encoder: EncoderName = "gigatoken") -> np.ndarray:
    """Token ids (uint16) of ``text``, which must be valid UTF-8; no end-of-text token is added.

    A text with one of the newest letters is always encoded by tiktoken.
    """
    if encoder == "tiktoken" or any(first in text and letter.search(text) for first, letter in _NEWEST.items()):
        parts = [reference().encode_to_numpy(chunk.decode(), disallowed_special=()) for chunk in chunks(text)]
    else:
        parts = [_fast().encode(chunk) for chunk in chunks(text)]
    ids = [part.astype(np.uint16) for part in parts]
    return ids[0] if len(ids) == 1 else np.concatenate(ids)


def chunks(text: bytes, size: int = CHUNK) -> Iterator[bytes]:
    """``text`` in chunks of about ``size`` bytes that encode to the same ids as the whole."""
    start = 0
    while len(text) - start > size:
        cut = _CUT.search(text, start + size)
        if cut is None:
            break
        yield text[start : cut.start()]
        start = cut.start()
    yield text[start:] if start else text


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
