"""The memory of a custom model: a bound from its inspection, and a measurement where the bound does not decide."""

from pathlib import Path

import pytest

from infra.device.hardware import cpu_info
from train.config import ResolvedConfig, TrainConfig
from train.estimate.estimates import estimates_of
from train.estimate.memory import fits, predict_peak
from train.model_config import parse_model
from train.resolved import resolve

MODEL = "own_models:gpt2,width=32,context_length=64,vocab_size=2000"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "models"))


def resolved(memory: int | None = None, model: str = MODEL) -> ResolvedConfig:
    config = TrainConfig.of(model=parse_model(model), global_batch=32, precision="fp32", device="cpu")
    return resolve(config, cpu_info().with_memory_limit(memory))


def test_a_model_that_certainly_fits_is_not_measured() -> None:
    config = resolved()
    assert config.batch.micro_batch == 32
    estimates = estimates_of(config.model)
    assert not estimates.is_memory_known(config.step)
    bound = estimates.peak_bound(config.step)
    assert estimates.peak_bound(config.step.replace(micro_batch=1)) < bound, "it grows with the micro-batch"
    assert fits(config.step, int(bound))
    assert not estimates.is_memory_known(config.step)


def test_a_model_that_may_not_fit_is_measured_once_and_needs_less_than_its_bound() -> None:
    """One process answers with and without accumulation, whose gradients are in memory during a forward pass."""
    model = MODEL.replace("2000", "4000")
    step = resolved(model=model).step
    estimates = estimates_of(step.model)
    bound = int(estimates.peak_bound(step))
    assert not estimates.is_memory_known(step)
    assert not fits(step, predict_peak(step).total - 1), "the measurement decides"
    accumulated = step.replace(micro_batch=16)
    assert estimates.is_memory_known(accumulated)
    assert predict_peak(step).total <= bound
    assert predict_peak(accumulated).total <= estimates.peak_bound(accumulated)
    assert predict_peak(step).gradients == predict_peak(step).weights
    assert resolved(bound, model).batch.micro_batch == 32
