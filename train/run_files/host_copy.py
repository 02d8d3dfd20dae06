"""Copies of a GPU's tensors in the host's memory, through one pair of pinned buffers that all checkpoints reuse.

Only pinned memory is copied at full speed while the host does something else, and torch rounds each pinned allocation
up to a power of two. Here a buffer is filled by the GPU while the other one is emptied into ordinary memory.
"""

import threading
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from infra.device.pinned import BUFFER_BYTES, pinned_buffers

Pair = tuple[Tensor, Tensor]
"""A tensor on a GPU, and one on the host that it is copied to."""


class PendingCopies:
    """Copies of a GPU's tensors that another thread makes with :meth:`run`.

    The tensors must not change before :meth:`wait` returns. Without a GPU there is nothing to copy or to wait for.
    """

    def __init__(self) -> None:
        self._pairs: list[Pair] = []
        self._ready: torch.cuda.Event | None = None
        self._done = threading.Event()

    def add(self, tensor: Tensor) -> Tensor:
        """Return the host's tensor that ``tensor`` of a GPU is copied to later."""
        self._pairs.append((tensor, torch.empty_like(tensor, device="cpu")))
        return self._pairs[-1][1]

    def mark_ready(self) -> None:
        """Let the copies begin when the GPU has done what has been queued so far."""
        if torch.cuda.is_initialized():
            self._ready = torch.cuda.Event()
            self._ready.record()

    def run(self) -> None:
        """Make the copies."""
        try:
            if self._ready:
                self._ready.synchronize()
            copy_to_host(self._pairs)
        finally:
            self._pairs.clear()
            self._done.set()

    def wait(self) -> None:
        """Wait until the tensors may change."""
        self._done.wait()


def copy_to_host(pairs: Iterable[Pair]) -> None:
    """Copy tensors of one GPU, whose values are complete, to the host, and wait for it."""
    pairs = list(pairs)
    if not pairs:
        return
    with torch.cuda.device(pairs[0][0].device):
        buffers = pinned_buffers()
        if not buffers:  # The system limits pinned memory. A copy without it is correct, only slower.
            for source, target in pairs:
                target.copy_(source)
            return
        stream = torch.cuda.Stream()
        filled: list[tuple[Tensor, Tensor, torch.cuda.Event]] = []
        for number, (source, target) in enumerate(_parts(pairs)):
            buffer = buffers[number % 2][: source.numel()]
            with torch.cuda.stream(stream):
                buffer.copy_(source, non_blocking=True)
                is_filled = torch.cuda.Event()
                is_filled.record()
            filled.append((buffer, target, is_filled))
            if len(filled) == 2:
                _empty(*filled.pop(0))
        for part in filled:
            _empty(*part)


def _empty(buffer: Tensor, target: Tensor, is_filled: torch.cuda.Event) -> None:
    is_filled.synchronize()
    target.copy_(buffer)


def _parts(pairs: Iterable[Pair]) -> Iterator[Pair]:
    """Split the bytes of each pair into parts that fit in a buffer."""
    for source, target in pairs:
        if source.stride() != target.stride():  # The source repeats or skips elements.
            source = torch.empty_like(source).copy_(source)
        if source.numel():
            yield from zip(_bytes(source).split(BUFFER_BYTES), _bytes(target).split(BUFFER_BYTES), strict=True)


def _bytes(tensor: Tensor) -> Tensor:
    """Return the memory of ``tensor``, which has no gaps, in the order of its elements there."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
