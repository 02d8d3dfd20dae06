"""Measured peak memory: allocated, reserved, and that of the whole process."""

import gc
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from infra.device.gpu import GpuState, read_gpu
from train.config import Execution
from train.result import Memory


def reset_peak(device: torch.device) -> None:
    """Reset earlier peaks on a GPU, so that :func:`peak` covers what follows; on a CPU what was before counts too."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def release_cached_memory(execution: Execution) -> None:
    """Return what is not in use after the first step, which has put the optimizer's state where it found room.

    That may be in the middle of what the next step needs in one piece, such as the logits, and would leave a hole.
    Segments of a fixed size would rather leave more unused afterwards.
    """
    if execution.device == "cuda" and execution.allocator == "expandable":
        torch.cuda.empty_cache()


def reset_after_oom(execution: Execution) -> None:
    """Free what the run of ``config``, which did not fit, has left in this process, and forget its peak."""
    if execution.compile != "off":
        torch.compiler.reset()  # compiled code keeps the pools of its CUDA graphs
    gc.collect()
    if execution.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    else:
        forget_resident_peak()


def forget_resident_peak() -> bool:
    """Begin the peak of this process's resident set anew; returns whether it is now about what is resident."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # by proc(5); not permitted everywhere
    return peak_rss() < 1.1 * _status_bytes("VmRSS")


def is_oom_error(failure: Exception) -> bool:
    """Whether ``failure`` means that memory ran out; only torch's allocator on the GPU has an exception for that."""
    text = str(failure).lower()
    signs = ("out of memory", "can't allocate memory", "cublas_status_alloc_failed")
    return isinstance(failure, RuntimeError) and any(words in text for words in signs)


def peak(device: torch.device) -> Memory:
    """Peak memory of this process on ``device`` in bytes, measured in three ways."""
    if device.type != "cuda":
        return Memory(None, None, peak_rss(), "rss")
    return gpu_peak(AllocatorStats.read(device), read_gpu(device.index or 0))


@dataclass(frozen=True)
class AllocatorStats:
    """Counters of torch's allocator on a GPU, in bytes."""

    reserved: int
    max_reserved: int
    max_allocated: int
    retries: int = 0
    """Number of allocations that succeeded only after the cache was emptied."""

    @classmethod
    def read(cls, device: torch.device) -> "AllocatorStats":
        return cls(
            torch.cuda.memory_reserved(device),
            torch.cuda.max_memory_reserved(device),
            torch.cuda.max_memory_allocated(device),
            torch.cuda.memory_stats(device).get("num_alloc_retries", 0),
        )


def gpu_peak(stats: AllocatorStats, state: GpuState | None) -> Memory:
    """Peak memory of this process on a GPU that NVML reports to be in ``state``."""
    now = state.process_memory if state else None
    return Memory(
        allocated=stats.max_allocated,
        reserved=stats.max_reserved,
        process=peak_process(now, stats) if now else stats.max_reserved,
        process_source="nvml" if now else "reserved",
        allocator_retries=stats.retries,
    )


def peak_rss() -> int:
    """Peak resident set of this process in bytes, by proc(5).

    getrusage(2) also counts what the process that started this one had resident, such as a notebook's kernel.
    """
    return _status_bytes("VmHWM")


def _status_bytes(name: str) -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    return int(status.partition(f"{name}:")[2].split(maxsplit=1)[0]) * 1024


def peak_process(now: int, stats: AllocatorStats) -> int:
    """Peak bytes of a process that uses ``now`` bytes of a GPU according to NVML.

    torch's allocator returns its segments when its cache is emptied, for example before a graph is captured or when an
    allocation is retried, and NVML does not report peaks. So what the process uses besides the segments is added to
    the peak of the segments.
    """
    return max(now - stats.reserved, 0) + stats.max_reserved
