"""The backward pass that compiled code uses on a GPU equals the one that torch derives."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from train.models.linear import Fused

BATCH, TIME, INPUTS, PARTS = 3, 8, 16, (3, 2, 4)


def gradients(output: Tensor, upstream: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(output, inputs, upstream))


@pytest.mark.gpu
@pytest.mark.parametrize("parts", [(), PARTS])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
def test_its_gradients_are_those_that_torch_derives(kind: torch.dtype, biased: bool, parts: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    outputs = 24
    x = torch.randn(BATCH, TIME, INPUTS).to("cuda", kind).requires_grad_()
    weight, bias = (torch.randn(size).cuda().requires_grad_() for size in ((outputs, INPUTS), (outputs,)))
    upstream = torch.randn(BATCH, TIME, outputs).to("cuda", kind)
    inputs = [x, weight, bias] if biased else [x, weight]
    output = Fused.apply(x, weight, bias if biased else None, parts)
    expected = F.linear(x, weight.to(kind), bias.to(kind) if biased else None)
    assert output.dtype == kind
    rounding = 16 * torch.finfo(kind).eps  # of sums of 24 products
    torch.testing.assert_close(output, expected, rtol=rounding, atol=rounding)
    actual_gradients = gradients(output, upstream, inputs)
    exact = [tensor.detach().double().cpu().requires_grad_() for tensor in inputs]
    reference = F.linear(exact[0], exact[1], exact[2] if biased else None)
    for ours, theirs in zip(actual_gradients, gradients(reference, upstream.double().cpu(), exact), strict=True):
        torch.testing.assert_close(ours.double().cpu(), theirs, rtol=rounding, atol=rounding)
    assert [gradient.dtype for gradient in actual_gradients[1:]] == [torch.float32] * (len(actual_gradients) - 1), (
        "as the weights'"
    )
