"""The linear layer: in its input's type and, in code that is compiled for a GPU, with a backward pass of its own.

In: activations (batch, time, inputs). Out: (batch, time, outputs). The backward pass that torch derives costs a GPU
more than the mathematics: the gradient of a weight is computed in 16 bits and then cast by a kernel of its own, though
the product itself can write fp32, and the gradient of a bias reads that of the whole output again, though the kernel
that writes the latter could add it up. Inductor fuses such a sum if it has the same loops as what it reads, so it is
taken over each sequence first and over the sequences then, and in the shape that the layer's caller uses.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Linear):
    """A linear layer that computes in its input's type, whatever the type of its weights."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, parts: tuple[int, ...] = ()) -> None:
        """``parts`` is the shape of an output, if a kernel that is not Inductor's reads the output in parts."""
        super().__init__(inputs, outputs, bias=bias)
        self.parts = parts

    def forward(self, input: Tensor) -> Tensor:
        if input.is_cuda and torch.compiler.is_compiling():
            kind = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else input.dtype
            return Fused.apply(input.to(kind), self.weight, self.bias, self.parts)  # type: ignore[no-any-return]
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return F.linear(input, self.weight.to(input.dtype), bias)


class Fused(torch.autograd.Function):
    """:class:`Linear` of which Inductor makes fewer kernels."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, parts: tuple[int, ...]) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.biased, ctx.parts = bias is not None, parts
        weight, bias = weight.to(input.dtype), None if bias is None else bias.to(input.dtype)
        if parts or bias is None:
            return F.linear(input, weight, bias)
        return F.linear(input, weight) + bias  # by the kernel that reads the output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (gradient,), (input, weight) = gradients, ctx.saved_tensors
        rows, exact = gradient.flatten(0, 1).t(), weight.dtype
        in_full = {} if gradient.dtype == exact else {"out_dtype": exact}
        of_weight = torch.mm(rows, input.flatten(0, 1), **in_full)
        of_bias = None
        if ctx.biased:
            in_parts = gradient.unflatten(2, ctx.parts) if ctx.parts else gradient
            of_bias = in_parts.sum(1, dtype=torch.float32).sum(0).flatten().to(exact)
        return gradient @ weight.to(gradient.dtype), of_weight, of_bias, None
