"""Upload the checkpoints of a run to object storage, from which every machine can resume it, and download them.

``progress.json`` is uploaded last and removed first, so that a checkpoint with this file is complete. Each uploaded
checkpoint also has the log of cycles, so that a machine without other files of the run can log complete curves in
MLflow.
"""

import shutil
from pathlib import Path

from infra.storage.directory import StorageDir
from infra.storage.files import TEMPORARY_PREFIX
from train.run_files.progress import PROGRESS, checkpoints_in, find_damage

CHECKPOINTS, CYCLES = "checkpoints", "cycles.jsonl"
"""Folder of the checkpoints and file of the log of cycles in a run's folder."""


def upload(checkpoint: Path, cycles: Path, run_dir: StorageDir, keep: int) -> None:
    """Upload ``checkpoint`` and the log of ``cycles`` to ``run_dir``, and keep the newest ``keep`` checkpoints there.

    Checkpoints of later steps are also removed. An intact one would have been resumed, so they are damaged.
    Raises ``UserError`` if storage keeps failing.
    """
    files = sorted(checkpoint.iterdir(), key=lambda file: file.name == PROGRESS)
    for file in [cycles, *files] if cycles.exists() else files:
        run_dir.upload(file, f"{CHECKPOINTS}/{checkpoint.name}/{file.name}")
    names = list_uploaded(run_dir)
    kept_names = [name for name in names if name <= checkpoint.name][-keep:]
    for name in names:
        if name not in kept_names:
            run_dir.remove([f"{CHECKPOINTS}/{name}/{PROGRESS}"])
            run_dir.remove(run_dir.list_files(f"{CHECKPOINTS}/{name}"))


def list_uploaded(run_dir: StorageDir) -> list[str]:
    """Return the names of the complete checkpoints in ``run_dir`` from oldest to newest."""
    return sorted(name.split("/")[1] for name in run_dir.list_files(CHECKPOINTS) if name.endswith(f"/{PROGRESS}"))


def download_newest(run_dir: StorageDir, checkpoints: Path) -> tuple[Path | None, list[str]]:
    """Download the newest intact checkpoint in ``run_dir`` to ``checkpoints``, a local folder that then has no other.

    A checkpoint that is already in ``checkpoints`` is not downloaded again. The log of cycles is moved next to that
    folder. Raises ``UserError`` if storage keeps failing.

    Returns: (checkpoint or None, one message per newer checkpoint that is damaged).
    """
    messages: list[str] = []
    newest = None
    for name in reversed(list_uploaded(run_dir)):
        checkpoint = checkpoints / name
        download_checkpoint(run_dir / CHECKPOINTS / name, checkpoint)
        fault = find_damage(checkpoint)
        if fault is None:
            newest = checkpoint
            break
        messages.append(f"{run_dir / CHECKPOINTS / name} is damaged: {fault}. Using the previous one.")
    for local_copy in checkpoints_in(checkpoints):
        if local_copy != newest:
            shutil.rmtree(local_copy)
    cycles = checkpoints.parent / CYCLES
    cycles.unlink(missing_ok=True)
    if newest and (newest / CYCLES).exists():
        (newest / CYCLES).replace(cycles)
    return newest, messages


def download_checkpoint(uploaded: StorageDir, checkpoint: Path) -> None:
    """Download an ``uploaded`` checkpoint; only its log of cycles if ``checkpoint`` is an intact copy already."""
    progress = checkpoint / PROGRESS
    is_intact = (
        progress.exists() and progress.read_bytes() == uploaded.read(PROGRESS) and find_damage(checkpoint) is None
    )
    target = checkpoint if is_intact else checkpoint.with_name(f"{TEMPORARY_PREFIX}{checkpoint.name}")
    target.mkdir(parents=True, exist_ok=True)
    for name in uploaded.list_files():
        if not is_intact or name == CYCLES:
            uploaded.download(name, target / name)
    if not is_intact:
        shutil.rmtree(checkpoint, ignore_errors=True)
        target.rename(checkpoint)


def download_progress(run_dir: StorageDir, checkpoints: Path) -> Path | None:
    """Download only the progress of the newest checkpoint in ``run_dir``, and the log of cycles.

    Returns the folder of the checkpoint in ``checkpoints``; None if the run has no checkpoint.
    """
    names = list_uploaded(run_dir)
    if not names:
        return None
    checkpoint, uploaded = checkpoints / names[-1], run_dir / CHECKPOINTS / names[-1]
    uploaded.download(PROGRESS, checkpoint / PROGRESS)
    if uploaded.exists(CYCLES):
        uploaded.download(CYCLES, checkpoints.parent / CYCLES)
    return checkpoint
