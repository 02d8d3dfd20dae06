"""Causal self-attention, with one function per implementation, all mathematically equivalent.

Inputs are queries, keys and values of shape (batch, heads, time, head width), the dropout probability of the attention
weights, and a mask if attention must stay within books, which is computed once per forward pass. The output has the
shape of the queries.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import (
    SDPAParams,
    can_use_cudnn_attention,
    can_use_efficient_attention,
    can_use_flash_attention,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

Mask = Any
"""None for causal attention; else a bool tensor that is True where a token may attend, or a ``BlockMask`` for flex."""
AttentionFunction = Callable[[Tensor, Tensor, Tensor, float, Mask], Tensor]
"""Function of (queries, keys, values, dropout probability, mask) that computes attention."""
MaskFunction = Callable[[Tensor], Mask]
"""Function that computes the mask of an attention function from token ids of shape (batch, time)."""


@dataclass(frozen=True)
class AttentionInputs:
    """Random queries, keys and values of a model, with its mask, for a check of a kernel."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    mask: Mask = None

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values."""
        return self.queries, self.keys, self.values


def manual(q: Tensor, k: Tensor, v: Tensor, dropout: float, mask: Mask = None) -> Tensor:
    """Compute softmax attention as in the paper (arXiv 1706.03762), which writes the T x T matrix to memory."""
    time = q.size(-2)
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
    if mask is None:
        mask = torch.ones(time, time, dtype=torch.bool, device=q.device).tril()
    weights = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1)
    return F.dropout(weights, dropout) @ v


def sdpa(q: Tensor, k: Tensor, v: Tensor, dropout: float, mask: Mask = None) -> Tensor:
    """Compute torch's fused attention, by FlashAttention (arXiv 2307.08691) if it supports the inputs."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None)


def by_kernels(kernels: list[SDPBackend], q: Tensor, k: Tensor, v: Tensor, dropout: float, mask: Mask = None) -> Tensor:
    """Compute torch's fused attention by the first of ``kernels`` that supports the inputs; raise if none does."""
    with sdpa_kernel(kernels, set_priority=True):
        return sdpa(q, k, v, dropout, mask)


def flex(q: Tensor, k: Tensor, v: Tensor, dropout: float, mask: Mask = None) -> Tensor:
    """Compute FlexAttention (arXiv 2412.05496), which skips blocks that ``mask`` excludes and ignores ``dropout``."""
    return (flex_attention if torch.compiler.is_compiling() else _compiled_flex())(q, k, v, block_mask=mask)


@cache
def _compiled_flex() -> Any:
    """Compile FlexAttention, which otherwise computes the whole T x T matrix."""
    return torch.compile(flex_attention, dynamic=False)


KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}

ATTENTION: dict[str, AttentionFunction] = {
    "manual": manual,
    "sdpa": sdpa,
    "flex": flex,
    **{name: partial(by_kernels, [kernel]) for name, kernel in KERNELS.items()},
}


def attention_for_gpu(
    capability: tuple[int, int],
    time: int,
    *,
    masked: bool,
    cudnn_version: Callable[[], int | None] = torch.backends.cudnn.version,
) -> AttentionFunction:
    """Choose attention over ``time`` tokens by the fastest correct kernel of a GPU with this compute capability.

    cuDNN attention is 1.7 to 2.3 times as fast as FlashAttention-2 on Hopper, and 0.8 times as fast on an A100. Before
    version 9.15.1 it is wrong if ``time`` is not a multiple of 128, and with a mask it can produce NaN gradients
    (pytorch/pytorch, issues 169849 and 196678). FlashAttention does not support masks.
    """
    is_cudnn_correct = time % 128 == 0 or (cudnn_version() or 0) > 91500
    order = ["cudnn", "flash", "efficient"] if capability[0] == 9 and is_cudnn_correct else ["flash", "efficient"]
    if masked:
        order = ["efficient"]
    return partial(by_kernels, [*(KERNELS[name] for name in order), SDPBackend.MATH])


def kernel_order(attention: AttentionFunction) -> list[SDPBackend]:
    """Return the kernels that torch's fused ``attention`` tries, in this order."""
    (order,) = cast(partial[Tensor], attention).args
    return order


def supported_kernels(attention: AttentionFunction, q: Tensor, dropout: float, mask: Mask = None) -> list[str]:
    """Names of the kernels of ``attention``, from :func:`attention_for_gpu`, that the GPU has for queries like ``q``.

    The first is the one that computes.
    """
    order = kernel_order(attention)
    sdpa_params = SDPAParams(q, q, q, mask, dropout, mask is None, False)
    is_supported = {
        "cudnn": can_use_cudnn_attention, "flash": can_use_flash_attention, "efficient": can_use_efficient_attention,
    }  # fmt: skip
    names = {kernel: name for name, kernel in KERNELS.items()}
    return [names[kernel] for kernel in order if kernel in names and is_supported[names[kernel]](sdpa_params)]


def book_numbers(tokens: Tensor, end_of_text: int) -> Tensor:
    """Number the books within each window of ``tokens`` (B, T); an end-of-text token belongs to the book it ends."""
    is_end = (tokens == end_of_text).int()
    return is_end.cumsum(dim=1) - is_end


def dense_mask(tokens: Tensor, end_of_text: int) -> Tensor:
    """Compute the mask (B, 1, T, T), which is True where a token may attend: backwards within its book."""
    books = book_numbers(tokens, end_of_text)
    return (books[:, None, :, None] == books[:, None, None, :]).tril()


def block_mask(tokens: Tensor, end_of_text: int | None) -> BlockMask:
    """Compute the mask of attention within books for FlexAttention; only causal if ``end_of_text`` is None."""
    time = tokens.size(1)
    if end_of_text is None:
        return create_block_mask(_causal, None, None, time, time, device=tokens.device)
    books = book_numbers(tokens, end_of_text)

    def within_book(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (books[batch, query] == books[batch, key])

    return create_block_mask(within_book, tokens.size(0), None, time, time, device=tokens.device)


def _causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key
