"""The gradient that compiled code on a GPU adds to the tied head's equals the sum that torch derives."""

import pytest
import torch
import torch.nn.functional as F

from train.models.embedding import TiedEmbedding


@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.bfloat16])
def test_both_uses_of_the_weight_are_in_its_gradient(kind: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = torch.randn(11, 8).to(kind).requires_grad_()
    tokens = torch.tensor([[3, 3, 0, 10], [3, 7, 10, 3]])
    hidden, rows = torch.randn(5, 8).to(kind), torch.randn(2, 4, 8).to(kind)
    embeddings, head = TiedEmbedding.apply(weight, tokens)
    assert torch.equal(embeddings, F.embedding(tokens, weight))
    assert torch.equal(head, weight)
    (actual,) = torch.autograd.grad((embeddings * rows).sum() + (hidden @ head.t()).square().sum(), weight)
    (expected,) = torch.autograd.grad(
        (F.embedding(tokens, weight) * rows).sum() + (hidden @ weight.t()).square().sum(), weight
    )
    torch.testing.assert_close(actual, expected)
    assert actual.dtype == kind


def test_many_small_gradients_of_a_frequent_token_are_not_lost_in_16_bits() -> None:
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    embeddings, head = TiedEmbedding.apply(weight, torch.zeros(1, 4096, dtype=torch.int64))
    (gradient,) = torch.autograd.grad(embeddings.sum() + head.sum(), weight)
    assert gradient[0].item() == pytest.approx(4097, rel=0.01)
