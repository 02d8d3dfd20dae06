"""The law of loss over compute holds the truth in its interval, and a budget becomes a model and its tokens."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from infra.device.hardware import KNOWN_GPUS
from infra.errors import UserError
from train.config import ResolvedConfig, TrainConfig
from train.estimate.flops import PF_DAY
from train.estimate.gpu_rates import load_gpu_rates
from train.estimate.scaling import ScalingLaw, find_optimal_run, model_of_depth
from train.intervals import Estimate
from train.model_config import PRESETS
from train.resolved import resolve_for_plan

GPT2 = PRESETS["gpt2-124m"]


def width(loss: Estimate) -> float:
    """Width of the interval as a fraction of the loss."""
    return (loss.high - loss.low) / loss.middle


@pytest.mark.parametrize("count", [3, 5])
@pytest.mark.parametrize("noise", [0.003, 0.01])
def test_the_interval_holds_the_truth_in_nine_of_ten_laws(noise: float, count: int) -> None:
    """Laws as published and steeper, from runs that span a factor of 5 to 300, up to ten thousand times larger."""
    random = np.random.default_rng(1)
    hits, widths = 0, []
    for _ in range(150):
        floor, exponent = random.uniform(0, 2.5), math.exp(random.uniform(math.log(0.05), math.log(0.4)))
        smallest = 10 ** random.uniform(13, 16)
        compute = np.geomspace(smallest, smallest * 10 ** random.uniform(0.7, 2.5), count)
        scale = random.uniform(1, 5) * smallest**exponent
        target = compute[-1] * 10 ** random.uniform(0.3, 4)
        losses = (floor + scale * compute**-exponent) * (1 + noise * random.standard_normal(count))
        loss = ScalingLaw(list(compute), list(losses)).loss(target)
        assert loss.low <= loss.middle <= loss.high
        hits += loss.low <= floor + scale * target**-exponent <= loss.high
        widths.append(width(loss))
    assert hits >= 0.9 * 150
    assert np.median(widths) < 0.5, "an interval that says something"


def test_runs_that_deviate_from_a_law_widen_its_interval() -> None:
    compute = list(np.geomspace(1e14, 1e17, 6))
    losses = [1.5 + 2 * (c / 1e14) ** -0.2 for c in compute]
    scattered = [loss * (1 + 0.06 * (-1) ** n) for n, loss in enumerate(losses)]
    assert width(ScalingLaw(compute, scattered).loss(1e19)) > 1.5 * width(ScalingLaw(compute, losses).loss(1e19))


def test_the_law_at_a_run_is_near_its_loss() -> None:
    law = ScalingLaw([1e15, 1e16, 1e17], [4.0, 3.5, 3.2])
    assert law.loss(1e16).middle == pytest.approx(3.5, rel=0.02)
    assert law.loss(1e20).high < 3.2 * 1.03


@pytest.mark.parametrize("compute", [[1e15, 1e16], [1e15, 1e15, 1e16], [1e15, 2e15, 3e15]])
def test_too_few_or_too_similar_runs_have_no_law(compute: list[float]) -> None:
    with pytest.raises(UserError, match="--from-runs"):
        ScalingLaw(compute, [4.0, 3.5, 3.2][: len(compute)])


def resolver(gpu: str) -> Callable[[int], ResolvedConfig]:
    return lambda depth: resolve_for_plan(TrainConfig.of(model=model_of_depth(GPT2, depth)), KNOWN_GPUS[gpu])


@pytest.mark.parametrize(("gpu", "hours"), [("A100", 0.05), ("A100", 5), ("A100", 40), ("T4", 5), ("H100", 100)])
def test_the_optimal_run_has_about_twenty_tokens_per_parameter_and_ends_in_time(gpu: str, hours: float) -> None:
    gpu_rates = load_gpu_rates(gpu)
    run = find_optimal_run(gpu, gpu_rates, hours, resolver(gpu))
    assert run
    assert run.prediction.speed
    assert run.prediction.peak
    assert 10 < run.tokens_per_parameter < 40
    seconds = run.tokens / run.prediction.speed.low
    assert hours * 3600 - 2 * run.config.step_tokens / run.prediction.speed.low <= seconds <= hours * 3600
    assert run.prediction.peak.high <= gpu_rates.device_info.memory
    assert run.compute == run.tokens * run.config.model.flops_per_token


def test_gpt2_is_in_the_family_and_more_hours_make_a_larger_model() -> None:
    assert model_of_depth(GPT2, 12) == GPT2
    assert model_of_depth(replace(GPT2, vocab_size=300, padded_vocab_size=320), 4).vocab_size == 300
    runs = [find_optimal_run("A100", load_gpu_rates("A100"), hours, resolver("A100")) for hours in (1, 10, 100)]
    compute = [run.compute / PF_DAY for run in runs if run]
    assert compute == sorted(compute)
    assert len({run.config.model.parameters for run in runs if run}) == 3


def test_a_budget_without_a_step_has_no_run() -> None:
    assert find_optimal_run("T4", load_gpu_rates("T4"), 1e-5, resolver("T4")) is None
