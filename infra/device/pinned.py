"""Host memory for copies to and from a GPU."""

import torch
from torch import Tensor


def pinned_like(tensor: Tensor) -> Tensor:
    """Return new host memory with the shape, strides and type of ``tensor``: pinned, or pageable where none can be.

    Copies of pageable memory are correct, but slower, and the host waits for them. The amount that can be pinned is
    limited in WSL2 and in some containers, and the limit may only be reached during a run.
    """
    try:
        return torch.empty_like(tensor, device="cpu", pin_memory=True)
    except RuntimeError:
        return torch.empty_like(tensor, device="cpu")
