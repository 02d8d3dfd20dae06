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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from infra.errors import UserError
from infra.schema import from_json, strict, to_json
from infra.storage.directory import StorageDir
from train.config import Cycle, ResolvedConfig, Schedule
from train.launch.job import WorkerJob
from train.launch.session import Driver, WorkerSession, step_of
from train.loop import memory
from train.result import RunResult
from train.run_files.run_folder import RunFolder

TRUNK_FRACTION: dict[Schedule, float] = {"wsd": 0.8, "constant": 1.0, "cosine": 0.0}
"""Fraction of a run before the learning rate falls, by schedule."""

TRUNK, BRANCH, LOSSES = "trunk", "branch", "losses.json"
"""Folders of the trunk and of the unfinished branch, and file of the losses, in a trial's folder."""

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
class RungLoss:
    """The loss of a learning trial at a rung."""

    seconds: float
    """Time of the final run in seconds."""
    tokens: int
    """Training tokens of the final run."""
    loss: float
    """Validation loss after the branch, in nats/token."""


@strict
@dataclass(frozen=True)
class RungLosses:
    """The losses of a learning trial so far, as its folder stores them."""

    losses: list[RungLoss]
    """Loss by rung, in ascending order."""


def make_rungs(seconds: Sequence[float], tokens_per_second: float, config: ResolvedConfig) -> tuple[Rung, ...]:
    """Compute the rungs of ``config`` at the times ``seconds`` of a run with this speed.

    Raises ``UserError`` if the shortest time has less than one step for the trunk and one for the branch.
    """
    fraction = TRUNK_FRACTION[config.optimization.schedule]
    rungs = []
    for time in seconds:
        steps = int(time * tokens_per_second / config.step_tokens)
        trunk_steps = int(fraction * steps)
        if steps < 2 or (0 < fraction < 1 and not 0 < trunk_steps < steps):
            raise UserError(
                f"{time:.0f} s of training have {steps} steps of {config.batch.global_batch} sequences at "
                f"{tokens_per_second:,.0f} tokens/s, too few to learn from. Use a longer --train-time or smaller values "
                "of global_batch."
            )
        rungs.append(Rung(time, trunk_steps, steps))
    return tuple(rungs)


def learn(
    config: ResolvedConfig, rungs: Sequence[Rung], val_batches: int, location: StorageDir, memory_limit: int | None
) -> Iterator[tuple[RunResult, list[RungLoss]]]:
    """Train ``config`` at every rung, and yield the result of the last run and all losses so far after each.

    A result that is not ``finished`` is the last one. Rungs whose losses are in the trial's folder at ``location`` are
    not trained again; their result is not known, and they are only part of the losses.

    Args:
        config: the configuration with the warm-up and the schedule of the final run.
        rungs: rungs in ascending order.
        val_batches: number of validation batches at a rung.
        location: the trial's folder.
        memory_limit: bytes that this process may use.
    """
    trunk, branch = (RunFolder.of(location / part, "learning", location.digest, part) for part in (TRUNK, BRANCH))
    losses = read_losses(location)
    trunk_cycle = Cycle(max(1, (rungs[0].trunk_steps or rungs[0].steps) // TRUNK_CYCLES), 0)
    for rung in rungs[len(losses) :]:
        trunk_config = config.replace(schedule="constant", steps=rung.trunk_steps or None, cycle=trunk_cycle)
        result, checkpoint = None, None
        if rung.trunk_steps:
            checkpoint, _ = trunk.newest_checkpoint()
            if step_of(checkpoint) < rung.trunk_steps:
                result = _train(trunk_config, trunk, checkpoint, memory_limit)
                checkpoint, _ = trunk.newest_checkpoint()
        if result is None or result.outcome == "finished":
            branch_config = config.replace(steps=rung.steps, cycle=Cycle(rung.steps, val_batches))
            started, _ = branch.newest_checkpoint()
            result = _train(branch_config, branch, started or checkpoint, memory_limit)
        if result.outcome == "finished" and result.val_loss is not None:
            losses = [*losses, RungLoss(rung.seconds, result.train_tokens, result.val_loss)]
            location.write_json(LOSSES, to_json(RungLosses(losses)))
            branch.remove()
        yield result, losses
        if result.outcome != "finished":
            return


def _train(config: ResolvedConfig, folder: RunFolder, resume: Path | None, memory_limit: int | None) -> RunResult:
    """Train ``config`` from the checkpoint ``resume``, with its files in ``folder``, and free its memory."""
    folder.path.mkdir(parents=True, exist_ok=True)
    result = WorkerSession(WorkerJob(config, memory_limit), folder, Driver()).run(resume).result
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
        raise UserError(f"{location}/{LOSSES} is corrupt ({damage}). Delete {location} to run its trial again.") from None
    return from_json(RungLosses, content, f"{location}/{LOSSES}").losses
