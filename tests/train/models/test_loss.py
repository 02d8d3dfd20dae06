"""The fused loss is plain cross-entropy, in value and gradients, and multiplies by the head as often and no more."""

from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from train.models.loss import CHUNK_TOKENS, chunk_count, fused, plain


def inputs(kind: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, head and targets of 2 x 12 tokens, one of which is far more likely than the others."""
    torch.manual_seed(0)
    hidden = torch.randn(2, 12, 8, dtype=kind, requires_grad=True)
    head = torch.randn(50, 8, dtype=kind, requires_grad=True)
    targets = torch.randint(0, 50, (2, 12))
    with torch.no_grad():
        head[targets[0, 0]] += 20 * hidden[0, 0]
    return hidden, head, targets


@pytest.mark.parametrize("chunks", [1, 4, 5, 24])
def test_the_fused_loss_is_cross_entropy(chunks: int) -> None:
    hidden, head, targets = inputs()
    expected = F.cross_entropy(F.linear(hidden, head).flatten(0, 1), targets.flatten())
    actual = fused(hidden, head, targets, chunks)
    torch.testing.assert_close(actual, expected)
    right = torch.autograd.grad(3 * expected, (hidden, head))
    for _ in range(2):  # nothing is used up by a backward pass that keeps the graph
        torch.testing.assert_close(torch.autograd.grad(3 * actual, (hidden, head), retain_graph=True), right)


@pytest.mark.parametrize("loss", [plain, lambda hidden, head, targets, ids: fused(hidden, head, targets, 5, ids)])
def test_the_loss_may_be_over_the_first_ids_alone(loss: Callable[..., Tensor]) -> None:
    hidden, head, targets = inputs(torch.float32)
    targets %= 47
    right = F.cross_entropy(F.linear(hidden, head[:47]).flatten(0, 1), targets.flatten())
    actual = loss(hidden, head, targets, 47)
    torch.testing.assert_close(actual, right)
    for ours, reference in zip(*(torch.autograd.grad(each, (hidden, head)) for each in (actual, right)), strict=True):
        torch.testing.assert_close(ours, reference)


def test_its_gradients_are_those_of_finite_differences() -> None:
    hidden, head, targets = inputs()
    loss = lambda hidden, head: fused(hidden, head, targets, 4)  # noqa: E731
    assert torch.autograd.gradcheck(loss, (hidden, head), check_undefined_grad=False, fast_mode=True)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_it_is_as_good_in_16_bits(kind: torch.dtype) -> None:
    """Sixty-four chunks, whose losses would add up to 7.4 in bf16 where 7.0 is right; scaled as fp16's is."""
    torch.manual_seed(0)
    hidden = torch.randn(1, 1024, 16).to(kind).requires_grad_()
    head = torch.randn(1024, 16).mul(0.1).to(kind).requires_grad_()
    targets = torch.randint(0, 1024, (1, 1024))
    expected, actual = plain(hidden.float(), head.float(), targets), fused(hidden, head, targets, 64)
    assert actual.item() == pytest.approx(expected.item(), rel=1e-3)
    exact = torch.autograd.grad(expected * 2**16, (hidden, head))
    for ours, right in zip(torch.autograd.grad(actual * 2**16, (hidden, head)), exact, strict=True):
        assert (ours - right).norm() < 0.01 * right.norm()


def test_autocast_multiplies_in_bf16_and_gives_the_weights_fp32() -> None:
    hidden, head, targets = inputs(torch.float32)
    gradients = []
    with torch.autocast("cpu", torch.bfloat16):
        for loss in (plain, partial(fused, chunks=3)):
            actual = loss(hidden, head, targets)
            assert actual.dtype == torch.float32
            gradients.append(torch.autograd.grad(actual, (hidden, head)))
    for ours, right in zip(*gradients, strict=True):
        assert ours.dtype == torch.float32
        assert 0 < (ours - right).norm() < 0.01 * right.norm()


def test_the_head_is_multiplied_once_forward_and_twice_for_gradients() -> None:
    hidden, head, targets = inputs(torch.float32)

    def products(training: bool) -> int:
        with profile(activities=[ProfilerActivity.CPU]) as trace, torch.set_grad_enabled(training):
            loss = fused(hidden, head, targets, 4)
            if training:
                loss.backward()
        counts = Counter(event.name for event in trace.events() or ())
        return counts["aten::mm"] + counts["aten::addmm"]

    assert products(training=True) == 3 * 4
    assert products(training=False) == 4
    with torch.no_grad():
        torch.testing.assert_close(fused(hidden, head, targets, 4), plain(hidden, head, targets))


def test_pieces_follow_from_the_tokens_unless_they_are_given() -> None:
    assert chunk_count("plain", 1, 10**6) == 0
    assert chunk_count("plain", 8, 100) == chunk_count("fused", 8, 10**6) == 8
    assert [chunk_count("fused", 1, tokens) for tokens in (1, CHUNK_TOKENS, CHUNK_TOKENS + 1)] == [1, 1, 2]
