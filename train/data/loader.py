"""Shards to device batches: shuffled windows read by memory map, at an exact position.

In: opened token shards, or another source of windows. Out: micro-batches (inputs, targets) on the device. A window is
``context_length + 1`` tokens of one shard's stream, and neighbours share one token, so that every token
is predicted once an epoch. The order is a pseudo-random permutation that is computed, not stored: a
pure function of (seed, epoch), so the loader's whole state is one integer, the number of windows
consumed, and any worker can compute any batch. That is also why steps see the same windows at every
micro-batch and worker count.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from train.data.windows import OrderedWindows

PLANNED_WINDOWS = 1024
"""Windows whose order is computed at once: numpy's cost a call outweighs its work on a small batch."""


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all loaders: the allocator keeps memory by stream, and each validation would leave some behind."""
    return torch.cuda.Stream(device)


NEXT_BATCH = "throughline: next batch"
"""What a profile calls the loop's asking for a batch."""


@cache
def _readers(count: int) -> ThreadPoolExecutor:
    """Threads that read batches; one set for all loaders, because each validation makes one."""
    return ThreadPoolExecutor(count, thread_name_prefix="batches")


@dataclass(frozen=True)
class _Prepared:
    """A batch that was read: on the host, or on its way to the device until ``copied``."""

    batch: Tensor
    copied: torch.cuda.Event | None = None


class BatchLoader:
    """Micro-batches of one worker, read ahead.

    ``next()`` gives (inputs, targets), int64 of shape (micro_batch, context_length), and prepares the
    batch after it. On CUDA a batch is read into pinned memory and copied on a side stream while the one
    before it is computed on. Without ``ahead`` all of that happens when the batch is asked for. With
    ``threads`` they do the reading, and as much of the copying as is done ahead.
    """

    def __init__(
        self,
        windows: OrderedWindows,
        *,
        micro_batch: int,
        accumulation: int,
        position: int,
        device: torch.device,
        rank: int = 0,
        workers: int = 1,
        ahead: bool = True,
        threads: int = 0,
    ) -> None:
        self.windows = windows
        self.micro_batch = micro_batch
        self.accumulation = accumulation
        self.step_windows = micro_batch * accumulation * workers
        self.device = device
        self.rank = rank
        self.start = position
        self._planned = max(1, PLANNED_WINDOWS // (micro_batch * accumulation))
        self.taken = 0
        self.ahead = ahead
        cuda = device.type == "cuda" and ahead
        self._stream = _copy_stream(device) if cuda else None
        self._depth = threads + 1 if threads else int(ahead)
        shape = (micro_batch, windows.context_length + 1)
        self._host = [torch.empty(shape, dtype=torch.int64, pin_memory=cuda) for _ in range(max(2, self._depth))]
        self._copied = [torch.cuda.Event() for _ in self._host] if cuda else []
        self._prepared = 0
        self._numbers = np.zeros(0, dtype=np.int64)
        self._readers = _readers(threads) if threads else None
        self._ready: deque[Callable[[], _Prepared]] = deque()
        for _ in range(self._depth):
            self._begin()

    @property
    def position(self) -> int:
        """Windows consumed by all workers, counted in whole steps: where a resumed run goes on."""
        return self.start + self.taken // self.accumulation * self.step_windows

    @torch.profiler.record_function(NEXT_BATCH)
    def next(self) -> tuple[Tensor, Tensor]:
        """The next micro-batch, its copy to the device ordered before the current stream's further work."""
        if not self._depth:
            self._begin()
        prepared = self._ready.popleft()()
        batch = prepared.batch if self.ahead else prepared.batch.to(self.device, copy=True)
        if prepared.copied is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(prepared.copied)
            batch.record_stream(current)
        self.taken += 1
        if self._depth:
            self._begin()
        return batch[:, :-1], batch[:, 1:]

    def _places(self, step: int) -> np.ndarray:
        """Places of this worker's windows in the next few steps, planned together because each call costs more."""
        mine = self.micro_batch * self.accumulation
        steps = self.start + (step + np.arange(self._planned)) * self.step_windows
        return (steps[:, None] + self.rank * mine + np.arange(mine)).ravel()

    def _begin(self) -> None:
        """Prepare the batch behind those that are ready, or have a thread do it."""
        micro = self._prepared % (self._planned * self.accumulation)
        if micro == 0:
            self._numbers = self.windows.order(self._places(self._prepared // self.accumulation))
        numbers = self._numbers[micro * self.micro_batch : (micro + 1) * self.micro_batch]
        turn = self._prepared % len(self._host)
        self._prepared += 1
        if self._readers:
            self._ready.append(self._readers.submit(self._prepare, numbers, turn).result)
            return
        prepared = self._prepare(numbers, turn)
        self._ready.append(lambda: prepared)

    def _prepare(self, numbers: np.ndarray, turn: int) -> _Prepared:
        """Read one batch and, ahead, start its copy. The host buffers take turns, and this one's batch was taken."""
        host = self._host[turn]
        if self._stream is not None:
            self._copied[turn].synchronize()
        self.windows.read(numbers, host.numpy())
        if not self.ahead:
            return _Prepared(host)
        if self._stream is None:
            return _Prepared(host.to(self.device, copy=True))
        with torch.cuda.stream(self._stream):
            batch = host.to(self.device, non_blocking=True)
            self._copied[turn].record(self._stream)
        return _Prepared(batch, self._copied[turn])
