"""Measure peak memory: the allocated, the reserved, and the whole process's."""

import gc
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from infra.device.gpu import GpuState, read_gpu
from train.config import Execution
from train.result import Memory


def reset_peak(device: torch.device) -> None:
    """Reset earlier peaks on a GPU, so that :func:`peak` starts here; on a CPU earlier peaks stay included."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def release_cached_memory(execution: Execution) -> None:
    """Return unused cached memory to the GPU after the first step, which has allocated the optimizer's state.

    The state may lie in the middle of free memory that the next step needs as one block, such as for the logits. With
    segments of a fixed size this would increase the unused memory, so only the expandable allocator does it.
    """
    if execution.device == "cuda" and execution.allocator == "expandable":
        torch.cuda.empty_cache()


def reset_after_oom(execution: Execution) -> None:
    """Free the memory that a run which did not fit has left in this process, and reset the peak."""
    if execution.compile != "off":
        torch.compiler.reset()  # compiled code keeps the pools of its CUDA graphs
    gc.collect()
    if execution.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    else:
        forget_resident_peak()


def forget_resident_peak() -> bool:
    """Reset the peak of this process's resident set; returns whether the peak now is near the current resident set."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # by proc(5); not permitted everywhere
    return peak_rss() < 1.1 * _status_bytes("VmRSS")


def is_oom_error(failure: Exception) -> bool:
    """Return whether ``failure`` means that memory ran out; only torch's allocator on the GPU has an exception for
    that.

    Before version 2.14 torch describes the GPU's memory by NVML there, and its assertion that NVML responds hides the
    exception on a MIG slice or a Jetson (pytorch issue 197312).
    """
    text = str(failure).lower()
    phrases = ("out of memory", "can't allocate memory", "cublas_status_alloc_failed")
    is_hidden = "nvml_success ==" in text and "cudacachingallocator" in text
    return isinstance(failure, RuntimeError) and (is_hidden or any(phrase in text for phrase in phrases))


def peak(device: torch.device) -> Memory:
    """Return the peak memory of this process on ``device`` in bytes, measured in three ways."""
    if device.type != "cuda":
        return Memory(None, None, peak_rss(), "rss")
    capacity = torch.cuda.get_device_properties(device).total_memory
    return replace(gpu_peak(AllocatorStats.read(device), read_gpu(device.index or 0)), capacity=capacity)


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
    """Return the peak memory of this process on a GPU that NVML reports to be in ``state``."""
    now = state.process_memory if state else None
    return Memory(
        allocated=stats.max_allocated,
        reserved=stats.max_reserved,
        process=peak_process(now, stats) if now else stats.max_reserved,
        process_source="nvml" if now else "reserved",
        allocator_retries=stats.retries,
    )


def peak_rss() -> int:
    """Return the peak resident set of this process in bytes, by proc(5).

    getrusage(2) also counts what the process that started this one had resident, such as a notebook's kernel.
    """
    return _status_bytes("VmHWM")


def _status_bytes(name: str) -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    return int(status.partition(f"{name}:")[2].split(maxsplit=1)[0]) * 1024


def peak_process(now: int, stats: AllocatorStats) -> int:
    """Return the peak bytes of a process that uses ``now`` bytes of a GPU according to NVML.

    torch's allocator returns its segments when its cache is emptied, for example before a graph is captured or when an
    allocation is retried, and NVML does not report peaks. Therefore the memory besides the segments is added to the
    peak of the segments.
    """
    return max(now - stats.reserved, 0) + stats.max_reserved
