"""What runs in Ray's workers: the loop, from the run's folder, into the run's folder."""

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
"""Starts from the same step after which a worker that dies is not started again."""

SHARE = "give an --out that all machines of the cluster share, or run the command on the machine that trains."


@dataclass(frozen=True)
class Start:
    """What the driver and Ray tell a worker about where it begins."""

    command: str
    """Names the driver's command; on the disk where it is found in the run's folder, its driver or workers wrote it."""
    step: int
    """The step that the run continues from; 0 is its beginning."""
    again: bool = False
    """Whether workers of this command have begun before, and Ray Train started these after a failure."""


def train_function(payload: dict[str, Any]) -> dict[str, Any]:
    """What runs in Ray's workers: the loop, from the step that the driver names, or where it got to since."""
    trust(payload["checksums"])
    home = RunFolder(Path(payload["folder"]))
    context = ray.train.get_context()
    first, alone = context.get_world_rank() == 0, context.get_world_size() == 1
    start = Start(payload["command"], payload["step"], again=ray.train.get_checkpoint() is not None)
    with ExitStack() as held:
        resume, refusal = begin(home, held, start) if first else (newest(home.checkpoints), None)
        if not alone:
            refusal = common_refusal(exchange((refusal, step_of(resume), socket.gethostname())))
        if refusal:
            return {"refused": refusal}
        # A pointer that no file stands behind: Ray Train gives it to the workers that it starts after these.
        begun = ray.train.Checkpoint(payload["begun"])
        ray.train.report({}, checkpoint=begun, checkpoint_upload_mode=ray.train.CheckpointUploadMode.NO_UPLOAD)
        try:
            config, asked = (config_from_json(payload[name], "the run's config") for name in ("config", "asked"))
            return to_json(train(home, config, resume, first, payload["memory_limit"], asked, payload["stream"]))
        except UserError as mistake:
            if alone:
                return {"refused": str(mistake)}
            with suppress(OSError, UserError):  # a disk may be full, which is perhaps the mistake
                write_text(home.refused, str(mistake))
            raise
        except Exception:
            if alone:
                return {"failed": traceback.format_exc()}
            raise  # the others wait in a collective until Ray stops the group, and starts it again


def begin(home: RunFolder, held: ExitStack, start: Start) -> tuple[Path | None, str | None]:
    """Take the run's folder for as long as ``held`` is open: the checkpoint to continue from, and why not to if so.

    The first worker's part, whose answer all follow: one that left alone would leave the others in a collective.
    """
    try:
        held.enter_context(home.held())
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
    except OSError as failure:  # raised, it would have Ray start us again and again
        why = f"{home.path} cannot be used ({failure.strerror}): make room or mend it, then continue with --resume."
        return None, why
    return resume, None


def step_of(checkpoint: Path | None) -> int:
    """The step that a run continues from with ``checkpoint``, or begins at without one."""
    return read_progress(checkpoint).step if checkpoint else 0


def refuse_other_step(home: RunFolder, start: Start, found: int, starts: Sequence[int] | None) -> None:
    """Raise ``UserError`` when the newest checkpoint here, of step ``found``, is not one to continue from.

    ``starts`` are the steps that this command's workers started from here; None on a disk that is not the driver's and
    where none of them has been. There a checkpoint other than the one asked for belongs to another run. Elsewhere a
    newer one is what a worker saved since, and an older one a loss.
    """
    here = f"{home.checkpoints} on {socket.gethostname()}, where Ray placed the worker,"
    there = f"ends at step {found:,}" if found else "holds no checkpoint that is whole"
    if starts is None and start.again:
        raise UserError(f"the worker failed and was started again on another machine: {here} {there}: {SHARE}")
    least = max([start.step, *(starts or ())])
    if found < least or (starts is None and found > least):
        wanted = f"continues from step {least:,}" if least else "begins anew"
        raise UserError(f"the run {wanted}, and {here} {there}: {SHARE}")


def common_refusal(found: Sequence[tuple[str | None, int, str]]) -> str | None:
    """Why the workers do not train, from what each of them found: its refusal, its newest step and its machine."""
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
    """Train in ``home`` from ``resume`` as one worker, of whom the ``first`` also reports.

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
    """Keep the steps that workers of ``command`` started from, the last one now.

    Raises ``UserError`` when they died too often without a new checkpoint.
    """
    home.keep_starts(command, starts)
    step = starts[-1]
    if list(starts[-ATTEMPTS - 1 : -1]) == [step] * ATTEMPTS:
        raise UserError(
            f"the worker died {ATTEMPTS} times without getting from step {step} to another checkpoint: "
            "see Ray's logs for its end, and whether the machine has enough memory."
        )
