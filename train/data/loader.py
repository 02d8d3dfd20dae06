"""Shards to device batches: shuffled windows read by memory map, at an exact position.

The loader's whole state is one integer, the number of windows consumed: any worker can compute any batch, and steps see
the same windows at every micro-batch and number of workers.
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
"""Windows whose order is computed at once: on small batches numpy's cost per call exceeds that of its work."""


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for all loaders: the allocator keeps memory per stream, and each validation would leave some."""
    return torch.cuda.Stream(device)


NEXT_BATCH = "throughline: next batch"
"""The name in a profile of the loop's requests for a batch."""


@cache
def _readers(count: int) -> ThreadPoolExecutor:
    """Threads that read batches; one set for all loaders, because each validation creates a loader."""
    return ThreadPoolExecutor(count, thread_name_prefix="batches")


@dataclass(frozen=True)
class _ReadyBatch:
    """A batch that was read: on the host, or on its way to the device until ``copied``."""

    batch: Tensor
    copied: torch.cuda.Event | None = None


class BatchLoader:
    """Micro-batches of one worker, read ahead.

    ``next()`` returns (inputs, targets), int64 of shape (micro_batch, context_length), and prepares the following
    batch. On CUDA a batch is read into pinned memory and copied on a side stream while the model computes on the one
    before it. Without ``prefetch`` all of that happens when a batch is requested. ``threads`` is the number of threads
    that read, and do the part of the copying that happens ahead; with 0 the calling thread does.
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
        prefetch: bool = True,
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
        self.batches_taken = 0
        self.prefetch = prefetch
        cuda = device.type == "cuda" and prefetch
        self._stream = _copy_stream(device) if cuda else None
        self._depth = threads + 1 if threads else int(prefetch)
        shape = (micro_batch, windows.context_length + 1)
        self._host = [torch.empty(shape, dtype=torch.int64, pin_memory=cuda) for _ in range(max(2, self._depth))]
        self._copied = [torch.cuda.Event() for _ in self._host] if cuda else []
        self._prepared = 0
        self._numbers = np.zeros(0, dtype=np.int64)
        self._readers = _readers(threads) if threads else None
        self._ready: deque[Callable[[], _ReadyBatch]] = deque()
        for _ in range(self._depth):
            self._prefetch_next()

    @property
    def position(self) -> int:
        """Windows consumed by all workers, in whole steps: where a resumed run continues."""
        return self.start + self.batches_taken // self.accumulation * self.step_windows

    @torch.profiler.record_function(NEXT_BATCH)
    def next(self) -> tuple[Tensor, Tensor]:
        """The next micro-batch; later work in the current stream waits for its copy to the device."""
        if not self._depth:
            self._prefetch_next()
        prepared = self._ready.popleft()()
        batch = prepared.batch if self.prefetch else prepared.batch.to(self.device, copy=True)
        if prepared.copied is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(prepared.copied)
            batch.record_stream(current)
        self.batches_taken += 1
        if self._depth:
            self._prefetch_next()
        return batch[:, :-1], batch[:, 1:]

    def _window_positions(self, step: int) -> np.ndarray:
        """Places of this worker's windows in the next few steps; planned together because each call is expensive."""
        mine = self.micro_batch * self.accumulation
        steps = self.start + (step + np.arange(self._planned)) * self.step_windows
        return (steps[:, None] + self.rank * mine + np.arange(mine)).ravel()

    def _prefetch_next(self) -> None:
        """Prepare the batch after those that are ready, or have a thread do it."""
        micro = self._prepared % (self._planned * self.accumulation)
        if micro == 0:
            self._numbers = self.windows.window_ids(self._window_positions(self._prepared // self.accumulation))
        numbers = self._numbers[micro * self.micro_batch : (micro + 1) * self.micro_batch]
        buffer_index = self._prepared % len(self._host)
        self._prepared += 1
        if self._readers:
            self._ready.append(self._readers.submit(self._prepare, numbers, buffer_index).result)
            return
        prepared = self._prepare(numbers, buffer_index)
        self._ready.append(lambda: prepared)

    def _prepare(self, numbers: np.ndarray, buffer_index: int) -> _ReadyBatch:
        """Read a batch into host buffer ``buffer_index``, whose last one has been taken, and with ``prefetch`` start
        its copy."""
        host = self._host[buffer_index]
        if self._stream is not None:
            self._copied[buffer_index].synchronize()
        self.windows.read(numbers, host.numpy())
        if not self.prefetch:
            return _ReadyBatch(host)
        if self._stream is None:
            return _ReadyBatch(host.to(self.device, copy=True))
        with torch.cuda.stream(self._stream):
            batch = host.to(self.device, non_blocking=True)
            self._copied[buffer_index].record(self._stream)
        return _ReadyBatch(batch, self._copied[buffer_index])
