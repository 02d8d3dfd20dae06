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
    process = state.process_memory if state else None
    return Memory(
        allocated=torch.cuda.max_memory_allocated(device),
        reserved=reserved,
        process=max(process or 0, reserved),  # NVML's is of this moment
        process_source="nvml" if process else "reserved",
        allocator_retries=statistics.get("num_alloc_retries", 0),
    )
