"""Activation checkpointing (arXiv 1604.06174), which stores some activations and recomputes the others.

The output of a block is the same as without checkpointing, even with dropout, because torch restores the random state
for the recomputation.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from infra.errors import UserError
from train.config import ACTIVATION_BUDGETS, Checkpointing

_MATMULS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}
_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def supports_budgets() -> bool:
    """Return whether this version of torch supports memory budgets."""
    return hasattr(torch.autograd.graph, "region_activation_memory_budget")


def check_budget_supported(checkpointing: Checkpointing) -> None:
    """Raise ``UserError`` unless this version of torch supports memory budgets."""
    if not supports_budgets():
        raise UserError(
            f"--checkpointing {checkpointing} needs torch 2.13 or later, but {torch.__version__} is installed. Use "
            "--checkpointing selective."
        )


def budget(checkpointing: Checkpointing) -> AbstractContextManager[None]:
    """Return the context of a forward pass in which compiled code stores a fraction of the activations' memory.

    torch's partitioner solves a knapsack problem to recompute the activations that take the least time. Its interface
    is documented, but a prototype.
    """
    return torch.autograd.graph.region_activation_memory_budget(ACTIVATION_BUDGETS[checkpointing])


def full(block: Callable[..., Any], *args: Any, dropout: float, **kwargs: Any) -> Any:
    """Run ``block`` and store only its input."""
    return checkpoint(block, *args, use_reentrant=False, preserve_rng_state=dropout > 0, **kwargs)


def selective(block: Callable[..., Any], *args: Any, dropout: float, **kwargs: Any) -> Any:
    """Run ``block`` and store the outputs of matrix products and attention; norms, GELU and casts are recomputed."""
    contexts = partial(_contexts, dropout)
    return checkpoint(block, *args, use_reentrant=False, context_fn=contexts, preserve_rng_state=dropout > 0, **kwargs)


def _contexts(dropout: float) -> Any:
    # An operator whose output is stored does not run again, so attention with dropout would not consume its random
    # numbers, and the next dropout would differ. So attention with dropout is recomputed.
    saved_operations = _MATMULS if dropout else _MATMULS | _ATTENTION

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in saved_operations else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
