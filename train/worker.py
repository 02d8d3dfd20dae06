"""What runs in Ray's workers: the loop, from the run's folder, into the run's folder."""

import traceback
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray.train
from ray.train.collective import broadcast_from_rank_zero

from infra.command import UserError
from infra.storage import write_json, write_text
from train.config import TrainConfig, config_from_json
from train.data import ShardData
from train.folder import RunFolder
from train.loop import Trainer
from train.progress import newest, read_progress
from train.sampling import closing_sample
from train.source import stream_of
from train.stream import StreamData

ATTEMPTS = 3
"""Starts from the same step after which a worker that dies is not started again."""


def train_function(payload: dict[str, Any]) -> dict[str, Any]:
    """What runs in Ray's workers: the loop, from the folder's newest checkpoint if it has one."""
    home = RunFolder(Path(payload["folder"]))
    context = ray.train.get_context()
    first, alone = context.get_world_rank() == 0, context.get_world_size() == 1
    with ExitStack() as held:
        resume, refusal = begin(home, held) if first else (None, None)
        refused = refusal is not None
        if not alone:
            refused = broadcast_from_rank_zero(refused)
        if refused:
            return {"refused": refusal}
        try:
            resume = resume if first else newest(home.checkpoints)
            return train(home, config_from_json(payload["config"], "the run's config"), resume, first)
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


def begin(home: RunFolder, held: ExitStack) -> tuple[Path | None, str | None]:
    """Take the run's folder for as long as ``held`` is open: the checkpoint to go on from, and why not to train if so.

    The first worker's part, whose answer all follow: one that left alone would leave the others in a collective.
    """
    try:
        held.enter_context(home.held())
        if home.refused.exists():
            reason = home.refused.read_text(encoding="utf-8")
            home.refused.unlink()
            return None, reason
        resume = newest(home.checkpoints)
        refuse_hopeless(home, read_progress(resume).step if resume else 0)
    except UserError as mistake:
        return None, str(mistake)
    except OSError as failure:  # raised, it would have Ray start us again and again
        why = f"{home.path} cannot be used ({failure.strerror}): make room or mend it, then continue with --resume."
        return None, why
    return resume, None


def train(home: RunFolder, config: TrainConfig, resume: Path | None, first: bool) -> dict[str, Any]:
    """Train in ``home`` from ``resume`` as one worker, of whom the ``first`` also reports. Gives the result as JSON."""
    data = StreamData(config, stream_of(config)) if config.stream else ShardData(config)
    if not first:
        return Trainer(config, data=data, checkpoints=home.checkpoints, resume=resume).run().to_json()
    home.rewind(read_progress(resume).reported if resume else 0)
    trainer = Trainer(
        config,
        data=data,
        on_cycle=home.append,
        should_stop=home.stop.exists,
        checkpoints=home.checkpoints,
        resume=resume,
    )
    result = trainer.run()
    if isinstance(data, StreamData):
        write_json(home.stream, data.summary())
    return replace(result, sample=closing_sample(trainer, result)).to_json()


def refuse_hopeless(home: RunFolder, step: int) -> None:
    """Raise ``UserError`` when workers started from ``step`` have died too often without a new checkpoint."""
    starts = home.path / "starts"
    earlier = starts.read_text().split() if starts.exists() else []
    write_text(starts, "\n".join([*earlier, str(step)]) + "\n")
    if earlier[-ATTEMPTS:] == [str(step)] * ATTEMPTS:
        starts.unlink()
        raise UserError(
            f"the worker died {ATTEMPTS} times without getting from step {step} to another checkpoint: "
            "see Ray's logs for its end, and whether the machine has enough memory."
        )
