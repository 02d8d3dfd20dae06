"""Whether a checkpoint may be continued by a config: the same mathematics on the same data, however executed.

In: a checkpoint's progress, the config, the data's manifest. Out: nothing, or ``UserError`` naming the difference.
"""

from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path

from infra.command import UserError
from pipeline.config import Reading
from pipeline.shards import Manifest
from train.config import ModelConfig, TrainConfig, config_from_json, format_model
from train.progress import Progress

_SAME = ("seed", "global_batch", "optimizer", "mask_books")
"""Settings that give the numbers in a checkpoint their meaning."""


def refuse_other_run(path: Path, progress: Progress, config: TrainConfig, manifest: Manifest) -> None:
    """Raise ``UserError`` when ``config`` on this data is not the run that wrote the checkpoint at ``path``."""
    flag = "--stream" if config.stream else "--data"
    if progress.vocabulary_sha256 != manifest.vocabulary_sha256:
        raise UserError(
            f"{path} was trained on another vocabulary (sha256 {progress.vocabulary_sha256[:12]}) than that of "
            f"{flag} {config.source} ({manifest.vocabulary_sha256[:12]}): start a new run with --name."
        )
    before = config_from_json(progress.config, str(path))
    if progress.data_fingerprint != manifest.fingerprint:
        _refuse_changes(path, before.reading, config.reading, [field.name for field in fields(Reading)])
        raise UserError(
            f"{path} was trained on other data (fingerprint {progress.data_fingerprint[:12]}) than "
            f"{flag} {config.source} ({manifest.fingerprint[:12]}): give the {flag} it was trained on, or start a new "
            "run with --name."
        )
    if before.model != config.model:
        raise UserError(
            f"{path} holds the model {_with_changes(before.model, config.model)}: leave --model out to continue it."
        )
    _refuse_changes(path, before, config, _SAME)


def _refuse_changes(path: Path, before: object, now: object, names: Iterable[str]) -> None:
    """Raise ``UserError`` for the first of the settings ``names`` that is another ``now``."""
    for name in names:
        ours, theirs = getattr(before, name), getattr(now, name)
        if ours != theirs:
            named = f"--{name.replace('_', '-')}"
            raise UserError(f"{path} was trained with {named} {ours} and not {theirs}: leave {named} out to go on.")


def refuse_finished(path: Path, progress: Progress, config: TrainConfig) -> None:
    """Raise ``UserError`` when the finished run behind ``path`` has nothing left to do by ``config``."""
    total = config.total_steps
    if total is None and config.time_budget is None:
        raise UserError(f"{path} is at the end of its epoch: say with --steps how far to train on.")
    if total is not None and progress.step >= total:
        raise UserError(f"{path} is at step {progress.step:,} of {total:,}: give a larger --steps to train on.")
    if config.time_budget is not None and progress.elapsed >= config.time_budget:
        raise UserError(f"{path} has trained for its --time-budget already: give a longer one to train on.")


def _with_changes(ours: ModelConfig, theirs: ModelConfig) -> str:
    changed = [name for name in vars(ours) if getattr(ours, name) != getattr(theirs, name)]
    differences = ", ".join(f"{name}={getattr(ours, name)} and not {getattr(theirs, name)}" for name in changed)
    return f"{format_model(ours)} ({differences})"
