"""A learning trial: its branches have the losses of plain runs, whatever interrupted it."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from infra.errors import UserError
from infra.storage.directory import StorageDir
from train.config import Cycle, ResolvedConfig, TrainConfig
from train.intervals import Estimate
from train.launch.job import WorkerJob
from train.launch.session import Driver, WorkerSession
from train.model_config import ModelConfig
from train.noise_scale import NoiseScale
from train.resolved import resolve_local
from train.run_files.run_folder import RunFolder
from tune.space import Candidate
from tune.trial.learning import (
    LEARNED_FRACTION,
    Learned,
    LearningRequest,
    Rung,
    StopAfterSteps,
    known_scale,
    learn,
    make_rungs,
    read_losses,
)
from tune.trial.row import Proposal, RungLoss

SECONDS = [6.0, 12.0, 24.0]


@pytest.fixture
def config(small_shards: Path, small_model: ModelConfig) -> ResolvedConfig:
    """A final run of 24 steps, at one step of 4 sequences per second."""
    settings = TrainConfig.of(
        data=str(small_shards), model=small_model, micro_batch=2, global_batch=4, device="cpu", schedule="wsd",
        warmup_steps=2, learning_rate=3e-3, steps=24, checkpoint_every=5,
    )  # fmt: skip
    return resolve_local(settings)


def rungs_of(config: ResolvedConfig) -> tuple[Rung, ...]:
    return make_rungs(SECONDS, config.step_tokens, config)


def plain_loss(config: ResolvedConfig) -> float:
    """The validation loss of a run without a trunk and branches."""
    result = WorkerSession(WorkerJob(config.replace(cycle=Cycle(24, 2))), None, Driver()).run().result
    assert result
    assert result.val_loss is not None
    return result.val_loss


def losses_of(trial: Iterator[Learned]) -> list[RungLoss]:
    return [learned.losses for learned in trial][-1]


def test_a_trunk_and_its_last_branch_are_a_plain_run(config: ResolvedConfig, tmp_path: Path) -> None:
    rungs = rungs_of(config)
    assert [(rung.trunk_steps, rung.steps) for rung in rungs] == [(4, 6), (9, 12), (19, 24)]
    losses = losses_of(learn(config, rungs, 2, StorageDir.of(tmp_path)))
    assert [(loss.seconds, loss.tokens) for loss in losses] == [(s, int(s) * config.step_tokens) for s in SECONDS]
    assert losses[-1].loss == plain_loss(config)


def test_a_trial_that_was_killed_continues_where_it_was(config: ResolvedConfig, tmp_path: Path) -> None:
    """Between two rungs, after some steps of the trunk, and after some of a branch."""
    rungs = rungs_of(config)
    expected = losses_of(learn(config, rungs, 2, StorageDir.of(tmp_path / "whole")))
    location = StorageDir.of(tmp_path / "killed")
    first = next(learn(config, rungs, 2, location)).losses
    assert first == expected[:1] == read_losses(location)

    def train_for(steps: int, folder: RunFolder, length: int, resume: Path | None) -> None:
        """Leave what a process that is killed after its checkpoint leaves."""
        folder.path.mkdir(exist_ok=True)
        of_length = config.replace(steps=length, cycle=Cycle(length, 2), keep_checkpoints=1)
        WorkerSession(WorkerJob(of_length), folder, StopAfterSteps(steps)).run(resume)

    trunk, branch = (RunFolder.of(location / part) for part in ("trunk", "branch"))
    train_for(3, trunk, 24, trunk.newest_checkpoint()[0])
    trial = learn(config, rungs, 2, location)
    assert next(trial) == Learned(expected[:1])  # what is known is reported again, for the scheduler
    assert next(trial).losses == expected[:2]
    train_for(10, trunk, 24, trunk.newest_checkpoint()[0])
    train_for(2, branch, 24, trunk.newest_checkpoint()[0])
    assert losses_of(learn(config, rungs, 2, location)) == expected
    assert [path.name for path in trunk.checkpoints.iterdir()] == ["step-00000019"]
    assert not branch.path.exists()


def test_a_finished_trial_trains_longer(config: ResolvedConfig, tmp_path: Path) -> None:
    rungs, location = rungs_of(config), StorageDir.of(tmp_path)
    short = losses_of(learn(config, rungs[:2], 2, location))
    longer = losses_of(learn(config, rungs, 2, location))
    assert longer[:2] == short
    assert longer[-1].loss == plain_loss(config)


def test_the_noise_scale_is_measured_and_changes_no_loss(config: ResolvedConfig, tmp_path: Path) -> None:
    rungs = rungs_of(config)
    plain = losses_of(learn(config, rungs, 2, StorageDir.of(tmp_path / "plain")))
    *_, last = learn(config, rungs, 2, StorageDir.of(tmp_path / "noise"), measures_noise=True)
    assert last.losses == plain
    assert last.noise_scale is None or last.noise_scale.low <= last.noise_scale.middle <= last.noise_scale.high


class Measured(NoiseScale):
    """A noise scale that was measured as ``scale``."""

    def __init__(self, scale: Estimate | None) -> None:
        super().__init__()
        self.scale = scale

    @property
    def sequences(self) -> Estimate | None:
        return self.scale


def test_a_noise_scale_that_was_not_determined_is_not_used() -> None:
    scale = Estimate(9.0, 5.0, math.inf)
    assert known_scale(Measured(scale)) == scale
    for unknown in (None, Estimate(0.0, 0.0, 5.0), Estimate(math.inf, 3.0, math.inf)):
        assert known_scale(Measured(unknown)) is None
    assert known_scale(None) is None


def test_a_constant_rate_has_no_decay_and_a_cosine_one_rung(config: ResolvedConfig, tmp_path: Path) -> None:
    constant = config.replace(schedule="constant")
    assert [(rung.trunk_steps, rung.steps) for rung in rungs_of(constant)] == [(5, 6), (11, 12), (23, 24)]
    (*_, last) = losses_of(learn(constant, rungs_of(constant), 2, StorageDir.of(tmp_path / "constant")))
    assert last.loss == plain_loss(constant)
    cosine = config.replace(schedule="cosine")
    assert [(rung.trunk_steps, rung.steps) for rung in rungs_of(cosine)] == [(0, 24)]
    location = StorageDir.of(tmp_path / "cosine")
    (explored,) = losses_of(learn(cosine, make_rungs(SECONDS[:1], cosine.step_tokens, cosine), 2, location))
    (known, last) = losses_of(learn(cosine, rungs_of(cosine), 2, location))
    assert known == explored
    assert last.loss == plain_loss(cosine)


def test_rungs_within_the_warm_up_are_left_out(config: ResolvedConfig) -> None:
    slow = config.replace(warmup_steps=4)
    assert [rung.seconds for rung in rungs_of(slow)] == [12.0, 24.0]
    with pytest.raises(UserError, match="warm-up of 12 steps"):
        rungs_of(config.replace(warmup_steps=12))


def test_damaged_losses_are_named(config: ResolvedConfig, tmp_path: Path) -> None:
    (tmp_path / "losses.json").write_text("{")
    with pytest.raises(UserError, match=r"losses\.json"):
        read_losses(StorageDir.of(tmp_path))


def request(config: ResolvedConfig, folder: Path) -> LearningRequest:
    candidate = Candidate(2, (("learning_rate", 3e-3),))
    return LearningRequest(
        "key", 1, "name", Proposal(candidate, "learn"), config, "here", seconds=tuple(SECONDS),
        tokens_per_second=config.step_tokens, val_batches=2, location=StorageDir.of(folder),
    )  # fmt: skip


def test_a_trial_has_a_row_after_every_rung(config: ResolvedConfig, tmp_path: Path) -> None:
    rows = [row for row, _ in request(config, tmp_path).rows()]
    assert [(row.outcome, len(row.rungs)) for row in rows] == [("pruned", 1), ("pruned", 2), ("ok", 3)]
    result = rows[-1].result
    assert result
    assert result.unigram_loss
    limit = LEARNED_FRACTION * result.unigram_loss
    assert [rung.has_learned for rung in rows[-1].rungs] == [rung.loss < limit for rung in rows[-1].rungs]


def test_divergence_and_unusable_settings_are_outcomes(config: ResolvedConfig, tmp_path: Path) -> None:
    (row, trace) = [*request(config.replace(learning_rate=1e6, clip_norm=0.0), tmp_path / "wild").rows()][-1]
    assert (row.outcome, trace) == ("failed", None)
    assert "loss" in row.reason
    (row, trace) = [*request(config.replace(warmup_steps=12), tmp_path / "short").rows()][-1]
    assert (row.outcome, trace) == ("failed", None)
    assert "warm-up of 12 steps" in row.reason
    missing = replace(request(config, tmp_path / "gone"), config=config.replace(data=str(tmp_path / "nothing")))
    (row, trace) = [*missing.rows()][-1]
    assert (row.outcome, trace, row.rungs) == ("failed", None, [])
