"""The noise scale is the true one where it is known, and observing it changes nothing of a run."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from trainers import make_trainer

from infra.errors import UserError
from train import train
from train.callbacks import TrainStep
from train.config import Batch, Cycle, ResolvedConfig, TrainConfig
from train.loop.trainer import Callbacks
from train.model_config import ModelConfig
from train.noise_scale import NoiseScale, estimate_noise_scale

WIDTH, DISTANCE, NOISE = 20, 0.5, 2.0
"""Width of a linear regression, distance of its weights from the true ones, and noise of its targets."""
TRUE_SCALE = (WIDTH + 1) + NOISE**2 * WIDTH / DISTANCE**2
"""Its noise scale. An input x of standard normal values has the gradient x (x . d + e), with the difference d of the
weights and the noise e. Its mean is d, and the trace of its covariance is (width + 1) d^2 + width x noise^2."""


class Regression(nn.Module):
    """A linear regression whose weights are at a known distance from the true ones."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((WIDTH,), DISTANCE / math.sqrt(WIDTH)))
        self.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.unused = nn.Parameter(torch.zeros(3))

    def forward(self, inputs: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        return (inputs @ self.weight + noise).square().mean() / 2


def drive(callback: NoiseScale, model: Regression, batch: Batch, steps: int, *, loss_scale: float = 1.0) -> None:
    """Compute gradients as the training loop does, without changing the weights."""
    for step in range(1, steps + 1):
        for _ in range(batch.accumulation):
            loss = model(torch.randn(batch.micro_batch, WIDTH), NOISE * torch.randn(batch.micro_batch))
            (loss_scale * loss / batch.accumulation).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        model.zero_grad(set_to_none=step % 2 == 0)
        callback.on_step_end(TrainStep(step, torch.zeros(()), 1e-3, model, batch, 8))


def test_the_scale_of_a_linear_regression_is_the_true_one() -> None:
    torch.manual_seed(0)
    callback = NoiseScale(first=2, steps=400)
    drive(callback, Regression(), Batch(global_batch=256, micro_batch=16), 401, loss_scale=1024.0)
    sequences, tokens = callback.sequences, callback.tokens
    assert sequences
    assert tokens
    assert sequences.middle == pytest.approx(TRUE_SCALE, rel=0.15)
    assert sequences.low < TRUE_SCALE < sequences.high
    assert sequences.high < 1.5 * sequences.low
    assert tuple(tokens) == pytest.approx([8 * value for value in sequences])


@pytest.mark.parametrize("accumulation", [2, 8])
def test_the_interval_holds_the_true_scale_in_nine_of_ten(accumulation: int) -> None:
    torch.manual_seed(1)
    held = 0
    for _ in range(60):
        callback = NoiseScale(first=2, steps=12)
        drive(callback, Regression(), Batch(global_batch=32 * accumulation, micro_batch=32), 13)
        assert callback.sequences
        held += callback.sequences.low <= TRUE_SCALE <= callback.sequences.high
    assert held >= 54


def test_two_batches_determine_the_scale() -> None:
    """Without noise between steps, |G_b|^2 = |G|^2 + tr(S) / b."""
    of_batch = {size: [2.0 + 60.0 / size] * 3 for size in (4, 32)}
    assert estimate_noise_scale(of_batch[4], of_batch[32], 4, 32) == pytest.approx([30.0] * 3)


def test_hooks_are_there_for_the_observed_steps_alone_and_again_when_a_run_begins_again() -> None:
    callback, batch = NoiseScale(first=4, steps=3), Batch(global_batch=4, micro_batch=2)
    observed: list[int] = []
    for model in (Regression(), Regression()):
        for step in range(1, 9):
            if step == 6 and not observed[6:]:
                break  # Memory was exhausted: the run begins again with another model.
            for _ in range(2):
                (model(torch.randn(2, WIDTH), torch.randn(2)) / 2).backward()
            model.zero_grad()
            observed.append(step if callback._micro_batches else 0)
            callback.on_step_end(TrainStep(step, torch.zeros(()), 1e-3, model, batch, 8))
        observed.append(-1)
    assert observed[:6] == [0, 0, 0, 4, 5, -1]
    assert observed[6:] == [0, 0, 0, 4, 5, 6, 0, 0, -1]


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def small_run(data: Path, model: ModelConfig, **settings: Any) -> ResolvedConfig:
    defaults: dict[str, Any] = {
        "micro_batch": 2, "global_batch": 6, "steps": 6, "cycle": Cycle(6, 0), "device": "cpu", "attention": "sdpa",
        "precision": "fp32", "keep_checkpoints": 0, "clip_norm": 0.1,
    }  # fmt: skip
    return ResolvedConfig.of(data=str(data), model=model, **(defaults | settings))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"ablate": ("set-to-none",)},
        {"compile": "aot_eager"},
        {"precision": "bf16"},
        pytest.param({"compile": "whole"}, marks=pytest.mark.slow),
    ],
    ids=lambda settings: " ".join(settings),
)
def test_a_run_has_the_same_losses_bit_for_bit_and_its_norm_is_that_of_the_step(
    small_shards: Path, small_model: ModelConfig, settings: dict[str, Any]
) -> None:
    """The weight of the embedding and the head is one: its gradient counts once, with both its parts."""
    config = small_run(small_shards, small_model, **settings)
    plain = make_trainer(config)
    plain.run()
    callback = NoiseScale(first=5, steps=2)
    observed = make_trainer(config, callbacks=Callbacks(user_callbacks=[callback]))
    observed.run()
    (report,), (plain_report,) = observed.times.reports, plain.times.reports
    assert report.step_losses == plain_report.step_losses
    for weight, plain_weight in zip(observed.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(weight, plain_weight)
    last_squared_norm = float(callback._observed[-1][1])
    assert math.sqrt(last_squared_norm) == pytest.approx(report.gradient_norm, rel=1e-4)
    assert callback.sequences
    assert len(callback._observed) == 2


@pytest.mark.usefixtures("in_folder")
def test_the_noise_scale_of_a_run_from_python(small_shards: Path, small_model: ModelConfig) -> None:
    config = TrainConfig.of(
        data=str(small_shards), model=small_model, micro_batch=2, global_batch=8, steps=12, cycle=Cycle(6, 0),
        device="cpu",
    )  # fmt: skip
    callback = NoiseScale(first=2, steps=10)
    train(config, name="noise", callbacks=[callback])
    sequences, tokens = callback.sequences, callback.tokens
    assert sequences
    assert tokens
    assert 0 < sequences.low < sequences.middle < sequences.high
    assert tokens.low == sequences.low * small_model.context_length


@pytest.mark.usefixtures("in_folder")
def test_a_step_of_one_micro_batch_has_no_noise_scale(small_shards: Path, small_model: ModelConfig) -> None:
    config = TrainConfig.of(
        data=str(small_shards), model=small_model, micro_batch=4, global_batch=4, steps=4, cycle=Cycle(4, 0),
        device="cpu",
    )  # fmt: skip
    with pytest.raises(UserError, match=r"micro-batch of 4.*micro_batch"):
        train(config, name="noise", callbacks=[NoiseScale(first=2, steps=2)])
    unused = NoiseScale()
    assert unused.sequences is None
    assert unused.tokens is None
    with pytest.raises(UserError, match="at least 2"):
        NoiseScale(first=1)
