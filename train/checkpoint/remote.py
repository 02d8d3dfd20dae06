"""Copies of a run's checkpoints in object storage, from which another machine goes on when this one is gone.

In: a checkpoint on disk and a URI (``s3://``, ``gs://``). Out: ``URI/NAME/step-00000123/``, of which
``progress.json`` is written last and removed first, so that what has one is whole; and back again. With each goes
what the run has reported, without which its curves in MLflow would begin there on a machine that knows nothing of it.
"""

import shutil
from pathlib import Path

import pyarrow.fs as fs

from infra.errors import UserError
from infra.storage import TEMPORARY, locate, store, with_retries, write_json
from train.checkpoint.progress import PROGRESS, newest, read_progress
from train.checkpoint.run_folder import RunFolder


def upload(checkpoint: Path, run: str, uri: str, keep: int) -> None:
    """Copy ``checkpoint`` of the run ``run``, and its cycles, to ``uri`` and remove all but its newest ``keep`` there.

    Raises ``OSError`` when the storage does not take it.
    """
    system, root = locate(uri)
    target = f"{root}/{run}/{checkpoint.name}"
    cycles = RunFolder(checkpoint.parents[1]).cycles
    files = sorted(checkpoint.iterdir(), key=lambda file: file.name == PROGRESS)
    for file in [cycles, *files] if cycles.exists() else files:
        store(file, system, f"{target}/{file.name}")
    for old in _steps(system, f"{root}/{run}")[:-keep]:
        system.delete_file(f"{old}/{PROGRESS}")
        system.delete_dir(old)


def download(uri: str, out: Path) -> Path:
    """The folder of the run at ``uri``, below ``out``: as it is there already, else made of its newest checkpoint.

    Raises ``UserError`` when there is nothing whole at ``uri``, or its storage fails.
    """
    system, root = locate(uri)
    folder = out / Path(root).name
    if (folder / "config.json").exists():
        return folder
    steps = with_retries(uri, lambda: _steps(system, root))
    if not steps:
        raise UserError(f"--resume {uri}: there is no checkpoint; name the run's folder below --copy-to.")
    name = Path(steps[-1]).name
    temporary = folder / "checkpoints" / f"{TEMPORARY}{name}"
    temporary.mkdir(parents=True, exist_ok=True)
    here = fs.LocalFileSystem()
    with_retries(
        uri,
        lambda: fs.copy_files(steps[-1], str(temporary), source_filesystem=system, destination_filesystem=here),
    )
    shutil.rmtree(folder / "checkpoints" / name, ignore_errors=True)  # of a download that was cut short
    temporary.rename(folder / "checkpoints" / name)
    if newest(folder / "checkpoints") is None:
        raise UserError(f"--resume {uri}: {name} is damaged there; remove it to go on from the one before it.")
    progress = read_progress(folder / "checkpoints" / name)
    run = RunFolder(folder)
    copied = folder / "checkpoints" / name / run.cycles.name
    if copied.exists():
        copied.replace(run.cycles)
        run.rewind(progress.reported)  # training went on while it was copied
    write_json(run.config, progress.config)
    return folder


def _steps(system: fs.FileSystem, folder: str) -> list[str]:
    """Whole checkpoints in ``folder``, oldest first."""
    found = system.get_file_info(fs.FileSelector(folder, recursive=True, allow_not_found=True))
    return sorted(str(Path(info.path).parent) for info in found if info.base_name == PROGRESS)
