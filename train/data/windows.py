"""Cut token streams into windows, and compute their shuffled order.

A window is ``context_length + 1`` tokens of one shard's stream. Neighboring windows share one token, so that every
token is predicted once per epoch. The order is a pseudo-random permutation, computed from the seed and the epoch, so
that any worker can compute any batch and the position in the data is one integer.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from infra.errors import UserError

VALIDATION_SEED = 0
"""Seed of the order of validation windows, the same for all runs, so that their validation losses are comparable."""

_ROUNDS = 4
"""Number of rounds of the Feistel network in :func:`permute`."""


MAX_COUNTED_TOKENS = 1 << 22
"""Maximum number of tokens whose frequencies are counted: with 50,000 ids, the entropy of so many is 0.006 nats below
that of all (Miller 1955: (ids - 1) / 2 tokens), and counting them takes 20 ms."""

COUNTED_BLOCK = 1 << 14
"""Number of consecutive tokens that are counted together."""


class OrderedWindows(Protocol):
    """Windows of tokens in an endless order."""

    context_length: int

    def window_ids(self, positions: np.ndarray) -> np.ndarray:
        """Return the ids of the windows at ``positions`` of the order."""
        ...

    def read(self, window_ids: np.ndarray, out: np.ndarray) -> None:
        """Copy the windows ``window_ids`` into ``out``, of shape (len(window_ids), context_length + 1)."""
        ...


class Windows:
    """All windows of a split's token streams, numbered from 0, and their shuffled order by epoch."""

    def __init__(self, streams: Sequence[np.ndarray], context_length: int, seed: int, *, split: str = "train") -> None:
        self.context_length = context_length
        self.seed = seed
        self.streams = list(streams)
        counts = [max(0, (len(stream) - 1) // context_length) for stream in streams]
        self._first_ids = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts, dtype=np.int64)])
        self.count = int(self._first_ids[-1])
        check_window_fits(split, map(len, streams), context_length)

    def window_ids(self, positions: np.ndarray) -> np.ndarray:
        """Return the ids of the windows at ``positions`` of the shuffled order, which continues across epochs."""
        epochs, epoch_positions = np.divmod(positions, self.count)
        window_ids = np.empty(len(positions), dtype=np.int64)
        for epoch in np.unique(epochs):
            in_epoch = epochs == epoch
            window_ids[in_epoch] = permute(epoch_positions[in_epoch], self.count, self.seed, int(epoch))
        return window_ids

    def read(self, window_ids: np.ndarray, out: np.ndarray) -> None:
        """Copy the windows ``window_ids`` into ``out``, of shape (len(window_ids), context_length + 1)."""
        shards = np.searchsorted(self._first_ids, window_ids, side="right") - 1
        offsets = (window_ids - self._first_ids[shards]) * self.context_length
        for row, (shard, offset) in enumerate(zip(shards.tolist(), offsets.tolist(), strict=True)):
            out[row] = self.streams[shard][offset : offset + self.context_length + 1]


def count_ids(streams: Sequence[np.ndarray], vocab_size: int) -> np.ndarray:
    """Count each of ``vocab_size`` ids in the token ``streams``, or in evenly spaced blocks of longer ones."""
    total = sum(map(len, streams))
    stride = COUNTED_BLOCK * max(1, -(-total // MAX_COUNTED_TOKENS))
    counts = np.zeros(vocab_size, np.int64)
    for stream in streams:
        for start in range(0, len(stream), stride):
            counts += np.bincount(stream[start : start + COUNTED_BLOCK], minlength=vocab_size)
    return counts


def check_window_fits(split: str, lengths: Iterable[int], context_length: int) -> None:
    """Raise ``UserError`` unless a token stream of the split is as long as a window; ``lengths`` are the streams'."""
    longest, needed = max(lengths, default=0), context_length + 1
    if longest >= needed:
        return
    val_advice = "increase --val-fraction of 'python -m pipeline.tokenize', turn validation off with --cycle 20s+0, "
    raise UserError(
        f"The longest shard of the {split} split has {longest:,} tokens, but a window needs {needed:,}. Tokenize more "
        f"books, {val_advice if split == 'val' else ''}or use a shorter context length."
    )


def permute(positions: np.ndarray, count: int, seed: int, epoch: int) -> np.ndarray:
    """Apply a pseudo-random permutation of ``range(count)`` to ``positions``, without memory of size ``count``.

    The permutation is a Feistel network over the smallest even number of bits that can represent ``count``, repeated
    until the result is in range (Black and Rogaway 2002, "Ciphers with arbitrary finite domains", method 2). The round
    function is the finalizer of splitmix64 (Steele et al. 2014).
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
