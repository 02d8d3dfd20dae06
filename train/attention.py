"""Causal self-attention: one function per implementation, all of the same mathematics.

In: queries, keys, values of shape (batch, heads, time, head width). Out: the same shape.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

AttentionFunction = Callable[[Tensor, Tensor, Tensor, float], Tensor]


def manual(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    """Softmax attention as written in the paper (arXiv 1706.03762): the T x T matrix goes through memory."""
    time = q.size(-2)
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
    future = torch.ones(time, time, dtype=torch.bool, device=q.device).triu(1)
    weights = scores.masked_fill(future, float("-inf")).softmax(dim=-1)
    return F.dropout(weights, dropout) @ v


def sdpa(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    """torch's fused attention (FlashAttention, arXiv 2307.08691, where it can): no T x T matrix in memory."""
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)


ATTENTION: dict[str, AttentionFunction] = {"manual": manual, "sdpa": sdpa}
