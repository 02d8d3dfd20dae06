"""Cross-entropy of the next token, plain or fused with the output head.

The softmax is over all rows of the head, or only over the first ones. Training includes the padding rows, which learn
to be improbable. Evaluation excludes them, because the exported model does not have them.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from train.config import Loss

CHUNK_TOKENS = 8192
"""Tokens per chunk of the fused loss if ``--loss-chunks`` is not set: with GPT-2's vocabulary 0.8 GB of 16-bit logits.
Each chunk reads and writes the sum of the head's gradient, in smaller chunks for a tenth of the loss's time."""

LossFunction = Callable[[Tensor, Tensor, Tensor, int | None], Tensor]
"""``(hidden, head, targets, vocab_size)`` to the mean loss, as :func:`plain`."""


def loss_function(loss: Loss, chunks: int, *, compiles: bool = True) -> LossFunction:
    """Return the function that ``--loss`` and ``--loss-chunks`` choose.

    In a traced graph the fused loss compiles a kernel of its own if ``compiles``.
    """

    def mean_loss(hidden: Tensor, head: Tensor, targets: Tensor, vocab_size: int | None) -> Tensor:
        count = chunk_count(loss, chunks, targets.numel())
        if not count:
            return plain(hidden, head, targets, vocab_size)
        return fused(hidden, head, targets, count, vocab_size, compiles=compiles)

    return mean_loss


def plain(hidden: Tensor, head: Tensor, targets: Tensor, vocab_size: int | None = None) -> Tensor:
    """Compute the mean cross-entropy over the first ``vocab_size`` token ids, by default all, as a scalar in fp32.

    Shapes are (B, T, D) of ``hidden``, (V, D) of ``head`` and (B, T) of ``targets``.
    """
    logits = F.linear(hidden, head.to(hidden.dtype))[..., :vocab_size]
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def fused(
    hidden: Tensor, head: Tensor, targets: Tensor, chunks: int, vocab_size: int | None = None, *, compiles: bool = True
) -> Tensor:
    """Compute the mean of :func:`plain` in ``chunks``, with the logits of only one chunk in memory at a time.

    The forward pass overwrites the logits of a chunk by their gradient, and computes the gradients of the hidden states
    and, in fp32, of the head from it. The backward pass only scales both. So logits are neither stored nor computed
    twice, as in Liger Kernel (arXiv 2410.10989, section 3.2). For torch.compile the loss is one opaque operator,
    because Inductor would otherwise fuse the chunks and store all logits.
    """
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):  # Autocast does not cast the inputs of a custom operator.
        hidden = hidden.to(torch.get_autocast_dtype(kind))
    training = torch.is_grad_enabled() and (hidden.requires_grad or head.requires_grad)
    compiled = compiles and torch.compiler.is_compiling()
    ids = len(head) if vocab_size is None else vocab_size
    return _fused(hidden.flatten(0, 1), head, targets.flatten(), chunks, ids, training, compiled)[0]


def chunk_count(loss: Loss, chunks: int, tokens: int) -> int:
    """Return the number of chunks for the loss of ``tokens`` tokens, by ``--loss`` and ``--loss-chunks``; 0 for the
    plain loss."""
    if chunks > 1:
        return chunks
    return -(-tokens // CHUNK_TOKENS) if loss == "fused" else 0


@torch.library.custom_op("throughline::fused_cross_entropy", mutates_args=())
def _fused(
    hidden: Tensor, head: Tensor, targets: Tensor, chunks: int, vocab_size: int, training: bool, compiled: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the mean loss of ``hidden`` (N, D) and, when ``training``, the gradients of the sum of the N losses.

    The gradients of the mean would underflow in fp16 before the loss is scaled.

    Returns: (mean loss, gradient of the hidden states, gradient of the head).
    """
    weight = head.to(hidden.dtype)
    sum_type = torch.promote_types(hidden.dtype, torch.float32)
    overwrite = _compiled_probabilities if compiled else _probabilities
    total = torch.zeros((), dtype=sum_type, device=hidden.device)
    hidden_gradient = torch.empty_like(hidden if training else hidden[:0])
    head_gradient = torch.empty_like(head if training else head[:0], dtype=sum_type)
    size = -(-len(targets) // chunks)
    buffer = hidden.new_empty(size, len(head))
    all_chunks = zip(hidden.split(size), targets[:, None].split(size), range(0, len(targets), size), strict=True)
    for hidden_chunk, target_chunk, offset in all_chunks:
        logits = torch.mm(hidden_chunk, weight.t(), out=buffer[: len(hidden_chunk)])
        target_logarithms = overwrite(logits[:, :vocab_size], target_chunk)
        total -= target_logarithms.sum()
        if not training:
            continue
        logits[:, vocab_size:] = 0
        # The gradient of a logit is its probability, minus one for the target.
        logits.scatter_(1, target_chunk, target_logarithms.expm1().to(logits.dtype))
        torch.mm(logits, weight, out=hidden_gradient[offset : offset + size])
        _sum_product(head_gradient, logits.t(), hidden_chunk, is_first=offset == 0)
    return total / len(targets), hidden_gradient, head_gradient.to(head.dtype)


def _sum_product(total: Tensor, left: Tensor, right: Tensor, *, is_first: bool) -> None:
    """Add the product of two matrices to ``total``, which the first product overwrites.

    ``total`` may be in fp32 for factors in 16 bits. On a GPU the product itself adds in fp32, so that no result in 16
    bits is rounded, written and read.
    """
    if left.dtype == total.dtype:
        torch.mm(left, right, out=total) if is_first else torch.addmm(total, left, right, out=total)
    elif not total.is_cuda:  # A CPU has no such product.
        product = left @ right
        total.copy_(product) if is_first else total.add_(product)
    elif is_first:
        torch.mm(left, right, out_dtype=total.dtype, out=total)
    else:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)


def _probabilities(logits: Tensor, targets: Tensor) -> Tensor:
    """Overwrite ``logits`` (N, V) with their softmax, and return its logarithm at ``targets`` (N, 1)."""
    logarithms = F.log_softmax(logits, dim=1, dtype=torch.promote_types(logits.dtype, torch.float32))
    target_logarithms = logarithms.gather(1, targets)
    torch.exp(logarithms, out=logits)
    return target_logarithms


def _compiled_probabilities(logits: Tensor, targets: Tensor) -> Tensor:
    """Compute :func:`_probabilities` by separately compiled code, because the operator is opaque to the model's graph.

    The logits of the targets are gathered first, because torch 2.11 compiles a gather of the logarithms into a read of
    overwritten logits.
    """
    target_logits = logits.gather(1, targets)
    return target_logits - _compiled_softmax()(logits)


@cache
def _compiled_softmax() -> Any:
    return torch.compile(_softmax, dynamic=False)


def _softmax(logits: Tensor) -> Tensor:
    """Overwrite ``logits`` (N, V) with their softmax, and return the logarithm of the sum of exponentials (N, 1)."""
    sums = logits.to(torch.promote_types(logits.dtype, torch.float32)).logsumexp(1, keepdim=True)
    torch.exp(logits - sums, out=logits)
    return sums


@_fused.register_fake
def _(
    hidden: Tensor, head: Tensor, targets: Tensor, chunks: int, vocab_size: int, training: bool, compiled: bool
) -> tuple[Tensor, Tensor, Tensor]:
    loss = hidden.new_empty((), dtype=torch.promote_types(hidden.dtype, torch.float32))
    return loss, torch.empty_like(hidden if training else hidden[:0]), torch.empty_like(head if training else head[:0])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, *gradients = output
    ctx.tokens = len(inputs[2])
    ctx.save_for_backward(*gradients)
    ctx.mark_non_differentiable(*gradients)
    ctx.set_materialize_grads(False)  # Otherwise torch would allocate zeros as gradients of both outputs.


def _backward(ctx: Any, gradient: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    hidden_gradient, head_gradient = ctx.saved_tensors
    scale = gradient / ctx.tokens
    return hidden_gradient * scale, head_gradient * scale, None, None, None, None, None


_fused.register_autograd(_backward, setup_context=_setup_context)
