"""The checkpoints of a run in object storage, from which every machine can continue it.

``progress.json`` is written last and removed first, so that a copy that has one is complete. Each copy includes the
cycles that the run has reported, so that its curves in MLflow are complete on a machine that has nothing else of the
run.
"""

import shutil
from pathlib import Path

from infra.errors import UserError
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


def download_newest(run_dir: StorageDir, checkpoints: Path, only: str | None = None) -> tuple[Path | None, list[str]]:
    """The newest intact checkpoint of the run at ``run_dir``, alone below the folder ``checkpoints`` of this machine.

    With ``only`` a name, the checkpoint of that name. None without one. What is here already is not fetched again. The
    second value has a line for each copy that is damaged. The cycles of the run are beside the folder. Raises
    ``UserError`` when storage keeps failing.
    """
    lines: list[str] = []
    for copy in reversed(list_uploaded(run_dir)):
        if only and copy != only:
            continue
        checkpoint = download_checkpoint(run_dir, copy, checkpoints)
        if fault := find_damage(checkpoint):
            lines.append(f"{run_dir / CHECKPOINTS / copy} is damaged: {fault}; the one before it is used instead.")
            continue
        break
    else:
        checkpoint = None
    for other in checkpoints_in(checkpoints):
        if other != checkpoint:
            shutil.rmtree(other)
    cycles = checkpoints.parent / CYCLES
    cycles.unlink(missing_ok=True)
    if checkpoint and (checkpoint / CYCLES).exists():
        (checkpoint / CYCLES).replace(cycles)
    return checkpoint, lines


def download_checkpoint(run_dir: StorageDir, copy: str, checkpoints: Path) -> Path:
    """The checkpoint ``copy`` of ``run_dir``, below ``checkpoints``; only its cycles where the rest is here, intact."""
    here, there = checkpoints / copy, run_dir / CHECKPOINTS / copy
    progress = there.read(PROGRESS)
    known = here / PROGRESS
    intact = known.exists() and known.read_bytes() == progress and find_damage(here) is None
    target = here if intact else checkpoints / f"{TEMPORARY}{here.name}"
    target.mkdir(parents=True, exist_ok=True)
    for name in there.list_files():
        if not intact or name == CYCLES:
            there.download(name, target / name)
    if not intact:
        shutil.rmtree(here, ignore_errors=True)
        target.rename(here)
    return here


def download_progress(run_dir: StorageDir, copy: str, checkpoints: Path) -> Path:
    """What a driver needs of the checkpoint ``copy``: how far it got, below ``checkpoints``, and the cycles."""
    here, there = checkpoints / copy, run_dir / CHECKPOINTS / copy
    there.download(PROGRESS, here / PROGRESS)
    if there.exists(CYCLES):
        there.download(CYCLES, checkpoints.parent / CYCLES)
    return here


def newest_uploaded(run_dir: StorageDir, flag: str) -> str:
    """The newest of the :func:`list_uploaded` of ``run_dir``, which ``flag`` names. Raises ``UserError`` when there is
    none."""
    checkpoint_names = list_uploaded(run_dir)
    if not checkpoint_names:
        raise UserError(f"{flag} {run_dir}: there is no run with a checkpoint; give the address of a run's folder.")
    return checkpoint_names[-1]
