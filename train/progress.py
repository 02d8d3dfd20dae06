"""Where a run stands on disk: its checkpoints, which of them are sound, and the position each holds.

A folder is a checkpoint when its ``progress.json``, which is written last, holds the checksums of its
other files. Imports no torch, so that commands find what they continue before anything heavy is loaded.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infra.command import UserError
from pipeline.shards import checksum

PROGRESS = "progress.json"


@dataclass(frozen=True)
class Progress:
    """Where a run stands: everything that is not a tensor."""

    step: int
    position: int
    """Windows consumed, over all workers."""
    reported: int
    """The last step that a cycle's report covers; losses of the steps behind it are in the checkpoint."""
    reference: float | None
    """Mean loss of the last reported cycle, which a spike is measured against."""
    val_tokens: int
    elapsed: float
    """Seconds of training."""
    data_fingerprint: str
    vocabulary_sha256: str
    config: dict[str, Any]
    place: dict[str, Any] | None = None
    """Where in a stream of books the position is; None for shards."""
    files: dict[str, str] = field(default_factory=dict)
    """Checksum of each file."""


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints under ``folder``, oldest first, sound or not."""
    return sorted(folder.glob("step-*"))


def newest(folder: Path) -> Path | None:
    """The newest checkpoint under ``folder`` whose files are as they were written."""
    return next((found for found in reversed(checkpoints_in(folder)) if damage(found) is None), None)


def passed_over(checkpoint: Path) -> Iterator[str]:
    """A line for each damaged checkpoint behind ``checkpoint``, the newest sound one, saying what is wrong with it."""
    for later in checkpoints_in(checkpoint.parent):
        if later.name > checkpoint.name and (fault := damage(later)):
            yield f"{later} is damaged: {fault}; {checkpoint.name} is taken instead."


def damage(checkpoint: Path, only: str | None = None) -> str | None:
    """What is wrong with a checkpoint, or with the ``only`` file of it that matters; None when nothing is."""
    try:
        for file, expected in read_progress(checkpoint).files.items():
            if only and file != only:
                continue
            if not (checkpoint / file).is_file():
                return f"{file} is missing"
            if checksum(checkpoint / file) != expected:
                return f"{file} is not what was written"
    except UserError as unreadable:
        return str(unreadable).rstrip(".")  # more of a sentence follows
    return None


def read_progress(checkpoint: Path) -> Progress:
    """Where the run that wrote ``checkpoint`` stood. Raises ``UserError`` when it is no checkpoint."""
    try:
        return Progress(**json.loads((checkpoint / PROGRESS).read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, TypeError) as fault:
        raise UserError(f"{checkpoint} is no checkpoint that can be read ({fault}).") from fault
