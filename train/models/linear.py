"""A linear layer that computes in the type of its input, with a custom backward pass in code compiled for a GPU.

The backward pass that torch derives runs two unnecessary kernels. It computes the gradient of a weight in 16 bits and
casts it in a separate kernel, although the matrix product can write fp32. It also reads the gradient of the output
again to compute the gradient of a bias, although the kernel that writes the former could sum it. Inductor fuses such a
sum with the kernel that writes its input if both have the same loops. So the sum is over each sequence first and then
over the sequences, in the shape that the layer's caller uses.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Linear):
    """A linear layer that computes in the type of its input, independent of the type of its weights."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, output_shape: tuple[int, ...] = ()) -> None:
        """Create the layer.

        ``output_shape`` is the shape in which a kernel outside Inductor reads the last dimension of the output.
        """
        super().__init__(inputs, outputs, bias=bias)
        self.output_shape = output_shape

    def forward(self, input: Tensor) -> Tensor:
        if input.is_cuda and torch.compiler.is_compiling():
            kind = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else input.dtype
            return Fused.apply(input.to(kind), self.weight, self.bias, self.output_shape)  # type: ignore[no-any-return]
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return F.linear(input, self.weight.to(input.dtype), bias)


class Fused(torch.autograd.Function):
    """The function of :class:`Linear` that Inductor compiles to fewer kernels."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, output_shape: tuple[int, ...]) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.has_bias, ctx.output_shape = bias is not None, output_shape
        weight, bias = weight.to(input.dtype), None if bias is None else bias.to(input.dtype)
        if output_shape or bias is None:
            return F.linear(input, weight, bias)
        return F.linear(input, weight) + bias  # Inductor fuses this sum with the kernel that reads the output.

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (gradient,), (input, weight) = gradients, ctx.saved_tensors
        rows, weight_type = gradient.flatten(0, 1).t(), weight.dtype
        out_dtype = {} if gradient.dtype == weight_type else {"out_dtype": weight_type}
        weight_gradient = torch.mm(rows, input.flatten(0, 1), **out_dtype)
        bias_gradient = None
        if ctx.has_bias:
            shaped = gradient.unflatten(2, ctx.output_shape) if ctx.output_shape else gradient
            bias_gradient = shaped.sum(1, dtype=torch.float32).sum(0).flatten().to(weight_type)
        return gradient @ weight.to(gradient.dtype), weight_gradient, bias_gradient, None
