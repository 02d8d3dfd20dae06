"""The memory limit inside a process that trains: cap what torch may take, and say what the process took.

The limit is on the memory of the process. torch's cap counts the allocator's segments alone, so what
the process holds beside them (the CUDA context, loaded kernels, library workspaces) is measured first
and subtracted, and room is left for what is loaded later. The verdict is on what the whole process took. On the CPU
nothing is capped: the peak resident set is watched and compared.
"""

from dataclasses import dataclass

import torch

from infra.gpu import read_gpu
from train.loop import memory

UNMEASURED = 256 * 2**20
"""Bytes that a process may take beside torch's allocator after the cap is set: kernels are loaded with their first use,
above all compiled ones, and cuDNN's and NCCL's buffers with theirs."""


@dataclass(frozen=True)
class Limit:
    """A limit in bytes on this process's use of ``device``."""

    size: int
    device: torch.device
    before: int
    """Bytes in use on the GPU before this process came: the baseline where NVML hides processes (containers)."""

    @classmethod
    def impose(cls, size: int, device_type: str) -> "Limit":
        """Start CUDA, cap torch's allocator to what ``size`` leaves beside the context, and return the limit."""
        if device_type != "cuda":
            return cls(size, torch.device(device_type), 0)
        state = read_gpu()
        torch.cuda.init()
        device = torch.device("cuda", torch.cuda.current_device())
        limit = cls(size, device, state.memory_used if state else 0)
        square = torch.ones(256, 256, device=device)
        torch.mm(square, square)  # so that the libraries' own memory is there to be measured
        context = limit.used()[0] - torch.cuda.max_memory_reserved(device)
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(allocator_share(size, context, total), device)
        return limit

    def used(self) -> tuple[int, str]:
        """Peak bytes of the process, and what says so: ``nvml``, ``device`` (its growth), ``reserved`` or ``rss``."""
        measured = memory.peak(self.device)
        state = read_gpu(self.device.index or 0) if measured.process_source == "reserved" else None
        if state is None:
            return measured.process, measured.process_source
        return memory.peak_process(state.memory_used - self.before, self.device), "device"

    def excess(self) -> str:
        """By how much the process went over the limit, in words; empty when it did not."""
        used, source = self.used()
        if used <= self.size:
            return ""
        return f"the process used {used / 1e9:.2f} GB ({source}) of {self.size / 1e9:.2f} GB"


def allocator_share(size: int, context: int, total: int) -> float:
    """The fraction of a GPU of ``total`` bytes that torch's allocator may take for the process to stay in ``size``.

    ``context`` is what the process holds beside the allocator already.
    """
    return min(1.0, max(0.0, (size - context - UNMEASURED) / total))
