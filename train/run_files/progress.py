"""The progress of a run on disk: its checkpoints, which of them are intact, and the position that each holds.

A folder is a checkpoint when its ``progress.json``, which is written last, holds the checksums of its other files.
Imports no torch, so that commands find what they continue before anything slow is loaded.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from infra.errors import UserError
from infra.schema import from_json, strict
from pipeline.shards import Manifest, checksum
from train.config import DurationConfig, TrainConfig, config_from_json
from train.model_config import AnyModel, format_model

PROGRESS = "progress.json"


@dataclass(frozen=True)
class RunState:
    """How far a run has got: the numbers that its loop counts, and its checkpoints and result contain."""

    step: int = 0
    position: int = 0
    """Windows consumed, over all workers."""
    reported: int = 0
    """The last step that a cycle's report covers; the losses of later steps are in the checkpoint."""
    reference: float | None = None
    """Mean loss of the last reported cycle, relative to which a spike is detected."""
    val_tokens: int = 0
    elapsed: float = 0.0
    """Seconds of training."""


@strict
@dataclass(frozen=True, kw_only=True)
class Progress(RunState):
    """The part of a checkpoint that is not tensors."""

    data_fingerprint: str
    tokenizer_sha256: str
    config: dict[str, Any]
    """The run as it was resolved."""
    data_state: dict[str, Any] | None = None
    """State of the data loader for a stream of books; None for shards."""
    files: dict[str, str] = field(default_factory=dict)
    """Checksum of each file."""

    @property
    def state(self) -> RunState:
        return RunState(**{field.name: getattr(self, field.name) for field in fields(RunState)})


Stamp = tuple[str, int, int, int]
"""A file as it was at one time: its path, size in bytes, time of change in nanoseconds, and inode."""

_checksums: dict[Stamp, str] = {}


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints under ``folder``, oldest first, damaged ones too."""
    return sorted(folder.glob("step-*"))


def newest(folder: Path) -> Path | None:
    """The newest intact checkpoint under ``folder``; None without one."""
    return next(
        (checkpoint for checkpoint in reversed(checkpoints_in(folder)) if find_damage(checkpoint) is None), None
    )


def describe_skipped(checkpoint: Path) -> Iterator[str]:
    """A line for each damaged checkpoint that is newer than ``checkpoint``, the newest intact one, with the damage."""
    for later in checkpoints_in(checkpoint.parent):
        if later.name > checkpoint.name and (fault := find_damage(later)):
            yield f"{later} is damaged: {fault}; {checkpoint.name} is used instead."


def find_damage(checkpoint: Path, file_name: str | None = None) -> str | None:
    """How a checkpoint, or the one file ``file_name`` of it, is damaged; None when it is intact."""
    try:
        for file, expected in read_progress(checkpoint).files.items():
            if file_name and file != file_name:
                continue
            if Path(file).name != file:
                return f"{PROGRESS} names {file!r}, which is not in it"
            if not (checkpoint / file).is_file():
                return f"{file} is missing"
            if _checksum(checkpoint / file) != expected:
                return f"{file} does not match its checksum"
    except UserError as unreadable:
        return str(unreadable).rstrip(".")  # the callers' sentences continue
    return None


def _checksum(file: Path) -> str:
    """The checksum of ``file``, which is read once as long as it does not change: GPT-2's checkpoint has 1.5 GB."""
    file_status = file.stat()
    stamp = (str(file), file_status.st_size, file_status.st_mtime_ns, file_status.st_ino)
    if stamp not in _checksums:
        _checksums[stamp] = checksum(file)
    return _checksums[stamp]


def read_progress(checkpoint: Path) -> Progress:
    """The progress of the run that wrote ``checkpoint``. Raises ``UserError`` when it is not a checkpoint."""
    try:
        return from_json(Progress, json.loads((checkpoint / PROGRESS).read_text(encoding="utf-8")), PROGRESS)
    except (OSError, ValueError, UserError) as fault:
        raise UserError(f"{checkpoint} cannot be read as a checkpoint ({fault}).") from fault


_FIXED_SETTINGS = ("seed", "global_batch", "optimizer", "mask_books")
"""Settings that a continued run must share with its checkpoint."""


def check_same_run(path: Path | str, progress: Progress, config: TrainConfig, manifest: Manifest) -> None:
    """Raise ``UserError`` when ``config`` on this data is not the run that wrote the checkpoint at ``path``."""
    flag = "--stream" if config.dataset.stream else "--data"
    if progress.tokenizer_sha256 != manifest.tokenizer_sha256:
        raise UserError(
            f"{path} was trained with another tokenizer (sha256 {progress.tokenizer_sha256[:12]}) than that of "
            f"{flag} {config.dataset.source} ({manifest.tokenizer_sha256[:12]}): start a new run with --name."
        )
    old_config = config_from_json(progress.config, str(path))
    if progress.data_fingerprint != manifest.fingerprint:
        _check_unchanged(path, vars(old_config.dataset.reading), vars(config.dataset.reading))
        raise UserError(
            f"{path} was trained on other data (fingerprint {progress.data_fingerprint[:12]}) than "
            f"{flag} {config.dataset.source} ({manifest.fingerprint[:12]}): give the {flag} it was trained on, or "
            "start a new run with --name."
        )
    if old_config.model != config.model:
        raise UserError(
            f"{path} holds the model {_with_changes(old_config.model, config.model)}: leave --model out to continue it."
        )
    _check_unchanged(path, *({name: each.setting(name) for name in _FIXED_SETTINGS} for each in (old_config, config)))


def _check_unchanged(path: Path | str, old_settings: dict[str, Any], new_settings: dict[str, Any]) -> None:
    """Raise ``UserError`` for the first of the settings, by name, that has changed."""
    for name, old_value in old_settings.items():
        new_value = new_settings[name]
        if old_value != new_value:
            named = f"--{name.replace('_', '-')}"
            raise UserError(
                f"{path} was trained with {named} {old_value}, not {new_value}: leave {named} out to continue it."
            )


def check_not_finished(path: Path | str, progress: Progress, duration: DurationConfig, total_steps: int | None) -> None:
    """Raise ``UserError`` when ``config`` leaves nothing to do for the finished run of the checkpoint ``path``."""
    total = total_steps
    if total is None and duration.time_budget is None:
        raise UserError(f"{path} is at the end of its epoch: give --steps to continue training.")
    if total is not None and progress.step >= total:
        raise UserError(f"{path} is at step {progress.step:,} of {total:,}: give a larger --steps to continue.")
    if duration.time_budget is not None and progress.elapsed >= duration.time_budget:
        raise UserError(f"{path} has already trained for its --time-budget: give a longer one to continue.")


def _with_changes(old_model: AnyModel, new_model: AnyModel) -> str:
    if type(old_model) is not type(new_model):
        return f"{format_model(old_model)}, not {format_model(new_model)}"
    changed = [
        f.name for f in fields(old_model) if f.compare and getattr(old_model, f.name) != getattr(new_model, f.name)
    ]
    differences = ", ".join(f"{name}={getattr(old_model, name)}, not {getattr(new_model, name)}" for name in changed)
    return f"{format_model(old_model)} ({differences})"
