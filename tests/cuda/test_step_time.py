"""The roofline of a step is that of its operators, eager and compiled, at the card's rates."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.async_compile import AsyncCompile

from train.estimate.gpt2_speed import ATTENTION_EFFICIENCY
from train.estimate.gpu_rates import load_gpu_rates

pytestmark = pytest.mark.gpu

CARD = load_gpu_rates("A100")
ROWS = 1024


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    monkeypatch.setattr(AsyncCompile, "triton", AsyncCompile.triton)  # which is given back
    from step_time import StepTime  # type: ignore[import-not-found]

    return StepTime(CARD, "tf32")


@pytest.mark.parametrize(
    ("work", "kind", "seconds"),
    [
        (lambda x: x @ x, torch.bfloat16, 2 * ROWS**3 / CARD.matmul["bf16"]),
        (lambda x: x @ x, torch.float32, 2 * ROWS**3 / CARD.matmul["tf32"]),
        (lambda x: x + 1, torch.float32, 8 * ROWS**2 / CARD.bandwidth),
        (lambda x: x.add_(x[0]), torch.float16, (4 * ROWS**2 + 2 * ROWS) / CARD.bandwidth),
        (lambda x: x.view(-1)[1:].t(), torch.float32, 0.0),
        (lambda x: x.sum().item(), torch.float32, (4 * ROWS**2 + 4) / CARD.bandwidth),
    ],
    ids=["product in 16 bits", "product in TF32", "sum", "in place", "view", "item"],
)
def test_an_operator_needs_its_bytes_or_its_flops(
    counted: Any, work: Callable[[Tensor], Any], kind: torch.dtype, seconds: float
) -> None:
    x = torch.ones(ROWS, ROWS, dtype=kind, device="cuda")
    with counted:
        work(x)
    assert counted.seconds == pytest.approx(seconds, rel=1e-6)


def test_attention_computes_half_of_the_products(counted: Any) -> None:
    batch, heads, length, width = 2, 4, 2048, 64
    q = torch.ones(batch, heads, length, width, dtype=torch.bfloat16, device="cuda")
    with counted:
        torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    flops = 4 * batch * heads * length**2 * width / 2
    assert counted.seconds == pytest.approx(flops / (ATTENTION_EFFICIENCY * CARD.matmul["bf16"]), rel=1e-6)


def test_a_kernel_of_triton_needs_its_tensors(counted: Any) -> None:
    source = "@triton.jit\ndef triton_poi_fused_add_0(in_out_ptr0, in_ptr0, xnumel, XBLOCK : tl.constexpr):\n"
    kernel = counted._kernel("triton_poi_fused_add_0", source)
    x = torch.ones(ROWS, ROWS, device="cuda")
    kernel.run(x, x[0], x.numel(), stream=0)
    assert counted.seconds == 0, "outside"
    with counted:
        kernel.run(x, x[0].expand(ROWS, ROWS), x.numel(), stream=0)
    assert counted.seconds == pytest.approx((8 * ROWS**2 + 4 * ROWS) / CARD.bandwidth, rel=1e-6)
