"""A learning trial: how the loss of one configuration falls with the time of the final run.

The learning rate of the *trunk* is constant. At each *rung*, a length that the final run may have, a *branch* continues
from a checkpoint of the trunk and lets the learning rate fall to zero, and its validation loss is that of a run of this
length with the schedule ``wsd``, bit for bit on a CPU. One trunk therefore shows the loss for every length (Hägele et
al. 2024, arXiv 2405.18392). Other schedules have no such common part: a trial with ``constant`` validates its trunk,
and one with ``cosine`` is one run of full length.

The trial's folder keeps the trunk's newest checkpoint and the losses so far, so that a trial that was killed continues,
and a finalist trains longer.
"""

import json
import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import NamedTuple

from infra.cli.units import format_count, format_duration
from infra.errors import UserError
from infra.schema import from_json, strict, to_json
from infra.storage.directory import StorageDir
from infra.storage.files import scratch
from train.callbacks import Callback
from train.config import Cycle, ResolvedConfig, Schedule
from train.intervals import Estimate
from train.launch.job import WorkerJob
from train.launch.session import Driver, WorkerSession, step_of
from train.loop import memory
from train.noise_scale import NoiseScale
from train.result import RunResult
from train.run_files.run_folder import RunFolder
from tune.trial.row import RungLoss, TrialRow
from tune.trial.run import TrialRequest, classify_failure, classify_outcome, unmeasured_row

TRUNK_FRACTION: dict[Schedule, float] = {"wsd": 0.8, "constant": 1.0, "cosine": 0.0}
"""Fraction of a run before the learning rate falls, by schedule."""

TRUNK, BRANCH, LOSSES = "trunk", "branch", "losses.json"
"""Folders of the trunk and of the unfinished branch, and file of the losses, in a trial's folder."""

LEARNED_FRACTION = 0.95
"""Loss from which a model has learned more than the frequencies of tokens, as a fraction of their entropy."""

NOISE_STEPS = 20
"""Maximum number of steps before a branch in which the gradient noise scale is measured."""

TRUNK_CYCLES = 4
"""Number of cycles of the trunk up to the first rung. A spike is an increase over the mean loss of a cycle."""


@strict
@dataclass(frozen=True)
class Rung:
    """A length of the final run at which a learning trial is validated."""

    seconds: float
    """Time of the final run in seconds, without its first step."""
    trunk_steps: int
    """Number of steps of the trunk from which the branch continues."""
    steps: int
    """Number of steps of trunk and branch together, which the final run has."""


@strict
@dataclass(frozen=True)
class RungLosses:
    """The losses of a learning trial so far, as its folder stores them."""

    losses: list[RungLoss]
    """Loss by rung, in ascending order."""


class Learned(NamedTuple):
    """What is known of a learning trial after a rung."""

    losses: list[RungLoss]
    """Losses so far by rung."""
    result: RunResult | None = None
    """Result of the last run; None if the rung was trained by an earlier process."""
    noise_scale: Estimate | None = None
    """Gradient noise scale in sequences; None if it was not measured or could not be determined."""


def make_rungs(seconds: Sequence[float], tokens_per_second: float, config: ResolvedConfig) -> tuple[Rung, ...]:
    """Compute the rungs of ``config`` at the times ``seconds`` of a run with this speed.

    Rungs that end before the warm-up has been followed by as many steps are left out; with ``cosine``, which has no
    trunk, all but the last. Raises ``UserError`` if none is left.
    """
    schedule, warmup = config.optimization.schedule, config.optimization.warmup_steps
    fraction, rungs = TRUNK_FRACTION[schedule], []
    steps_by_time = {time: int(time * tokens_per_second / config.step_tokens) for time in seconds}
    for time, steps in steps_by_time.items():
        trunk_steps = min(int(fraction * steps), steps - 1)
        if steps and trunk_steps >= (2 * warmup if fraction else 0):
            rungs.append(Rung(time, trunk_steps, steps))
    if fraction == 0:
        rungs = rungs[-1:]
    if not rungs:
        length = format_count(steps_by_time[seconds[-1]], "step")
        raise UserError(
            f"{format_duration(seconds[-1])} of training at {tokens_per_second:,.0f} tokens/s are {length} of "
            f"{config.batch.global_batch} sequences, too few for a warm-up of {warmup} steps and a decay. Use a longer "
            "--train-time, a smaller global batch, or fewer --warmup-steps."
        )
    return tuple(rungs)


def learn(
    config: ResolvedConfig,
    rungs: Sequence[Rung],
    val_batches: int,
    location: StorageDir,
    memory_limit: int | None = None,
    *,
    measures_noise: bool = False,
) -> Iterator["Learned"]:
    """Train ``config`` at every rung, and yield what is known after each.

    A result that is not ``finished`` is the last one. Rungs whose losses are in the trial's folder at ``location`` are
    not trained again, and have no result.

    Args:
        config: the final run, with its number of steps.
        rungs: rungs in ascending order.
        val_batches: number of validation batches at a rung.
        location: the trial's folder.
        memory_limit: bytes that this process may use.
        measures_noise: whether to measure the gradient noise scale in the last steps of the trunk before each branch.
    """
    copies = ("learning", location.parent.digest)
    trunk, branch = (RunFolder.of(location / part, *copies, location.digest, part) for part in (TRUNK, BRANCH))
    if trunk.copy_of:  # What a trial that was stopped has left on this machine is in object storage.
        discard_other_copies(scratch(*copies), location.digest)
    losses = read_losses(location)
    first = rungs[0]
    trunk_config = config.replace(
        schedule="constant", cycle=Cycle(max(1, first.trunk_steps // TRUNK_CYCLES), 0), keep_checkpoints=1
    )
    for known in range(1, len(losses) + 1):
        yield Learned(losses[:known])
    noise: NoiseScale | None = None
    validated = {loss.seconds for loss in losses}
    for rung in (rung for rung in rungs if rung.seconds not in validated):
        result, checkpoint = None, None
        if rung.trunk_steps:
            checkpoint, _ = trunk.newest_checkpoint()
            if steps := rung.trunk_steps - step_of(checkpoint):
                watched = min(NOISE_STEPS, steps - 1)
                if measures_noise and watched > 1 and config.batch.accumulation > 1:
                    noise = NoiseScale(rung.trunk_steps - watched + 1, watched)
                callbacks = [noise] if noise else []
                result = _train(trunk_config, trunk, checkpoint, memory_limit, StopAfterSteps(steps), callbacks)
                checkpoint, _ = trunk.newest_checkpoint()
        if result is None or result.outcome == "interrupted":
            branch_config = config.replace(steps=rung.steps, cycle=Cycle(rung.steps, val_batches), keep_checkpoints=1)
            started, _ = branch.newest_checkpoint()
            result = _train(branch_config, branch, started or checkpoint, memory_limit, Driver())
        if result.outcome == "finished" and result.val_loss is not None:
            has_learned = result.unigram_loss is None or result.val_loss < LEARNED_FRACTION * result.unigram_loss
            losses = [*losses, RungLoss(rung.seconds, result.train_tokens, result.val_loss, has_learned)]
            location.write_json(LOSSES, to_json(RungLosses(losses)))
            branch.remove()
        yield Learned(losses, result, known_scale(noise))
        if result.outcome != "finished":
            return


def known_scale(noise: NoiseScale | None) -> Estimate | None:
    """Return the noise scale in sequences; None if a gradient could not be distinguished from zero or from no noise."""
    scale = noise.sequences if noise else None
    return scale if scale and 0 < scale.middle < math.inf else None


def discard_other_copies(folder: Path, name: str) -> None:
    """Remove all that ``folder`` contains except for ``name``."""
    for other in folder.iterdir():
        if other.name != name:
            shutil.rmtree(other, ignore_errors=True)


class StopAfterSteps(Driver):
    """A driver that stops its session after ``steps`` steps, for which the loop asks after every step."""

    def __init__(self, steps: int) -> None:
        self._steps_left = steps

    def should_stop(self) -> bool:
        self._steps_left -= 1
        return self._steps_left <= 0


def _train(
    config: ResolvedConfig,
    folder: RunFolder,
    resume: Path | None,
    memory_limit: int | None,
    driver: Driver,
    callbacks: Sequence[Callback] = (),
) -> RunResult:
    """Train ``config`` from the checkpoint ``resume``, with its files in ``folder``, and free its memory."""
    folder.path.mkdir(parents=True, exist_ok=True)
    result = WorkerSession(WorkerJob(config, memory_limit), folder, driver, callbacks).run(resume).result
    assert result is not None, "a session without an exception has a result"
    memory.reset_after_oom(config.execution)
    return result


def read_losses(location: StorageDir) -> list[RungLoss]:
    """Read the losses in a trial's folder at ``location``; empty for a new trial."""
    try:
        content = json.loads(location.read(LOSSES))
    except FileNotFoundError:
        return []
    except ValueError as damage:
        raise UserError(
            f"{location}/{LOSSES} is corrupt ({damage}). Delete {location} to run its trial again."
        ) from None
    return from_json(RungLosses, content, f"{location}/{LOSSES}").losses


@dataclass(frozen=True, kw_only=True)
class LearningRequest(TrialRequest):
    """The input of a learning trial's process, whose ``config`` is the final run with its number of steps."""

    seconds: tuple[float, ...]
    """Times of the final run at the rungs, in ascending order."""
    tokens_per_second: float
    """Speed of the final run."""
    val_batches: int
    """Number of validation batches at a rung."""
    location: StorageDir
    """Folder of the trial's checkpoints and losses, which later trials of the same settings and seed continue."""
    measures_noise: bool = False
    """Whether to measure the gradient noise scale."""

    def rows(self) -> Iterator[tuple[TrialRow, str | None]]:
        """Train to each rung, and yield the row so far after each. It is ``pruned`` if no other follows."""
        started_at = monotonic()
        row, trace = unmeasured_row(self, "ok", "", 0.0), None
        try:
            rungs = make_rungs(self.seconds, self.tokens_per_second, self.config)
            for learned in learn(
                self.config, rungs, self.val_batches, self.location, self.memory_limit,
                measures_noise=self.measures_noise,
            ):  # fmt: skip
                row = self._row(learned, is_last=len(learned.losses) == len(rungs))
                if row.outcome == "pruned":
                    yield replace(row, seconds=monotonic() - started_at), None
        except UserError as mistake:
            row = replace(row, outcome="failed", reason=str(mistake).rstrip("."))
        except Exception as failure:  # noqa: BLE001 the error becomes the outcome of the trial
            outcome, reason, trace = classify_failure(failure)
            row = replace(row, outcome=outcome, reason=reason)
        yield replace(row, seconds=monotonic() - started_at), trace

    def _row(self, learned: Learned, *, is_last: bool) -> TrialRow:
        """Create the row of the trial so far, or after the last rung."""
        losses, result, noise_scale = learned
        outcome, reason = ("ok", f"learned for {format_duration(round(self.seconds[-1], 1))} of the final run")
        if result and result.outcome != "finished":
            outcome, reason = classify_outcome(result)
        elif not is_last:
            outcome, reason = "pruned", "its loss was above the median of the trials at the same rung"
        row = unmeasured_row(self, outcome, reason, 0.0)
        step_tokens = self.config.step_tokens
        return replace(row, result=result, step_tokens=step_tokens, rungs=losses, noise_scale=noise_scale)
