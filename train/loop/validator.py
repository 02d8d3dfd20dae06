"""The validations of a run: on how many windows, which is decided once, and how long a forward pass takes."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from train.config import Batch
from train.data.loader import BatchLoader, WorkerShare
from train.data.windows import Windows
from train.loop import timing
from train.loop.validation import ValidationPasses, validate

CACHED_PASS_SECONDS = 1.0
"""Length of a first forward pass below which a second one is timed, because the first one fills caches."""

Loss = Callable[[Tensor, Tensor], Tensor]


class Validator:
    """Runs the validations of a run on the same windows.

    Args:
        windows: the windows of the validation split.
        max_windows: the maximum number of windows of a validation.
        batch: the division of a step, whose micro-batches and workers a validation has, too.
        rank: the number of this worker.
        device: device of the batches.
        threads: number of threads that prefetch batches.
    """

    def __init__(
        self, windows: Windows, max_windows: int, batch: Batch, rank: int, device: torch.device, threads: int = 0
    ) -> None:
        self._windows, self._max_windows, self._batch = windows, max_windows, batch
        self._rank, self._device, self._threads = rank, device, threads
        self._planned: dict[int, ValidationPasses] = {}

    def passes(self, count: int) -> int:
        """Return the number of forward passes of a validation of ``count`` windows."""
        return len(self._passes(count))

    def windows_of(self, passes: int) -> int:
        """Return the number of windows of at most ``passes`` forward passes."""
        return min(passes * self._batch.micro_batch * self._batch.workers, self._max_windows)

    def run(
        self, count: int, model: nn.Module, loss: Loss, must_stop: Callable[[], bool] = lambda: False
    ) -> Tensor | None:
        """Queue a validation of ``count`` windows, and return what :func:`train.loop.validation.validate` returns."""
        passes = self._passes(count)
        share = WorkerShare(passes.batch, rank=self._rank)
        loader = BatchLoader(passes, share, self._device, threads=self._threads)
        return validate(passes, loader, model, loss, must_stop)

    def pass_seconds(self, model: nn.Module, loss: Loss, clock: Callable[[], float], *, compiles: bool) -> float:
        """Return the seconds of a forward pass, after one that compiles it, if it ``compiles``, or fills caches."""
        count = self.windows_of(1)
        seconds = self._timed(count, model, loss, clock)
        if compiles or seconds < CACHED_PASS_SECONDS:
            seconds = self._timed(count, model, loss, clock)
        return seconds / self.passes(count)

    def _timed(self, count: int, model: nn.Module, loss: Loss, clock: Callable[[], float]) -> float:
        start = clock()
        self.run(count, model, loss)
        timing.wait_for(timing.mark(self._device))
        return clock() - start

    def _passes(self, count: int) -> ValidationPasses:
        if count not in self._planned:
            self._planned[count] = ValidationPasses(self._windows, count, self._batch.micro_batch, self._batch.workers)
        return self._planned[count]
