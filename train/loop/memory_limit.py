"""The memory limit inside a process that trains: cap torch's allocator, and check what the process used.

The limit is on the memory of the process. torch's cap applies to the allocator's segments only, so what the process
uses besides them (the CUDA context, loaded kernels, library workspaces) is measured first and subtracted, and some
memory is reserved for libraries that load later. The check is on the memory of the whole process. On the CPU nothing is
capped; the peak resident set is compared with the limit.
"""

from dataclasses import dataclass

import torch

from infra.device import host
from infra.device.gpu import read_gpu
from train.loop import memory
from train.loop.memory import AllocatorStats
from train.result import MemorySource

RESERVED_OUTSIDE_ALLOCATOR = 256 * 2**20
"""Bytes that a process may use outside torch's allocator after the cap is set: kernels, especially compiled ones, and
the buffers of cuDNN and NCCL are loaded on their first use."""


@dataclass(frozen=True)
class MemoryLimit:
    """A limit in bytes on this process's use of ``device``."""

    size: int
    device: torch.device
    baseline_bytes: int
    """Bytes in use on the GPU before this process used it: the baseline where NVML hides processes (containers)."""

    @classmethod
    def apply(cls, size: int, device_type: str) -> "MemoryLimit":
        """Initialize CUDA, cap torch's allocator to what the context leaves of ``size``, and return the limit."""
        if device_type != "cuda":
            return cls(size, torch.device(device_type), 0)
        state = read_gpu()
        torch.cuda.init()
        device = torch.device("cuda", torch.cuda.current_device())
        limit = cls(size, device, (state.memory_used or 0) if state else 0)
        square = torch.ones(256, 256, device=device)
        torch.mm(square, square)  # loads the libraries, so that their memory is measured
        context = limit.used()[0] - torch.cuda.max_memory_reserved(device)
        total = torch.cuda.get_device_properties(device).total_memory
        share = min(allocator_share(size, context, total), free_share(device))
        torch.cuda.set_per_process_memory_fraction(share, device)
        return limit

    @property
    def usable_bytes(self) -> int:
        """Bytes of the limit that tensors can use: on a GPU the cap reserves some for libraries that load later."""
        return self.size - (RESERVED_OUTSIDE_ALLOCATOR if self.device.type == "cuda" else 0)

    def used(self) -> tuple[int, MemorySource]:
        """Return the peak bytes of the process, and their source: ``nvml``, ``device`` (its growth), ``reserved`` or
        ``rss``."""
        measured = memory.peak(self.device)
        state = read_gpu(self.device.index or 0) if measured.process_source == "reserved" else None
        if state is None or state.memory_used is None:
            return measured.process, measured.process_source
        return memory.peak_process(state.memory_used - self.baseline_bytes, AllocatorStats.read(self.device)), "device"

    def excess_message(self) -> str:
        """Return a text with the memory used and the limit if the process exceeded it, else empty."""
        used, source = self.used()
        if used <= self.size:
            return ""
        return f"the process used {used / 1e9:.2f} GB ({source}), more than the limit of {self.size / 1e9:.2f} GB"


def cap_to_free_memory(device_type: str) -> None:
    """Cap torch's allocator to a GPU's free memory where more would be taken from the host instead of running out."""
    if device_type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
        share = free_share(device)
        if share < 1:
            torch.cuda.set_per_process_memory_fraction(share, device)


def free_share(device: torch.device) -> float:
    """Return the fraction of a GPU that torch's allocator can use without taking memory from the host; 1 if it cannot.

    In WSL2 memory beyond the GPU's is slow. On a GPU that shares the host's memory the kernel would kill processes.
    """
    is_integrated = torch.cuda.get_device_properties(device).is_integrated
    if not (is_integrated or host.is_wsl()):
        return 1.0
    free, total = torch.cuda.mem_get_info(device)
    if is_integrated:  # CUDA counts the page cache as used.
        free = min(total, host.available_memory())
    # An earlier run in this process may have reserved some.
    return allocator_share(free + torch.cuda.memory_reserved(device), 0, total)


def allocator_share(size: int, context: int, total: int) -> float:
    """Return the fraction of a GPU of ``total`` bytes that torch's allocator may use to keep the process within
    ``size``.

    ``context`` is what the process already uses outside the allocator.
    """
    return min(1.0, max(0.0, (size - context - RESERVED_OUTSIDE_ALLOCATOR) / total))
