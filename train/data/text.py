"""Token ids and text: for samples, for losses per byte, and for the tokenizer of an exported model."""

import itertools
import json
from functools import cache

import numpy as np

from infra.errors import UserError
from pipeline.encoding import VOCABULARY_SHA256, decode, encode, reference
from pipeline.shards import END_OF_TEXT, Manifest
from train.config import TrainConfig


def is_gpt2(vocabulary_sha256: str) -> bool:
    """Whether ids of this vocabulary can be turned into text."""
    return vocabulary_sha256 == VOCABULARY_SHA256


def refuse_foreign_ids(config: TrainConfig, manifest: Manifest) -> None:
    """Raise ``UserError`` when the data's token ids are GPT-2's and the model's vocabulary is not."""
    ids = END_OF_TEXT + 1
    if is_gpt2(manifest.vocabulary_sha256) and config.model.vocabulary != ids:
        raise UserError(
            f"{config.source} has GPT-2's {ids:,} token ids and --model has vocabulary={config.model.vocabulary:,}: "
            "leave vocabulary out of --model (padded_vocabulary is the one that may be larger)."
        )


@cache
def token_bytes(vocabulary_sha256: str) -> np.ndarray | None:
    """UTF-8 bytes of each token id, 0 for the end of a text; None for a vocabulary other than GPT-2's."""
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


def tokenizer_files(context_length: int) -> dict[str, str]:
    """GPT-2's ``vocab.json`` and ``merges.txt``, which transformers' tokenizer reads, rebuilt from the rank table.

    With ``truncation=True``, and in a warning without, it knows a model's ``context_length``.

    A merge is the pair of tokens that byte-pair encoding joins last to form a token. It is found by encoding the token
    with the ranks below its own.
    """
    ranks = {reference().decode_single_token_bytes(token): token for token in range(END_OF_TEXT)}
    letters = _letters()

    def written(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    vocabulary = {written(token): rank for token, rank in ranks.items()} | {"<|endoftext|>": END_OF_TEXT}
    merges = ["#version: 0.2"]
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) > 1:
            merges.append(" ".join(written(part) for part in _parts(token, rank, ranks)))
    settings = {
        "tokenizer_class": "GPT2Tokenizer", "bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>",
        "model_max_length": context_length,
    }  # fmt: skip
    return {
        "vocab.json": json.dumps(vocabulary, ensure_ascii=False),
        "merges.txt": "\n".join(merges) + "\n",
        "tokenizer_config.json": json.dumps(settings),
    }


def _parts(token: bytes, rank: int, ranks: dict[bytes, int]) -> list[bytes]:
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        pairs = [ranks.get(a + b, rank) for a, b in itertools.pairwise(parts)]
        first = min(range(len(pairs)), key=pairs.__getitem__)
        parts[first : first + 2] = [parts[first] + parts[first + 1]]
    return parts


def _letters() -> dict[int, str]:
    """GPT-2's printable character for each byte: the byte's own if it is printable, else one from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
