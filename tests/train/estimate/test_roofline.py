"""The speed that is predicted of a GPU rests on recorded kernels, and stands where published speeds do."""

import json
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from infra.device.hardware import KNOWN_GPUS
from infra.errors import UserError
from train.config import Execution, Loss, Precision, ResolvedConfig, TrainConfig
from train.estimate.gpt2_speed import kernel_count, launch_seconds, memory_bound_bytes, pass_seconds
from train.estimate.gpu_rates import load_gpu_rates
from train.estimate.roofline import NANOGPT_RATIOS, REACHED_FRACTION_RANGE, roofline_speed
from train.model_config import PRESETS, ModelConfig
from train.resolved import resolve

RECORD = json.loads((Path(__file__).parents[2] / "benchmarks" / "records" / "kernels.json").read_text())


@pytest.mark.parametrize(
    ("name", "precision", "loss", "preset"),
    [
        ("bf16", "bf16", "fused", "gpt2-124m"),
        ("bf16-activations, plain loss", "bf16-activations", "plain", "gpt2-124m"),
        ("bf16-activations", "bf16-activations", "fused", "gpt2-124m"),
        ("bf16-activations, GPT-2 355M", "bf16-activations", "fused", "gpt2-355m"),
    ],
)
def test_the_bytes_are_those_of_the_recorded_kernels(name: str, precision: Precision, loss: Loss, preset: str) -> None:
    """The coefficients come from GPT-2 124M; the larger model follows from its sizes."""
    actual = memory_bound_bytes(PRESETS[preset], RECORD["sequences"], Execution(precision=precision, loss=loss))
    assert actual == pytest.approx(RECORD["steps"][name]["of other kernels"] * 1e9, rel=0.02)


@pytest.mark.parametrize("precision", NANOGPT_RATIOS)
def test_the_ratio_to_nanogpt_is_that_of_the_recorded_kernels(precision: str) -> None:
    steps = RECORD["steps"]
    assert NANOGPT_RATIOS[precision] == round(steps[precision]["roofline"] / steps["nanoGPT"]["roofline"], 2)


@pytest.mark.parametrize("name", [name for name in RECORD["steps"] if "nanoGPT" not in name])
def test_the_number_of_kernels_is_that_of_the_record(name: str) -> None:
    step, size = RECORD["steps"][name], RECORD["sequences"]
    precision = "bf16" if name == "bf16" else "bf16-activations"
    loss = "plain" if "plain loss" in name else "fused"
    preset = PRESETS["gpt2-355m" if "355M" in name else "gpt2-124m"]
    model = replace(preset, bias="no biases" not in name)
    config = ResolvedConfig.of(model=model, micro_batch=size, global_batch=size, precision=precision, loss=loss)
    assert kernel_count(model, config.batch, config.execution) == step["kernels"]


def test_a_small_model_is_bound_by_its_launches_unless_it_has_cuda_graphs() -> None:
    config = resolve(TrainConfig.of(model=PRESETS["tiny"], global_batch=8, compile="whole"), KNOWN_GPUS["A100"])
    model, batch = cast(ModelConfig, config.model), config.batch
    assert launch_seconds(model, batch, config.execution) > pass_seconds(
        model, batch, config.execution, load_gpu_rates("A100")
    )
    whole, graphs = (
        roofline_speed(model, batch, replace(config.execution, compile=mode), load_gpu_rates("A100"))
        for mode in ("whole", "reduce-overhead")
    )
    assert graphs > 1.2 * whole


def test_published_speeds_are_in_the_range_that_is_expected() -> None:
    """Tokens/s of GPT-2 124M: 182,000 by the code of the lecture build-nanogpt, and 475,000 by llm.c in CUDA."""
    for card, published in (("A100", 182e3), ("H100", 475e3)):
        config = resolve(TrainConfig.of(device="cuda"), replace(KNOWN_GPUS[card], compile_blocker=""))
        low, high = (
            share * roofline_speed(config.model, config.batch, config.execution, load_gpu_rates(card))
            for share in REACHED_FRACTION_RANGE
        )
        assert 0.9 * low < published < 1.1 * high


def test_fp16_moves_more_bytes_and_the_fused_loss_fewer() -> None:
    """The unscaling of every gradient."""
    config = resolve(
        TrainConfig.of(device="cuda", precision="bf16", loss="plain", micro_batch=32), replace(KNOWN_GPUS["A100"])
    )

    def seconds_per_token(**settings: object) -> float:
        changed = config.replace(**settings)
        return 1 / roofline_speed(changed.model, changed.batch, changed.execution, load_gpu_rates("A100"))

    plain, fused, fp16 = seconds_per_token(), seconds_per_token(loss="fused"), seconds_per_token(precision="fp16")
    assert 0.97 < fused / plain < 1, "the fused loss reads the logits once less"
    assert 1 < fp16 / plain < 1.001


def test_what_is_not_compiled_whole_is_not_predicted() -> None:
    config = resolve(TrainConfig.of(device="cuda", compile="off"), KNOWN_GPUS["A100"])
    with pytest.raises(UserError, match="whole compiled graph"):
        roofline_speed(config.model, config.batch, config.execution, load_gpu_rates("A100"))
