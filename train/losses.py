"""Cross-entropy of the next token: plain, in chunks, fused. In: hidden states, head, targets. Out: the mean loss."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

HAS_FUSED = hasattr(torch.nn, "LinearCrossEntropyOptions")  # torch 2.13; the function alone came before it


def plain(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy. ``hidden`` (B, T, D), ``head`` (V, D), ``targets`` (B, T); a scalar in fp32."""
    logits = F.linear(hidden, head.to(hidden.dtype))
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def chunked(hidden: Tensor, head: Tensor, targets: Tensor, chunks: int) -> Tensor:
    """The same mean with only one chunk's logits alive at a time; they are computed again in the backward pass."""
    hidden, targets = hidden.flatten(0, 1), targets.flatten()

    def total(part: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(part, head.to(part.dtype)).float(), wanted, reduction="sum")

    loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
    for part, wanted in zip(hidden.chunk(chunks), targets.chunk(chunks), strict=True):
        loss = loss + checkpoint(total, part, wanted, use_reentrant=False)
    return loss / targets.numel()


def fused(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """The same mean by torch's own chunked operator (2.13), which makes the gradients in the forward pass.

    In 16 bits it would also add up the chunks' losses in bf16 (10.6 where 11.8 is right) and make the gradients before
    fp16's loss is scaled. There it gives each token's loss, and makes the gradients in the backward pass.
    """
    hidden = hidden.flatten(0, 1)
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):  # which does not know this operator, and gives it a norm's fp32
        hidden = hidden.to(torch.get_autocast_dtype(kind))
    losses = F.linear_cross_entropy(
        hidden,
        head.to(hidden.dtype),
        targets.flatten(),
        reduction="mean" if hidden.dtype == torch.float32 else "none",
        options=torch.nn.LinearCrossEntropyOptions(acc_policy="accurate", acc_dtype=torch.float32),
    )
    return losses.float().mean()
