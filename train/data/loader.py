"""Load shuffled windows of tokens as batches on the device, from an exact position.

The state of a loader is one integer, the number of windows consumed. Any worker can compute any batch from it, and a
step has the same windows at every micro-batch and number of workers.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from infra.device.pinned import pinned_like
from train.config import Batch
from train.data.windows import OrderedWindows

PLANNED_WINDOWS = 1024
"""Number of windows whose order is computed in one call of numpy, because small calls are mostly overhead."""


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the CUDA stream in which all loaders copy batches.

    The allocator caches memory per stream, so a stream per loader would reserve more memory with each validation.
    """
    return torch.cuda.Stream(device)


NEXT_BATCH = "throughline: next batch"
"""Name of the loop's requests for a batch in a profile."""


@cache
def _readers(count: int) -> ThreadPoolExecutor:
    """Return the thread pool in which all loaders read batches, because each validation creates a new loader."""
    return ThreadPoolExecutor(count, thread_name_prefix="batches")


@dataclass(frozen=True)
class _ReadyBatch:
    """A batch on the host, or a batch on the device whose copy ends with the event ``copy_done``."""

    batch: Tensor
    copy_done: torch.cuda.Event | None = None


@dataclass(frozen=True)
class WorkerShare:
    """The windows that one worker reads: its part of every step of all workers."""

    batch: Batch
    position: int = 0
    """Number of windows consumed by all workers before the first step."""
    rank: int = 0
    """Number of the worker, whose windows of a step are consecutive."""

    def positions(self, steps: np.ndarray) -> np.ndarray:
        """Return the positions of the worker's windows in ``steps``, which are counted from 0."""
        worker_windows = self.batch.micro_batch * self.batch.accumulation
        starts = self.position + steps * self.batch.global_batch + self.rank * worker_windows
        return (starts[:, None] + np.arange(worker_windows)).ravel()


class BatchLoader:
    """The micro-batches of one worker, which are prefetched.

    ``next()`` returns (inputs, targets), int64 of shape (micro_batch, context_length), and prefetches another batch. On
    CUDA a batch is read into pinned memory and copied on a side stream while the model computes on the previous batch.

    Args:
        windows: windows of tokens in the order of training.
        share: the part of the windows that this worker reads.
        device: device of the batches.
        prefetch: whether batches are read and copied before they are requested.
        threads: number of threads that prefetch; with 0 the calling thread does.
    """

    def __init__(
        self,
        windows: OrderedWindows,
        share: WorkerShare,
        device: torch.device,
        *,
        prefetch: bool = True,
        threads: int = 0,
    ) -> None:
        self.windows = windows
        self.share = share
        self.device = device
        self._micro_batch, self._accumulation = share.batch.micro_batch, share.batch.accumulation
        self._planned_steps = max(1, PLANNED_WINDOWS // (self._micro_batch * self._accumulation))
        self._batches_taken = 0
        self.prefetch = prefetch
        cuda = device.type == "cuda" and prefetch
        self._stream = _copy_stream(device) if cuda else None
        self._depth = threads + 1 if threads else int(prefetch)
        shape = (self._micro_batch, windows.context_length + 1)
        buffers = [torch.empty(shape, dtype=torch.int64) for _ in range(max(2, self._depth))]
        self._host = [pinned_like(buffer) for buffer in buffers] if cuda else buffers
        self._copies_done = [torch.cuda.Event() for _ in self._host] if cuda else []
        self._batches_requested = 0
        self._window_ids = np.zeros(0, dtype=np.int64)
        self._readers = _readers(threads) if threads else None
        self._ready: deque[Callable[[], _ReadyBatch]] = deque()
        for _ in range(self._depth):
            self._prefetch_next()

    @property
    def position(self) -> int:
        """Number of windows consumed by all workers in whole steps, from which a run can be resumed."""
        return self.share.position + self._batches_taken // self._accumulation * self.share.batch.global_batch

    @torch.profiler.record_function(NEXT_BATCH)
    def next(self) -> tuple[Tensor, Tensor]:
        """Return the next micro-batch; later work in the current CUDA stream waits for its copy to the device."""
        if not self._depth:
            self._prefetch_next()
        ready = self._ready.popleft()()
        batch = ready.batch if self.prefetch else ready.batch.to(self.device, copy=True)
        if ready.copy_done is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(ready.copy_done)
            batch.record_stream(current)
        self._batches_taken += 1
        if self._depth:
            self._prefetch_next()
        return batch[:, :-1], batch[:, 1:]

    def _prefetch_next(self) -> None:
        """Prepare one more batch, in a thread if there are any."""
        micro = self._batches_requested % (self._planned_steps * self._accumulation)
        if micro == 0:
            steps = self._batches_requested // self._accumulation + np.arange(self._planned_steps)
            self._window_ids = self.windows.window_ids(self.share.positions(steps))
        window_ids = self._window_ids[micro * self._micro_batch : (micro + 1) * self._micro_batch]
        buffer_index = self._batches_requested % len(self._host)
        self._batches_requested += 1
        if self._readers:
            self._ready.append(self._readers.submit(self._prepare, window_ids, buffer_index).result)
            return
        ready = self._prepare(window_ids, buffer_index)
        self._ready.append(lambda: ready)

    def _prepare(self, window_ids: np.ndarray, buffer_index: int) -> _ReadyBatch:
        """Read a batch into the host buffer ``buffer_index``, and with ``prefetch`` start its copy to the device.

        The previous batch of the buffer has been returned by ``next()``, or its copy is waited for.
        """
        host = self._host[buffer_index]
        if self._stream is not None:
            self._copies_done[buffer_index].synchronize()
        self.windows.read(window_ids, host.numpy())
        if not self.prefetch:
            return _ReadyBatch(host)
        if self._stream is None:
            return _ReadyBatch(host.to(self.device, copy=True))
        with torch.cuda.stream(self._stream):
            batch = host.to(self.device, non_blocking=True)
            self._copies_done[buffer_index].record(self._stream)
        return _ReadyBatch(batch, self._copies_done[buffer_index])
