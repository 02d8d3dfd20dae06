"""Host memory for copies to and from a GPU."""

from functools import cache

import torch
from torch import Tensor

BUFFER_BYTES = 2**26
"""Size of each of the two pinned buffers."""


@cache
def pinned_buffers() -> list[Tensor]:
    """Return this process's two pinned buffers, through which checkpoints are copied; none if they cannot be pinned."""
    try:
        return [torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    except RuntimeError:
        return []


def pinned_like(tensor: Tensor) -> Tensor:
    """Return new host memory with the shape, strides and type of ``tensor``: pinned, or pageable where none can be.

    Copies of pageable memory are correct, but slower, and the host waits for them. The amount that can be pinned is
    limited in WSL2 and in some containers, and the limit may only be reached during a run. Where even
    :func:`pinned_buffers` do not fit, nothing is pinned here: torch pins each number that it reads from a GPU, and runs
    out of memory if there is nothing left.
    """
    if pinned_buffers():
        try:
            return torch.empty_like(tensor, device="cpu", pin_memory=True)
        except RuntimeError:
            pass
    return torch.empty_like(tensor, device="cpu")
