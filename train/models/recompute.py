"""Activation checkpointing (arXiv 1604.06174): which activations are kept, and which are recomputed.

In: a block and its input. Out: the block's output, the same as without checkpointing, also with dropout: torch restores
the random state for the recomputation. Or the context of a whole forward pass, in which torch.compile chooses.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from infra.errors import UserError

_MATMULS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}
_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}


BUDGET = 0.5
"""Share of the activations' memory that is kept between recomputing all blocks (0) and nothing (1)."""


def check_budget_supported() -> None:
    """Raise ``UserError`` where this torch has no name for a budget."""
    if not hasattr(torch.autograd.graph, "region_activation_memory_budget"):
        raise UserError(f"--checkpointing budget needs torch 2.13 and there is {torch.__version__}: use selective.")


def budget() -> AbstractContextManager[None]:
    """The context of a forward pass of which compiled code keeps ``BUDGET`` of the activations' memory.

    torch's partitioner recomputes those that take the least time, by a knapsack problem. The function is documented,
    and a prototype.
    """
    return torch.autograd.graph.region_activation_memory_budget(BUDGET)


def full(block: Callable[..., Any], *inputs: Any, dropout: float, **named: Any) -> Any:
    """Keep only the block's input."""
    return checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=dropout > 0, **named)


def selective(block: Callable[..., Any], *inputs: Any, dropout: float, **named: Any) -> Any:
    """Keep the outputs of matmuls and attention, the expensive part, and recompute norms, GELU and casts."""
    contexts = partial(_contexts, dropout)
    return checkpoint(block, *inputs, use_reentrant=False, context_fn=contexts, preserve_rng_state=dropout > 0, **named)


def _contexts(dropout: float) -> Any:
    # An operator whose output is kept does not run again. Attention with dropout would then leave its random numbers to
    # the dropout after it, so with dropout it is recomputed.
    saved_operations = _MATMULS if dropout else _MATMULS | _ATTENTION

    def policy(context: Any, operator: Any, *arguments: Any, **named: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in saved_operations else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
