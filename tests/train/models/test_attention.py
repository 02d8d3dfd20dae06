"""Which kernels attention may be computed by, and the masks that keep it within a book."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from train.models import attention
from train.models.attention import attention_for_gpu, block_mask, dense_mask

FLASH, CUDNN, EFFICIENT, MATH = (
    SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH,
)  # fmt: skip


@pytest.mark.parametrize(
    ("capability", "time", "cudnn", "masked", "kernels"),
    [
        ((8, 0), 1024, 91900, False, [FLASH, EFFICIENT, MATH]),
        ((9, 0), 1024, 90100, False, [CUDNN, FLASH, EFFICIENT, MATH]),
        ((9, 0), 1000, 91900, False, [CUDNN, FLASH, EFFICIENT, MATH]),
        ((9, 0), 1000, 91500, False, [FLASH, EFFICIENT, MATH]),
        ((9, 0), 960, None, False, [FLASH, EFFICIENT, MATH]),
        ((9, 0), 1024, 91900, True, [EFFICIENT, MATH]),
        ((10, 0), 1024, 91900, False, [FLASH, EFFICIENT, MATH]),
    ],
)
def test_kernels_are_tried_in_the_order_of_the_gpu(
    capability: tuple[int, int], time: int, cudnn: int | None, masked: bool, kernels: list[SDPBackend]
) -> None:
    chosen: Any = attention_for_gpu(capability, time, masked=masked, cudnn_version=lambda: cudnn)
    assert chosen.args == (kernels,)


@pytest.mark.parametrize("supported", [(), ("efficient",), ("efficient", "cudnn")])
def test_the_kernels_are_those_that_can_be_used(monkeypatch: pytest.MonkeyPatch, supported: tuple[str, ...]) -> None:
    """A CPU can use none of them, by torch itself."""
    for name in supported:
        monkeypatch.setattr(attention, f"can_use_{name}_attention", lambda params: True)
    q = torch.zeros(1, 2, 16, 64, dtype=torch.bfloat16, requires_grad=True)
    kernels = attention.supported_kernels(attention_for_gpu((9, 0), 1024, masked=False), q, 0.0)
    assert kernels == [name for name in ("cudnn", "flash", "efficient") if name in supported]
    dense = torch.ones(1, 1, 16, 16, dtype=torch.bool)
    masked = attention.supported_kernels(attention_for_gpu((9, 0), 1024, masked=True), q, 0.0, dense)
    assert masked == [name for name in ("efficient",) if name in supported]


@pytest.fixture
def tokens() -> Tensor:
    """Two windows of 12 tokens; in one a book ends at its fourth and at its last, in one at its first token."""
    made = torch.arange(24).reshape(2, 12)
    made[0, 3] = made[0, 11] = made[1, 0] = 99
    return made


def test_a_token_sees_its_book_up_to_itself(tokens: Tensor) -> None:
    mask = dense_mask(tokens, 99)
    assert mask.shape == (2, 1, 12, 12)
    seen = [[row.nonzero().flatten().tolist() for row in window[0]] for window in mask]
    assert seen[0] == [[*range(at + 1)] for at in range(4)] + [[*range(4, at + 1)] for at in range(4, 12)]
    assert seen[1] == [[0]] + [[*range(1, at + 1)] for at in range(1, 12)]


@pytest.mark.parametrize("end_of_text", [99, None])
def test_the_mask_of_flex_attention_is_the_same(tokens: Tensor, end_of_text: int | None) -> None:
    mask = block_mask(tokens, end_of_text)
    places = torch.arange(12)
    queries, keys = torch.meshgrid(places, places, indexing="ij")
    for window in range(2):
        actual = mask.mask_mod(torch.tensor(window), torch.tensor(0), queries, keys)
        expected = dense_mask(tokens, 99)[window, 0] if end_of_text else torch.ones(12, 12).tril().bool()
        assert torch.equal(actual, expected)
