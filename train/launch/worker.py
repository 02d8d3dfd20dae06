"""The worker's side of a run on Ray Train: the loop, which continues from and reports to the run's folder."""

import socket
import traceback
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray.train

from infra.errors import UserError
from infra.schema import to_json
from infra.storage import write_json, write_text
from pipeline.stream import Stream
from train.checkpoint.progress import newest, read_progress, trust
from train.checkpoint.run_folder import RunFolder
from train.config import TrainConfig, config_from_json
from train.data.dataset import ShardData
from train.data.stream import StreamData
from train.loop.memory_limit import Limit
from train.loop.trainer import Trainer
from train.model.parallel import exchange
from train.result import RunResult
from train.sampling import closing_sample

ATTEMPTS = 3
"""Starts from the same step after which a worker that dies is not restarted."""

SHARE = "give an --out that all machines of the cluster share, or run the command on the machine that trains."


@dataclass(frozen=True)
class Start:
    """What the driver and Ray tell a worker about its start."""

    command: str
    """A name for the driver's command; a disk with it in the run's folder has been used by its driver or workers."""
    step: int
    """The step that the run continues from; 0 is its beginning."""
    again: bool = False
    """Whether Ray Train started this worker after a failure of earlier workers of this command."""


def train_function(payload: dict[str, Any]) -> dict[str, Any]:
    """Runs in Ray's workers: the loop, from the step that the driver names or a newer checkpoint of this command."""
    trust(payload["checksums"])
    home = RunFolder(Path(payload["folder"]))
    context = ray.train.get_context()
    first, alone = context.get_world_rank() == 0, context.get_world_size() == 1
    start = Start(payload["command"], payload["step"], again=ray.train.get_checkpoint() is not None)
    with ExitStack() as locks:
        resume, refusal = begin(home, locks, start) if first else (newest(home.checkpoints), None)
        if not alone:
            refusal = common_refusal(exchange((refusal, step_of(resume), socket.gethostname())))
        if refusal:
            return {"refused": refusal}
        # Not a real checkpoint: Ray Train passes it to the workers that it starts after a failure of these.
        begun = ray.train.Checkpoint(payload["begun"])
        ray.train.report({}, checkpoint=begun, checkpoint_upload_mode=ray.train.CheckpointUploadMode.NO_UPLOAD)
        try:
            config, asked = (config_from_json(payload[name], "the run's config") for name in ("config", "asked"))
            return to_json(train(home, config, resume, first, payload["memory_limit"], asked, payload["stream"]))
        except UserError as mistake:
            if alone:
                return {"refused": str(mistake)}
            with suppress(OSError, UserError):  # the mistake may be a full disk
                write_text(home.refused, str(mistake))
            raise
        except Exception:
            if alone:
                return {"failed": traceback.format_exc()}
            raise  # the others wait in a collective until Ray stops the group and restarts it


def begin(home: RunFolder, locks: ExitStack, start: Start) -> tuple[Path | None, str | None]:
    """Lock the run's folder while ``locks`` is open; returns the checkpoint to continue from, or a reason not to train.

    Called by the first worker, whose answer all follow: one that left alone would leave the others in a collective.
    """
    try:
        locks.enter_context(home.worker_lock())
        if home.refused.exists():
            reason = home.refused.read_text(encoding="utf-8")
            home.refused.unlink()
            return None, reason
        resume = newest(home.checkpoints)
        starts = home.starts_of(start.command)
        refuse_other_step(home, start, step_of(resume), starts)
        refuse_hopeless(home, start.command, [*(starts or ()), step_of(resume)])
    except UserError as mistake:
        return None, str(mistake)
    except FileNotFoundError:
        return None, f"{home.path} does not exist on {socket.gethostname()}, where Ray placed the worker: {SHARE}"
    except OSError as failure:  # if it were raised, Ray would restart the worker again and again
        why = f"{home.path} cannot be used ({failure.strerror}): make room or fix it, then continue with --resume."
        return None, why
    return resume, None


def step_of(checkpoint: Path | None) -> int:
    """The step of ``checkpoint``; 0 without one."""
    return read_progress(checkpoint).step if checkpoint else 0


def refuse_other_step(home: RunFolder, start: Start, found: int, starts: Sequence[int] | None) -> None:
    """Raise ``UserError`` when this run cannot continue from the newest checkpoint here, which is of step ``found``.

    ``starts`` are the steps from which this command's workers started on this disk; None on a disk that neither they
    nor the driver have used. There a checkpoint of another step belongs to another run. Elsewhere a newer checkpoint
    was saved by an earlier worker, and an older one means that checkpoints have been lost.
    """
    here = f"{home.checkpoints} on {socket.gethostname()}, where Ray placed the worker,"
    there = f"ends at step {found:,}" if found else "has no intact checkpoint"
    if starts is None and start.again:
        raise UserError(f"the worker failed and was restarted on another machine: {here} {there}: {SHARE}")
    least = max([start.step, *(starts or ())])
    if found < least or (starts is None and found > least):
        wanted = f"continues from step {least:,}" if least else "starts at step 0"
        raise UserError(f"the run {wanted}, and {here} {there}: {SHARE}")


def common_refusal(found: Sequence[tuple[str | None, int, str]]) -> str | None:
    """The reason why the workers do not train, if any, from each one's refusal, newest step and machine."""
    for refusal, _, _ in found:
        if refusal:
            return refusal
    step, machine = found[0][1:]
    for other, elsewhere in (theirs[1:] for theirs in found):
        if other != step:
            return f"the run continues from step {step:,} on {machine} and from step {other:,} on {elsewhere}: {SHARE}"
    return None


def train(
    home: RunFolder,
    config: TrainConfig,
    resume: Path | None,
    first: bool,
    memory_limit: int | None = None,
    asked: TrainConfig | None = None,
    stream: Stream | None = None,
) -> RunResult:
    """Train in ``home`` from ``resume`` as one worker; the ``first`` one also reports.

    ``memory_limit`` is in bytes, for each worker's process.
    """
    limit = Limit.impose(memory_limit, config.device) if memory_limit else None
    data = StreamData(config, stream) if stream else ShardData(config)
    if not first:
        return Trainer(config, data=data, checkpoints=home.checkpoints, resume=resume, limit=limit, asked=asked).run()
    home.rewind(read_progress(resume).reported if resume else 0)
    trainer = Trainer(
        config,
        data=data,
        on_cycle=home.append,
        should_stop=home.stop.exists,
        checkpoints=home.checkpoints,
        resume=resume,
        limit=limit,
        asked=asked,
    )
    result = trainer.run()
    if isinstance(data, StreamData):
        write_json(home.stream, data.summary())
    return replace(result, sample=closing_sample(trainer, result))


def refuse_hopeless(home: RunFolder, command: str, starts: Sequence[int]) -> None:
    """Save the steps that workers of ``command`` started from; the last one is this worker's.

    Raises ``UserError`` when they have died too often without a new checkpoint.
    """
    home.keep_starts(command, starts)
    step = starts[-1]
    if list(starts[-ATTEMPTS - 1 : -1]) == [step] * ATTEMPTS:
        raise UserError(
            f"the worker died {ATTEMPTS} times between step {step} and the next checkpoint: look for the reason in "
            "Ray's logs, and check whether the machine has enough memory."
        )
