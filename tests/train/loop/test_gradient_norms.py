"""Every step's gradient norm is looked at, and the attention kernel is named with one that is not finite."""

import math

import pytest
import torch
from trainers import make_trainer

from train.config import Cycle, ResolvedConfig
from train.loop.gradient_norms import MAX_SKIPPED_STEPS, NormCheck

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize("value", [NAN, INF])
def test_a_norm_in_the_middle_of_a_cycle_is_noticed(value: float) -> None:
    check = NormCheck("cudnn", skips_steps=False)
    assert check.reason(0, [5.0] * 3, [1.0, 0.0, 2.0]) is None
    reason = check.reason(3, [5.0, 5.0, NAN], [1.0, value, NAN])
    assert reason
    assert "step 5" in reason
    assert "cudnn" in reason
    assert "--attention" in reason
    assert "--attention" not in (NormCheck("manual", skips_steps=False).reason(0, [5.0], [value]) or "")


def test_a_loss_that_is_not_finite_is_the_earlier_cause() -> None:
    assert NormCheck("flash", skips_steps=False).reason(0, [5.0, NAN], [1.0, NAN]) is None


def test_loss_scaling_may_skip_steps_but_not_for_ever() -> None:
    check = NormCheck("flash", skips_steps=True)
    half = MAX_SKIPPED_STEPS // 2 + 1
    assert check.reason(0, [5.0] * half, [INF] * half) is None
    assert check.reason(half, [5.0] * (half + 1), [1.0] + [NAN] * half) is None
    reason = check.reason(0, [5.0] * half, [NAN] * half)
    assert reason
    assert "flash" in reason


def test_a_run_ends_at_gradients_that_are_not_finite(small_shards: object, small_model: object) -> None:
    """In the middle of a cycle, whose last norm is of a step that has not been reached with finite losses."""
    config = ResolvedConfig.of(
        data=str(small_shards), model=small_model, micro_batch=2, global_batch=2, steps=6, cycle=Cycle(3, 0),
        keep_checkpoints=0,
    )  # fmt: skip
    trainer = make_trainer(config)

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        return gradient * (NAN if trainer.state.step == 1 else 1.0)

    next(trainer.model.parameters()).register_hook(spoil)
    result = trainer.run()
    assert result.outcome == "diverged"
    assert "gradient norm is nan at step 2" in result.reason
    assert "sdpa" in result.reason
