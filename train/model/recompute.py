"""Activation checkpointing (arXiv 1604.06174): which activations of a block are kept, and which are recomputed.

In: a block and its input. Out: the block's output, the same as without checkpointing, also with dropout: torch restores
the random state for the recomputation.
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
    """Keep only the block's input."""
    return checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=dropout > 0)


def selective(block: nn.Module, *inputs: Any, dropout: float) -> Tensor:
    """Keep the outputs of matmuls and attention, the expensive part, and recompute norms, GELU and casts."""
    contexts = partial(_contexts, dropout)
    return checkpoint(block, *inputs, use_reentrant=False, context_fn=contexts, preserve_rng_state=dropout > 0)


def _contexts(dropout: float) -> Any:
    # An operator whose output is kept does not run again. Attention with dropout would then leave its random numbers to
    # the dropout after it, so with dropout it is recomputed.
    kept = _MATMULS if dropout else _MATMULS | _ATTENTION

    def policy(context: Any, operator: Any, *arguments: Any, **named: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
