"""Activation checkpointing (arXiv 1604.06174): which activations of a block are kept, and which computed again.

In: a block and its input. Out: the block's output, the same as without, also under dropout: torch
restores the random state for the recomputation.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

_MATMULS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}
_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def full(block: nn.Module, *inputs: Any, dropout: float) -> Tensor:
    """Keep the block's input alone."""
    return checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=dropout > 0)


def selective(block: nn.Module, *inputs: Any, dropout: float) -> Tensor:
    """Keep what matmuls and attention gave, the costly part, and compute norms, GELU and casts again."""
    contexts = partial(_contexts, dropout)
    return checkpoint(block, *inputs, use_reentrant=False, context_fn=contexts, preserve_rng_state=dropout > 0)


def _contexts(dropout: float) -> Any:
    # An operator that is kept does not run again: attention with dropout inside would leave the random numbers
    # that it drew to the dropout behind it, so then it is computed again.
    kept = _MATMULS if dropout else _MATMULS | _ATTENTION

    def policy(context: Any, operator: Any, *arguments: Any, **named: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
