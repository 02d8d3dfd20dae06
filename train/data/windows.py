"""Token streams cut into windows, in an order that is computed and not stored.

A window is ``context_length + 1`` tokens of one shard's stream, and neighbours share one token, so that every token is
predicted once per epoch. The order is a pseudo-random permutation, a pure function of (seed, epoch): any worker can
compute any batch, and the position in the data is one integer.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from infra.errors import UserError

VALIDATION_SEED = 0
"""Seed of the order of held-out windows, whatever that of a run: where not all are read, runs are to read the same."""

_ROUNDS = 4


class OrderedWindows(Protocol):
    """Windows of tokens in an endless order."""

    context_length: int

    def window_ids(self, positions: np.ndarray) -> np.ndarray:
        """Numbers of the windows at ``positions``."""
        ...

    def read(self, numbers: np.ndarray, out: np.ndarray) -> None:
        """Copy the windows ``numbers`` into ``out``, of shape (len(numbers), context_length + 1)."""
        ...


class Windows:
    """All windows of a split's token streams, numbered from 0, and their shuffled order by epoch."""

    def __init__(self, streams: Sequence[np.ndarray], context_length: int, seed: int, *, split: str = "train") -> None:
        self.context_length = context_length
        self.seed = seed
        self.streams = list(streams)
        counts = [max(0, (len(stream) - 1) // context_length) for stream in streams]
        self.first = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts, dtype=np.int64)])
        self.count = int(self.first[-1])
        refuse_short(split, map(len, streams), context_length)

    def window_ids(self, positions: np.ndarray) -> np.ndarray:
        """Numbers of the windows at ``positions`` of the shuffled order, which continues from epoch to epoch."""
        epochs, within = np.divmod(positions, self.count)
        numbers = np.empty(len(positions), dtype=np.int64)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            numbers[chosen] = permute(within[chosen], self.count, self.seed, int(epoch))
        return numbers

    def read(self, numbers: np.ndarray, out: np.ndarray) -> None:
        shards = np.searchsorted(self.first, numbers, side="right") - 1
        starts = (numbers - self.first[shards]) * self.context_length
        for row, (shard, start) in enumerate(zip(shards.tolist(), starts.tolist(), strict=True)):
            out[row] = self.streams[shard][start : start + self.context_length + 1]


def refuse_short(split: str, lengths: Iterable[int], context_length: int) -> None:
    """Raise ``UserError`` when none of the token streams of a split, which have these ``lengths``, holds a window."""
    longest, needed = max(lengths, default=0), context_length + 1
    if longest >= needed:
        return
    validated = "raise --val-fraction of 'python -m pipeline.tokenize', turn validation off with --cycle 200+0, "
    raise UserError(
        f"The {split} split's largest shard has {longest:,} tokens, and one window needs {needed:,}. Tokenize more "
        f"books, {validated if split == 'val' else ''}or use a shorter context length."
    )


def permute(positions: np.ndarray, count: int, seed: int, epoch: int) -> np.ndarray:
    """A pseudo-random permutation of ``range(count)``, applied to ``positions``; needs no memory of size ``count``.

    A Feistel network over the smallest even number of bits that holds ``count``, repeated until the result is in range
    (Black and Rogaway 2002, "Ciphers with arbitrary finite domains", method 2). The round function is splitmix64's
    finaliser (Steele et al. 2014).
    """
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half) - 1)
    keys = np.random.SeedSequence([seed, epoch]).generate_state(_ROUNDS, np.uint64)
    result = positions.astype(np.uint64)
    outside = np.ones(len(result), dtype=bool)
    while outside.any():
        left, right = result[outside] >> np.uint64(half), result[outside] & mask
        for key in keys:
            left, right = right, left ^ (_mix(right + key) & mask)
        result[outside] = (left << np.uint64(half)) | right
        outside = result >= count
    return result.astype(np.int64)


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
