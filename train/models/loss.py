"""Cross-entropy of the next token: plain, or fused with the head.

In: hidden states, head, targets. Out: the mean loss, normalized over all rows of the head or over the first ones: its
padding is cheap in training, where it learns to be improbable, and belongs to no published model.
"""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from train.config import Loss

CHUNK_TOKENS = 2048
"""Tokens per piece of the fused loss if the number of pieces is not given: enough for full speed, and 200 MB of 16-bit
logits with GPT-2's vocabulary."""


def plain(hidden: Tensor, head: Tensor, targets: Tensor, vocab_size: int | None = None) -> Tensor:
    """Mean cross-entropy over the first ``vocab_size`` ids, by default all.

    ``hidden`` (B, T, D), ``head`` (V, D), ``targets`` (B, T); a scalar in fp32.
    """
    logits = F.linear(hidden, head.to(hidden.dtype))[..., :vocab_size]
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def fused(hidden: Tensor, head: Tensor, targets: Tensor, chunks: int, vocab_size: int | None = None) -> Tensor:
    """The same mean, computed in ``chunks`` pieces of which only one has logits in memory at a time.

    A piece's logits are overwritten by their gradient in the forward pass already, from which the gradients of the
    hidden states and, in fp32, of the head are computed at once; the backward pass only scales both. So logits are
    neither kept nor computed twice, as in Liger Kernel (arXiv 2410.10989, section 3.2). For torch.compile it is one
    opaque operator: Inductor would otherwise fuse the pieces and keep the logits of all of them.
    """
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):  # autocast does not know this operator
        hidden = hidden.to(torch.get_autocast_dtype(kind))
    training = torch.is_grad_enabled() and (hidden.requires_grad or head.requires_grad)
    compiled = torch.compiler.is_compiling()
    ids = len(head) if vocab_size is None else vocab_size
    return _fused(hidden.flatten(0, 1), head, targets.flatten(), chunks, ids, training, compiled)[0]


def chunk_count(loss: Loss, chunks: int, tokens: int) -> int:
    """Number of pieces for the loss of ``tokens`` tokens, by ``--loss`` and ``--loss-chunks``; 0 for the plain loss."""
    if chunks > 1:
        return chunks
    return -(-tokens // CHUNK_TOKENS) if loss == "fused" else 0


@torch.library.custom_op("throughline::fused_cross_entropy", mutates_args=())
def _fused(
    hidden: Tensor, head: Tensor, targets: Tensor, chunks: int, vocab_size: int, training: bool, compiled: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The mean loss of ``hidden`` (N, D) and, when ``training``, the gradients of the sum of the N losses.

    They are gradients of the sum because those of the mean would underflow in fp16, before the loss is scaled.
    """
    weight = head.to(hidden.dtype)
    exact = torch.promote_types(hidden.dtype, torch.float32)
    overwrite = _compiled_probabilities if compiled else _probabilities
    total = torch.zeros((), dtype=exact, device=hidden.device)
    hidden_gradient = torch.empty_like(hidden if training else hidden[:0])
    head_gradient = torch.zeros_like(head if training else head[:0], dtype=exact)
    size = -(-len(targets) // chunks)
    buffer = hidden.new_empty(size, len(head))
    parts = zip(hidden.split(size), targets[:, None].split(size), range(0, len(targets), size), strict=True)
    for part, wanted, start in parts:
        logits = torch.mm(part, weight.t(), out=buffer[: len(part)])
        target_logarithms = overwrite(logits[:, :vocab_size], wanted)
        total -= target_logarithms.sum()
        if not training:
            continue
        logits[:, vocab_size:] = 0
        logits.scatter_(1, wanted, target_logarithms.expm1().to(logits.dtype))  # the target's probability, less one
        torch.mm(logits, weight, out=hidden_gradient[start : start + size])
        if logits.dtype == exact:
            head_gradient.addmm_(logits.t(), part)
        else:
            head_gradient += logits.t() @ part
    return total / len(targets), hidden_gradient, head_gradient.to(head.dtype)


def _probabilities(logits: Tensor, targets: Tensor) -> Tensor:
    """Overwrite ``logits`` (N, V) with their softmax; returns its logarithm at ``targets`` (N, 1)."""
    logarithms = F.log_softmax(logits, dim=1, dtype=torch.promote_types(logits.dtype, torch.float32))
    target_logarithms = logarithms.gather(1, targets)
    torch.exp(logarithms, out=logits)
    return target_logarithms


def _compiled_probabilities(logits: Tensor, targets: Tensor) -> Tensor:
    """The same, compiled separately, because compiled code calls the operator without looking inside.

    Targets are gathered before: torch 2.11 compiles a gather of the logarithms into a read of overwritten logits.
    """
    wanted = logits.gather(1, targets)
    return wanted - _compiled_softmax()(logits)


@cache
def _compiled_softmax() -> Any:
    return torch.compile(_softmax, dynamic=False)


def _softmax(logits: Tensor) -> Tensor:
    """Overwrite ``logits`` (N, V) with their softmax; returns the logarithm of the sum of their exponentials (N, 1)."""
    sums = logits.to(torch.promote_types(logits.dtype, torch.float32)).logsumexp(1, keepdim=True)
    torch.exp(logits - sums, out=logits)
    return sums


@_fused.register_fake
def _(
    hidden: Tensor, head: Tensor, targets: Tensor, chunks: int, vocab_size: int, training: bool, compiled: bool
) -> tuple[Tensor, Tensor, Tensor]:
    exact = torch.promote_types(hidden.dtype, torch.float32)
    loss = hidden.new_empty((), dtype=exact)
    return loss, torch.empty_like(hidden if training else hidden[:0]), torch.empty_like(head if training else head[:0])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, *gradients = output
    ctx.tokens = len(inputs[2])
    ctx.save_for_backward(*gradients)
    ctx.mark_non_differentiable(*gradients)
    ctx.set_materialize_grads(False)  # otherwise zeros of their size would be allocated for both


def _backward(ctx: Any, gradient: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    hidden_gradient, head_gradient = ctx.saved_tensors
    scale = gradient / ctx.tokens
    return hidden_gradient * scale, head_gradient * scale, None, None, None, None, None


_fused.register_autograd(_backward, setup_context=_setup_context)
