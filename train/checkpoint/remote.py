"""The checkpoints of a run in object storage, from which every machine can continue it.

In: a checkpoint in a worker's scratch and the run's place. Out: ``PLACE/checkpoints/step-00000123/``, in which
``progress.json`` is written last and removed first, so that a copy that has one is complete; and the way back. Each
copy includes the cycles that the run has reported, so that its curves in MLflow are complete on a machine that has
nothing else of the run.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

from infra.errors import UserError
from infra.place import Place
from infra.storage import TEMPORARY
from train.checkpoint.progress import PROGRESS, checkpoints_in, damage

CYCLES = "cycles.jsonl"


def upload(checkpoint: Path, cycles: Path, place: Place, keep: int) -> None:
    """Copy ``checkpoint`` of the run at ``place``, and its cycles, there; keep the newest ``keep`` copies.

    Copies of later steps go too: they are damaged, or the run would have continued from there. Raises ``UserError``
    when storage keeps failing.
    """
    target = f"checkpoints/{checkpoint.name}"
    files = sorted(checkpoint.iterdir(), key=lambda file: file.name == PROGRESS)
    for file in [cycles, *files] if cycles.exists() else files:
        place.put(file, f"{target}/{file.name}")
    earlier = [copy for copy in copies(place) if step_name(copy) <= checkpoint.name]
    for copy in copies(place):
        if copy not in earlier[-keep:]:
            place.remove([f"{copy}/{PROGRESS}"])
            place.remove(place.files(copy))


def copies(place: Place) -> list[str]:
    """The complete checkpoints of the run at ``place``, oldest first, as names of folders in it.

    Earlier versions kept them in the run's folder itself.
    """
    found = (name.rpartition("/")[0] for name in place.files() if name.endswith(f"/{PROGRESS}"))
    return sorted(found, key=step_name)


def step_name(copy: str) -> str:
    """``step-00000123`` of a name from :func:`copies`."""
    return copy.rpartition("/")[2]


def fetch_newest(place: Place, checkpoints: Path, only: str | None = None) -> tuple[Path | None, list[str]]:
    """The newest intact checkpoint of the run at ``place``, alone below the folder ``checkpoints`` of this machine.

    With ``only`` a name, the checkpoint of that name. None without one. What is here already is not fetched again. The
    second value has a line for each copy that is damaged. The cycles of the run are beside the folder. Raises
    ``UserError`` when storage keeps failing.
    """
    lines: list[str] = []
    for copy in reversed(copies(place)):
        if only and step_name(copy) != only:
            continue
        found = fetch(place, copy, checkpoints)
        if fault := damage(found):
            lines.append(f"{place / copy} is damaged: {fault}; the one before it is used instead.")
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


def fetch(place: Place, copy: str, checkpoints: Path) -> Path:
    """The checkpoint ``copy`` of ``place``, below ``checkpoints``; only its cycles where the rest is here, intact."""
    here = checkpoints / step_name(copy)
    progress = place.read(f"{copy}/{PROGRESS}")
    known = here / PROGRESS
    intact = known.exists() and known.read_bytes() == progress and damage(here) is None
    target = here if intact else checkpoints / f"{TEMPORARY}{here.name}"
    target.mkdir(parents=True, exist_ok=True)
    for name in _names(place, copy):
        if not intact or name == CYCLES:
            place.fetch(f"{copy}/{name}", target / name)
    if not intact:
        shutil.rmtree(here, ignore_errors=True)
        target.rename(here)
    return here


def fetch_progress(place: Place, copy: str, checkpoints: Path) -> Path:
    """What a driver needs of the checkpoint ``copy``: how far it got, below ``checkpoints``, and the cycles."""
    here = checkpoints / step_name(copy)
    place.fetch(f"{copy}/{PROGRESS}", here / PROGRESS)
    if CYCLES in _names(place, copy):
        place.fetch(f"{copy}/{CYCLES}", checkpoints.parent / CYCLES)
    return here


def _names(place: Place, copy: str) -> Iterator[str]:
    return (name.rpartition("/")[2] for name in place.files(copy))


def newest_copy(place: Place, flag: str) -> str:
    """The newest of the :func:`copies` of ``place``, which ``flag`` names. Raises ``UserError`` when there is none."""
    found = copies(place)
    if not found:
        raise UserError(f"{flag} {place}: there is no run with a checkpoint; give the address of a run's folder.")
    return found[-1]
