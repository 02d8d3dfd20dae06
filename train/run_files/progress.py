"""The progress of a run: its checkpoints, which of them are intact, and the state that each one stores.

A folder is a checkpoint if its ``progress.json``, which is written last, has the checksums of its other files. This
module does not import torch, so that commands find what they resume before anything slow is loaded.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from infra.errors import UserError
from infra.schema import from_json, strict
from pipeline.shards import Manifest, checksum
from train.config import DatasetConfig, DurationConfig, StepConfig, config_from_json
from train.model_config import ModelSpec

PROGRESS = "progress.json"
"""File of a checkpoint with its progress."""


@dataclass(frozen=True)
class RunState:
    """Counters of a run's loop, which its checkpoints and its result contain."""

    step: int = 0
    """Number of completed optimizer steps."""
    windows_consumed: int = 0
    """Number of windows consumed by all workers."""
    last_reported_step: int = 0
    """The last step in a cycle's report; the checkpoint contains the losses of later steps."""
    reference_loss: float | None = None
    """Mean loss of the last reported cycle, the reference for spike detection."""
    val_tokens: int = 0
    """Number of validation tokens processed."""
    train_seconds: float = 0.0
    """Seconds of training since the end of the first step."""
    val_windows: int = 0
    """Number of windows of each validation; 0 before the first one."""


@strict
@dataclass(frozen=True, kw_only=True)
class Progress(RunState):
    """The part of a checkpoint that is not a tensor."""

    data_fingerprint: str
    """Fingerprint of the data."""
    tokenizer_sha256: str
    """Hash of the data's tokenizer."""
    config: dict[str, Any]
    """Resolved settings of the run."""
    data_state: dict[str, Any] | None = None
    """State of the data loader for a stream of books; None for shards."""
    files: dict[str, str] = field(default_factory=dict)
    """Checksum of each other file by its name."""

    @property
    def state(self) -> RunState:
        """The counters of the loop."""
        return RunState(**{field.name: getattr(self, field.name) for field in fields(RunState)})


Stamp = tuple[str, int, int, int]
"""The identity of a file's content: path, size in bytes, time of modification in nanoseconds, and inode."""

_checksums: dict[Stamp, str] = {}


def checkpoints_in(folder: Path) -> list[Path]:
    """Return all checkpoints in ``folder`` from oldest to newest, including damaged ones."""
    return sorted(folder.glob("step-*"))


def newest(folder: Path) -> Path | None:
    """Return the newest intact checkpoint in ``folder``; None if there is none."""
    return next(
        (checkpoint for checkpoint in reversed(checkpoints_in(folder)) if find_damage(checkpoint) is None), None
    )


def describe_skipped(checkpoint: Path) -> Iterator[str]:
    """Yield a message for each damaged checkpoint that is newer than ``checkpoint``, the newest intact one."""
    for candidate in checkpoints_in(checkpoint.parent):
        if candidate.name > checkpoint.name and (fault := find_damage(candidate)):
            yield f"{candidate} is damaged: {fault}. Using {checkpoint.name}."


def find_damage(checkpoint: Path, file_name: str | None = None) -> str | None:
    """Describe the damage of a checkpoint, or only of its file ``file_name``; None if it is intact."""
    try:
        for file, expected in read_progress(checkpoint).files.items():
            if file_name and file != file_name:
                continue
            if Path(file).name != file:
                return f"{PROGRESS} refers to {file!r}, which is outside the checkpoint"
            if not (checkpoint / file).is_file():
                return f"{file} is missing"
            if _checksum(checkpoint / file) != expected:
                return f"{file} does not match its checksum"
    except UserError as unreadable:
        return str(unreadable).rstrip(".")  # It becomes a part of the callers' sentences.
    return None


def _checksum(file: Path) -> str:
    """Compute the checksum of ``file``, or reuse it if the file is unchanged, because a checkpoint has gigabytes."""
    file_status = file.stat()
    stamp = (str(file), file_status.st_size, file_status.st_mtime_ns, file_status.st_ino)
    if stamp not in _checksums:
        _checksums[stamp] = checksum(file)
    return _checksums[stamp]


def read_progress(checkpoint: Path) -> Progress:
    """Read the progress of the run that wrote ``checkpoint``. Raises ``UserError`` if it is not a checkpoint."""
    try:
        return from_json(Progress, json.loads((checkpoint / PROGRESS).read_text(encoding="utf-8")), PROGRESS)
    except (OSError, ValueError, UserError) as fault:
        reason = str(fault).rstrip(".")
        raise UserError(f"Cannot read {checkpoint} as a checkpoint: {reason}.") from fault


_FIXED_SETTINGS = ("global_batch", "optimizer", "mask_books")
"""Settings of a step that cannot be changed when a run is resumed."""


def check_same_run(
    path: Path | str, progress: Progress, step: StepConfig, dataset: DatasetConfig, manifest: Manifest
) -> None:
    """Raise ``UserError`` unless a run of ``step`` with this data can resume the checkpoint at ``path``."""
    flag = dataset.flag
    if progress.tokenizer_sha256 != manifest.tokenizer_sha256:
        raise UserError(
            f"{path} was trained with a different tokenizer (sha256 {progress.tokenizer_sha256[:12]}) than "
            f"{flag} {dataset.source} ({manifest.tokenizer_sha256[:12]}). Start a new run with --name."
        )
    old_config = config_from_json(progress.config, str(path))
    if progress.data_fingerprint != manifest.fingerprint:
        _check_unchanged(path, vars(old_config.dataset.reading), vars(dataset.reading))
        raise UserError(
            f"{path} was trained on different data (fingerprint {progress.data_fingerprint[:12]}) than "
            f"{flag} {dataset.source} ({manifest.fingerprint[:12]}). Use the {flag} it was trained on, or "
            "start a new run with --name."
        )
    if old_config.model != step.model:
        raise UserError(
            f"{path} has the model {_with_changes(old_config.model, step.model)}. Remove --model to resume it."
        )
    _check_unchanged(path, {"seed": old_config.dataset.seed}, {"seed": dataset.seed})
    old_settings, new_settings = (
        {name: settings.setting(name) for name in _FIXED_SETTINGS} for settings in (old_config, step)
    )
    _check_unchanged(path, old_settings, new_settings)


def _check_unchanged(path: Path | str, old_settings: dict[str, Any], new_settings: dict[str, Any]) -> None:
    """Raise ``UserError`` for the first setting whose value has changed."""
    for name, old_value in old_settings.items():
        new_value = new_settings[name]
        if old_value != new_value:
            flag = f"--{name.replace('_', '-')}"
            raise UserError(f"{path} was trained with {flag} {old_value}, not {new_value}. Remove {flag} to resume it.")


def check_not_finished(path: Path | str, progress: Progress, duration: DurationConfig, total_steps: int | None) -> None:
    """Raise ``UserError`` if the run of the checkpoint ``path`` has reached its length."""
    if total_steps is None and duration.time_budget is None:
        raise UserError(f"{path} is at the end of its epoch. Set --steps to resume training.")
    if total_steps is not None and progress.step >= total_steps:
        raise UserError(f"{path} is at step {progress.step:,} of {total_steps:,}. Set a larger --steps to resume it.")
    if duration.time_budget is not None and duration.time_budget <= max(
        progress.train_seconds, progress.config.get("time_budget") or 0.0
    ):
        raise UserError(f"{path} has trained for its --time-budget. Set a longer --time-budget to resume it.")


def _with_changes(old_model: ModelSpec, new_model: ModelSpec) -> str:
    if type(old_model) is not type(new_model):
        return f"{old_model.text}, not {new_model.text}"
    names = [
        f.name for f in fields(old_model) if f.compare and getattr(old_model, f.name) != getattr(new_model, f.name)
    ]
    differences = ", ".join(f"{name}={getattr(old_model, name)}, not {getattr(new_model, name)}" for name in names)
    return f"{old_model.text} ({differences})"
