"""Peak memory, as measured: allocated, reserved, and the whole process's."""

import resource
import sys

import torch

from infra.gpu import read_gpu
from train.result import Memory


def start_peak(device: torch.device) -> None:
    """Forget earlier peaks, so that :func:`peak` speaks of what follows (the CPU's resident peak cannot be reset)."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def is_exhausted(failure: RuntimeError) -> bool:
    """Whether ``failure`` says that memory ran out; torch's allocator on the GPU alone has a class for that."""
    text = str(failure).lower()
    return any(words in text for words in ("out of memory", "can't allocate memory", "cublas_status_alloc_failed"))


def peak(device: torch.device) -> Memory:
    """Peak memory of this process on ``device``, in bytes, under its three names."""
    if device.type != "cuda":
        unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2) counts kilobytes on Linux
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        return Memory(None, None, resident, "rss")
    statistics = torch.cuda.memory_stats(device)
    reserved = torch.cuda.max_memory_reserved(device)
    state = read_gpu(device.index or 0)
    now = state.process_memory if state else None
    return Memory(
        allocated=torch.cuda.max_memory_allocated(device),
        reserved=reserved,
        process=peak_process(now, device) if now else reserved,
        process_source="nvml" if now else "reserved",
        allocator_retries=statistics.get("num_alloc_retries", 0),
    )


def peak_process(now: int, device: torch.device) -> int:
    """Peak bytes of a process that holds ``now`` on ``device``, as NVML says.

    torch's allocator gives its segments back when its cache is emptied, as before a graph is captured or memory is
    asked for again, and NVML knows no peak: what the process holds beside the segments is added to their peak.
    """
    reserved = torch.cuda.max_memory_reserved(device)
    return max(now - torch.cuda.memory_reserved(device), 0) + reserved
