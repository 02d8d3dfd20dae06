"""The checkpoints of a run in object storage, from which every machine can continue it.

``progress.json`` is written last and removed first, so that a copy that has one is complete. Each copy includes the
cycles that the run has reported, so that its curves in MLflow are complete on a machine that has nothing else of the
run.
"""

import shutil
from pathlib import Path

from infra.storage.directory import StorageDir
from infra.storage.files import TEMPORARY
from train.run_files.progress import PROGRESS, checkpoints_in, find_damage

CHECKPOINTS, CYCLES = "checkpoints", "cycles.jsonl"


def upload(checkpoint: Path, cycles: Path, run_dir: StorageDir, keep: int) -> None:
    """Copy ``checkpoint`` of the run at ``run_dir``, and its cycles, there; keep the newest ``keep`` copies.

    Copies of later steps go too: they are damaged, or the run would have continued from there. Raises ``UserError``
    when storage keeps failing.
    """
    files = sorted(checkpoint.iterdir(), key=lambda file: file.name == PROGRESS)
    for file in [cycles, *files] if cycles.exists() else files:
        run_dir.upload(file, f"{CHECKPOINTS}/{checkpoint.name}/{file.name}")
    earlier = [copy for copy in list_uploaded(run_dir) if copy <= checkpoint.name]
    for copy in list_uploaded(run_dir):
        if copy not in earlier[-keep:]:
            run_dir.remove([f"{CHECKPOINTS}/{copy}/{PROGRESS}"])
            run_dir.remove(run_dir.list_files(f"{CHECKPOINTS}/{copy}"))


def list_uploaded(run_dir: StorageDir) -> list[str]:
    """The names of the complete checkpoints of the run at ``run_dir``, oldest first."""
    return sorted(name.split("/")[1] for name in run_dir.list_files(CHECKPOINTS) if name.endswith(f"/{PROGRESS}"))


def download_newest(run_dir: StorageDir, checkpoints: Path) -> tuple[Path | None, list[str]]:
    """The newest intact checkpoint of the run at ``run_dir``, alone in the folder ``checkpoints`` of this machine.

    What is on this machine already is not downloaded again. The cycles of the run are put beside the folder. Raises
    ``UserError`` if storage keeps failing.

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
        messages.append(f"{run_dir / CHECKPOINTS / name} is damaged: {fault}; the one before it is used instead.")
    for other in checkpoints_in(checkpoints):
        if other != newest:
            shutil.rmtree(other)
    cycles = checkpoints.parent / CYCLES
    cycles.unlink(missing_ok=True)
    if newest and (newest / CYCLES).exists():
        (newest / CYCLES).replace(cycles)
    return newest, messages


def download_checkpoint(uploaded: StorageDir, checkpoint: Path) -> None:
    """Make ``checkpoint`` a copy of the ``uploaded`` one. If it is one already, only its cycles are downloaded."""
    progress = checkpoint / PROGRESS
    is_intact = (
        progress.exists() and progress.read_bytes() == uploaded.read(PROGRESS) and find_damage(checkpoint) is None
    )
    target = checkpoint if is_intact else checkpoint.with_name(f"{TEMPORARY}{checkpoint.name}")
    target.mkdir(parents=True, exist_ok=True)
    for name in uploaded.list_files():
        if not is_intact or name == CYCLES:
            uploaded.download(name, target / name)
    if not is_intact:
        shutil.rmtree(checkpoint, ignore_errors=True)
        target.rename(checkpoint)


def download_progress(run_dir: StorageDir, checkpoints: Path) -> Path | None:
    """The newest checkpoint of ``run_dir``, in ``checkpoints``, with its progress alone; its cycles beside the folder.

    None if the run has no checkpoint.
    """
    names = list_uploaded(run_dir)
    if not names:
        return None
    checkpoint, uploaded = checkpoints / names[-1], run_dir / CHECKPOINTS / names[-1]
    uploaded.download(PROGRESS, checkpoint / PROGRESS)
    if uploaded.exists(CYCLES):
        uploaded.download(CYCLES, checkpoints.parent / CYCLES)
    return checkpoint
