"""The one place where training meets text: token ids to characters, for samples and for losses per byte."""

from functools import cache

import numpy as np

from pipeline.encoding import VOCABULARY_SHA256, decode, encode, reference
from pipeline.shards import END_OF_TEXT


def is_gpt2(vocabulary_sha256: str) -> bool:
    """Whether ids of this vocabulary can be turned into text."""
    return vocabulary_sha256 == VOCABULARY_SHA256


@cache
def token_bytes(vocabulary_sha256: str) -> np.ndarray | None:
    """UTF-8 bytes of each token id, 0 for the end of a text; None for another vocabulary than GPT-2's."""
    if not is_gpt2(vocabulary_sha256):
        return None
    sizes = [len(reference().decode_single_token_bytes(token)) for token in range(END_OF_TEXT)]
    return np.array([*sizes, 0], dtype=np.int64)


def to_ids(text: str) -> list[int]:
    """Token ids of ``text``."""
    return encode(text.encode(), "tiktoken").tolist()


def to_text(ids: list[int]) -> str:
    """The text of ``ids``."""
    return decode(np.array(ids))
