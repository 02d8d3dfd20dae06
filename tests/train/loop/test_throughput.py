"""Warm-up is set aside whatever its shape, and the speed is the steady state's."""

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from trainers import make_trainer

from infra.errors import UserError
from train.config import Cycle, ResolvedConfig
from train.intervals import warmup_steps
from train.loop.throughput import implausible_reason, is_precise, steady_state
from train.model_config import ModelConfig
from train.result import Throughput


def series(seconds: float, count: int, noise: float = 0.01, seed: int = 0) -> list[float]:
    return np.random.default_rng(seed).normal(seconds, seconds * noise, count).tolist()


def test_compilation_and_a_slow_ramp_are_warm_up() -> None:
    ramp = [40.0, *(0.1 * (1 + 0.9 ** (n / 2)) for n in range(60))]
    steps = ramp + series(0.1, 300)
    assert 25 <= warmup_steps(steps) <= 75
    speed = steady_state(steps, 1000)
    assert speed is not None
    assert speed.low <= 10_000 <= speed.high
    assert speed.high / speed.low < 1.02


def test_seven_steps_are_the_fewest_that_show_a_warm_up() -> None:
    assert warmup_steps([9.0, 3.0, 3.0, 1.0, 1.0, 1.0]) == 1, "two windows of three do not fit behind the first step"
    assert warmup_steps([9.0, 3.0, 3.0, 3.0, 1.0, 1.0, 1.0]) == 3
    assert warmup_steps([9.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]) == 1


def test_a_run_without_a_steady_state_discards_half() -> None:
    assert warmup_steps([0.1 * (1 + 0.02 * n) for n in range(100)]) == 50


def test_too_few_steps_have_no_speed() -> None:
    assert [steady_state([1.0] * count, 10) for count in range(4)] == [None] * 4


def test_noise_alone_is_not_warm_up() -> None:
    """Medians of neighboring windows differ by more than one standard error in every third run, by three in few."""
    actual = [warmup_steps([9.0, *series(0.1, 200, noise=0.05, seed=seed)]) for seed in range(100)]
    assert actual.count(1) >= 95


def test_three_steps_after_warm_up_are_a_speed_no_faster_than_the_fastest() -> None:
    """Student's interval of 1, 2 and 1.5 s, 1.5 s ± 4.303 x 0.5 s / sqrt(3), begins at 0.26 s, which no step took."""
    speed = steady_state([9.0, 1.0, 2.0, 1.5], 30)
    assert speed is not None
    assert (speed.tokens_per_second, speed.high, speed.steps, speed.warmup_steps) == (20.0, 30.0, 3, 1)
    assert speed.low == pytest.approx(30 / 2.742, rel=1e-3)
    steps = series(0.1, 300)
    throughput = steady_state(steps, 1000)
    assert throughput is not None
    assert throughput.high < 0.999 * 1000 / min(steps), "of many steps the interval is narrower than the steps"


A100 = "NVIDIA A100-SXM4-40GB"


@pytest.mark.parametrize(
    ("changes", "device", "share", "possible"),
    [
        ({}, A100, 0.99, True), ({}, A100, 1.01, False), ({}, "cpu", 1000.0, True),
        ({"precision": "fp32"}, A100, 0.06, True), ({"precision": "fp32"}, A100, 0.07, False),
        ({"fp8": True, "device": "cuda"}, A100, 1.9, True), ({"workers": 2}, A100, 1.9, True),
    ],
    ids=str,
)  # fmt: skip
def test_no_speed_is_above_what_the_device_can_compute(
    changes: dict[str, Any], device: str, share: float, possible: bool
) -> None:
    """``share`` of the peak of one A100 in 16 bits, of which fp32 reaches 6%."""
    config = ResolvedConfig.of(precision="bf16").replace(**changes)
    rate = share * 312e12 / cast(ModelConfig, config.model).causal_flops
    assert (
        not implausible_reason(
            Throughput(rate, rate, rate, 10, 1), config.model, config.execution, config.batch.workers, device
        )
    ) == possible


def test_measuring_stops_only_when_the_speed_is_known() -> None:
    assert is_precise([40.0, *series(0.1, 400, 0.01)], within=0.005), "the first step, which compiles, does not count"
    assert not is_precise([40.0, *series(0.1, 400, 0.01)], within=0.001), "nor is the speed known to a share of it"
    assert not is_precise(series(0.1, 15, 0.01), within=0.005)
    assert is_precise(series(0.1, 400, 0.01), within=0.005)
    assert not is_precise(series(0.1, 400, 0.5), within=0.005)


def test_a_run_ends_once_its_speed_is_known(small_shards: Path, small_model: ModelConfig) -> None:
    config = ResolvedConfig.of(
        data=str(small_shards), model=small_model, micro_batch=4, global_batch=4, steps=2000, speed_tolerance=0.9,
        cycle=Cycle(20, 0), device="cpu",
    )  # fmt: skip
    result = make_trainer(config).run()
    assert result.outcome == "finished"
    assert result.steps < 2000
    assert "90" in result.reason
    with pytest.raises(UserError, match="between 0 and 1"):
        config.replace(speed_tolerance=5.0)
