"""Attention kernels that fail or return NaN on a GPU: another one trains, and both are named.

On the pretended GPU, whose operators are computed on the CPU, a kernel can be replaced by one with a fault.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from trainers import make_trainer

from infra.errors import UserError
from train.config import Cycle, TrainConfig
from train.model_config import ModelConfig
from train.resolved import resolve_local

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("PRETENDED_GPU" not in os.environ, reason="needs a GPU whose kernels can be replaced"),
]


@pytest.fixture
def config(small_shards: Path) -> TrainConfig:
    model = ModelConfig(layers=2, heads=2, width=64, context_length=32, vocab_size=257, padded_vocab_size=320)
    return TrainConfig.of(
        data=str(small_shards), model=model, micro_batch=4, global_batch=4, steps=2, cycle=Cycle(2, 0),
        precision="bf16", device="cuda", compile="off", keep_checkpoints=0,
    )  # fmt: skip


@pytest.fixture
def best_kernel() -> str:
    return "cudnn" if torch.cuda.get_device_capability()[0] == 9 else "flash"


@pytest.fixture
def replace_kernel(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[..., Any]], None]:
    """Replace an operator of attention by a function of the one that computes it."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    import compute  # type: ignore[import-not-found]

    def replace(kernel: str, change: Callable[..., Any]) -> None:
        name = f"_scaled_dot_product_{kernel}"
        original = compute.ATTENTION[name]
        monkeypatch.setitem(compute.ATTENTION, name, lambda *args, **kwargs: change(original(*args, **kwargs)))

    return replace


def failing(results: Any) -> Any:
    raise RuntimeError("CUDA error: no kernel image is available for execution on the device")


def with_nan(results: Any) -> Any:
    """In one of the keys' gradients."""
    results[1][0, 0, 0, 5] = float("nan")
    return results


@pytest.mark.parametrize(
    ("direction", "change", "fault"),
    [("attention", failing, "no kernel image"), ("attention_backward", with_nan, "NaN")],
)
def test_the_next_kernel_trains(
    config: TrainConfig, best_kernel: str, replace_kernel: Any, direction: str, change: Any, fault: str
) -> None:
    expected = make_trainer(resolve_local(config)).run()
    assert expected.attention == best_kernel
    replace_kernel(f"{best_kernel}_{direction}", change)
    trainer = make_trainer(resolve_local(config))
    result = trainer.run()
    assert result.outcome == "finished"
    assert result.attention not in (best_kernel, "manual")
    assert result.train_loss == pytest.approx(expected.train_loss, abs=2e-3)
    for word in (best_kernel, fault, result.attention, torch.cuda.get_device_name()):
        assert word in trainer.attention_message


def test_plain_operations_are_the_last_choice(config: TrainConfig, replace_kernel: Any) -> None:
    for kernel in ("flash", "cudnn", "efficient"):
        replace_kernel(f"{kernel}_attention", failing)
    result = make_trainer(resolve_local(config)).run()
    assert (result.outcome, result.attention) == ("finished", "manual")


def test_a_requested_kernel_that_is_wrong_is_an_error(config: TrainConfig, replace_kernel: Any) -> None:
    replace_kernel("efficient_attention_backward", with_nan)
    with pytest.raises(UserError, match="--attention efficient"):
        make_trainer(resolve_local(config.replace(attention="efficient")))


def test_gradients_that_become_nan_later_name_the_kernel(
    config: TrainConfig, best_kernel: str, replace_kernel: Any
) -> None:
    """As cuDNN's backward pass was seen to do: it passes the check, and fails after some steps."""
    calls: list[int] = []

    def late(results: Any) -> Any:
        calls.append(1)
        return with_nan(results) if len(calls) > 4 else results

    replace_kernel(f"{best_kernel}_attention_backward", late)
    result = make_trainer(resolve_local(config.replace(steps=6, cycle=Cycle(6, 0)))).run()
    assert result.outcome == "diverged"
    assert best_kernel in result.reason
    assert "gradient norm" in result.reason


def test_the_check_leaves_no_memory_behind(config: TrainConfig) -> None:
    from train.loop.attention_check import choose_attention
    from train.models.builders import builder_of

    resolved = resolve_local(config)
    builder, device = builder_of(resolved.model), torch.device("cuda", 0)
    choose_attention(builder, resolved.execution, device)
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    choose_attention(builder, resolved.execution, device)
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == (allocated, reserved)
