"""Validation: the same held-out windows at every call, each once, whatever the micro-batch and the number of workers.

Losses per byte of text are comparable between vocabularies.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from pipeline.encoding.tokenizer import Tokenizer
from train.config import Batch, Cycle, divisors
from train.data.loader import BatchLoader
from train.data.windows import Windows

_COUNTED_WINDOWS = 1024
"""Number of windows whose tokens are counted at once."""


def window_count(windows: Windows, global_batch: int, cycle: Cycle) -> int:
    """Return the maximum number of windows of a validation: ``cycle.max_val_batches`` global batches, or the whole
    split if it is smaller."""
    return min(cycle.max_val_batches * global_batch, windows.count)


class ValidationPasses:
    """The forward passes over the first ``count`` of ``windows``, in the order in which a batch loader reads them.

    Compiled code relies on the shape of the training batches, and some models return only a mean loss. Therefore
    windows that do not fill the micro-batches of all workers are read in batches that repeat each window equally
    often, so that the batch's mean loss equals the windows' mean loss. The number of different windows in such a batch
    is a divisor of the micro-batch. If the last pass has fewer windows than workers, the losses of the workers without
    a window have the weight 0.
    """

    def __init__(self, windows: Windows, count: int, micro_batch: int, workers: int) -> None:
        self.context_length = windows.context_length
        self.micro_batch = micro_batch
        self._windows, self._workers = windows, workers
        whole, remainder = divmod(count, micro_batch * workers)
        self._sizes = [micro_batch] * whole
        """Different windows of each worker, by pass."""
        order = [np.arange(count - remainder)]
        sizes = divisors(micro_batch)
        while remainder:
            size = max((size for size in sizes if size * workers <= remainder), default=1)
            first = count - remainder
            of_workers = np.minimum(first + np.arange(size * workers), count - 1).reshape(workers, size)
            order.append(np.tile(of_workers, micro_batch // size).ravel())
            self._sizes.append(size)
            remainder -= min(remainder, size * workers)
        self._order = np.concatenate(order)
        self._workers_of_last = (count - 1) % workers + 1 if self._sizes[-1] == 1 else workers

    def __len__(self) -> int:
        return len(self._sizes)

    def weights(self, rank: int) -> list[float]:
        """By pass, the different windows of worker ``rank``, in micro-batches."""
        weights = [size / self.micro_batch for size in self._sizes]
        return weights if rank < self._workers_of_last else [*weights[:-1], 0.0]

    def window_ids(self, positions: np.ndarray) -> np.ndarray:
        """Return the numbers of the windows at ``positions``; a loader that reads ahead begins again after the last."""
        return self._windows.window_ids(self._order[positions % len(self._order)])

    def read(self, window_ids: np.ndarray, out: np.ndarray) -> None:
        self._windows.read(window_ids, out)

    @property
    def batch(self) -> Batch:
        """The batch of one pass over all workers."""
        return Batch(self.micro_batch * self._workers, self.micro_batch, self._workers)


@torch.no_grad()
def validate(
    passes: ValidationPasses,
    loader: BatchLoader,
    model: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    must_stop: Callable[[], bool] = lambda: False,
) -> Tensor | None:
    """Return this worker's losses by pass, each weighted by its share of a micro-batch: see :func:`mean_loss`.

    ``loader`` reads this worker's share of ``passes``, and ``loss`` is that of ``model`` on a batch. Returns None if
    ``must_stop``, which is called before each pass, returns True.
    """
    losses = torch.zeros(len(passes), device=loader.device)
    model.eval()
    for index, weight in enumerate(passes.weights(loader.share.rank)):
        if must_stop():
            model.train()
            return None
        losses[index] = loss(*loader.next())
        losses[index] *= weight
    model.train()
    return losses


def mean_loss(losses: list[float], count: int, batch: Batch) -> float:
    """Return the mean over ``count`` windows from what :func:`validate` returns, averaged over the workers."""
    return sum(losses) / (count / (batch.micro_batch * batch.workers))


def perplexity(loss: float | None) -> float | None:
    """Return exp of ``loss``, in nats per token; None when that overflows."""
    return math.exp(loss) if loss is not None and loss < 700 else None


def id_counts(windows: Windows, count: int, ids: int) -> np.ndarray:
    """Return the number of times that each of ``ids`` token ids is a target in the first ``count`` windows."""
    counts = np.zeros(ids, np.int64)
    out = np.empty((min(count, _COUNTED_WINDOWS), windows.context_length + 1), np.int64)
    for first in range(0, count, _COUNTED_WINDOWS):
        rows = out[: count - first]
        windows.read(windows.window_ids(np.arange(first, first + len(rows))), rows)
        counts += np.bincount(rows[:, 1:].ravel(), minlength=ids)
    return counts


def unigram_loss(counts: np.ndarray) -> float:
    """Return the entropy of ids that occur ``counts`` times, in nats: the lowest loss of a model that ignores its
    inputs."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


@dataclass(frozen=True)
class Text:
    """The size of the text that the model predicts in a validation."""

    tokens: int
    """Number of tokens, including the ends of books."""
    bytes: int
    """Number of bytes of the text in UTF-8."""
    chars: int
    """Number of characters of the text."""

    @classmethod
    def of(cls, counts: np.ndarray, tokenizer: Tokenizer) -> "Text":
        """Return the size of the text whose ids occur ``counts`` times; the end of a book is a token without text."""
        starts = np.array([sum(byte & 0xC0 != 0x80 for byte in token) for token in tokenizer.tokens])
        starts[tokenizer.end_of_text] = 0
        text_counts = counts[: len(tokenizer)]
        return cls(int(counts.sum()), int(text_counts @ tokenizer.lengths), int(text_counts @ starts))


def bits_per(loss: float, tokens: int, units: int) -> float | None:
    """Return ``loss``, in nats per token, as bits per byte or character of a text with ``tokens`` tokens and
    ``units``."""
    return loss / math.log(2) * tokens / units if units else None
