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
from train.run_files.progress import PROGRESS, checkpoints_in, damage

CHECKPOINTS, CYCLES = "checkpoints", "cycles.jsonl"


def upload(checkpoint: Path, cycles: Path, place: StorageDir, keep: int) -> None:
    """Copy ``checkpoint`` of the run at ``place``, and its cycles, there; keep the newest ``keep`` copies.

    Copies of later steps go too: they are damaged, or the run would have continued from there. Raises ``UserError``
    when storage keeps failing.
    """
    files = sorted(checkpoint.iterdir(), key=lambda file: file.name == PROGRESS)
    for file in [cycles, *files] if cycles.exists() else files:
        place.put(file, f"{CHECKPOINTS}/{checkpoint.name}/{file.name}")
    earlier = [copy for copy in copies(place) if copy <= checkpoint.name]
    for copy in copies(place):
        if copy not in earlier[-keep:]:
            place.remove([f"{CHECKPOINTS}/{copy}/{PROGRESS}"])
            place.remove(place.files(f"{CHECKPOINTS}/{copy}"))


def copies(place: StorageDir) -> list[str]:
    """The names of the complete checkpoints of the run at ``place``, oldest first."""
    return sorted(name.split("/")[1] for name in place.files(CHECKPOINTS) if name.endswith(f"/{PROGRESS}"))


def fetch_newest(place: StorageDir, checkpoints: Path, only: str | None = None) -> tuple[Path | None, list[str]]:
    """The newest intact checkpoint of the run at ``place``, alone below the folder ``checkpoints`` of this machine.

    With ``only`` a name, the checkpoint of that name. None without one. What is here already is not fetched again. The
    second value has a line for each copy that is damaged. The cycles of the run are beside the folder. Raises
    ``UserError`` when storage keeps failing.
    """
    lines: list[str] = []
    for copy in reversed(copies(place)):
        if only and copy != only:
            continue
        found = fetch(place, copy, checkpoints)
        if fault := damage(found):
            lines.append(f"{place / CHECKPOINTS / copy} is damaged: {fault}; the one before it is used instead.")
            continue
        break
    else:
        found = None
    for other in checkpoints_in(checkpoints):
        if other != found:
            shutil.rmtree(other)
    cycles = checkpoints.parent / CYCLES
    cycles.unlink(missing_ok=True)
    if found and (found / CYCLES).exists():
        (found / CYCLES).replace(cycles)
    return found, lines


def fetch(place: StorageDir, copy: str, checkpoints: Path) -> Path:
    """The checkpoint ``copy`` of ``place``, below ``checkpoints``; only its cycles where the rest is here, intact."""
    here, there = checkpoints / copy, place / CHECKPOINTS / copy
    progress = there.read(PROGRESS)
    known = here / PROGRESS
    intact = known.exists() and known.read_bytes() == progress and damage(here) is None
    target = here if intact else checkpoints / f"{TEMPORARY}{here.name}"
    target.mkdir(parents=True, exist_ok=True)
    for name in there.files():
        if not intact or name == CYCLES:
            there.fetch(name, target / name)
    if not intact:
        shutil.rmtree(here, ignore_errors=True)
        target.rename(here)
    return here


def fetch_progress(place: StorageDir, copy: str, checkpoints: Path) -> Path:
    """What a driver needs of the checkpoint ``copy``: how far it got, below ``checkpoints``, and the cycles."""
    here, there = checkpoints / copy, place / CHECKPOINTS / copy
    there.fetch(PROGRESS, here / PROGRESS)
    if there.exists(CYCLES):
        there.fetch(CYCLES, checkpoints.parent / CYCLES)
    return here


def newest_copy(place: StorageDir, flag: str) -> str:
    """The newest of the :func:`copies` of ``place``, which ``flag`` names. Raises ``UserError`` when there is none."""
    found = copies(place)
    if not found:
        raise UserError(f"{flag} {place}: there is no run with a checkpoint; give the address of a run's folder.")
    return found[-1]
