"""Copies of a run's checkpoints in object storage, from which another machine can continue the run.

In: a checkpoint on disk and a URI (``s3://``, ``gs://``). Out: ``URI/NAME/step-00000123/``, in which ``progress.json``
is written last and removed first, so that a copy that has one is complete; and the way back. Each copy includes the
cycles that the run has reported, so that its curves in MLflow are complete on a machine that does not have the run.
"""

import shutil
from pathlib import Path

import pyarrow.fs as fs

from infra.errors import UserError
from infra.storage import TEMPORARY, locate, store, with_retries, write_json
from train.checkpoint.progress import PROGRESS, newest, read_progress
from train.checkpoint.run_folder import RunFolder


def upload(checkpoint: Path, run: str, uri: str, keep: int) -> None:
    """Copy ``checkpoint`` of the run named ``run``, and its cycles, to ``uri``; keep the newest ``keep`` copies there.

    Raises ``OSError`` when that fails.
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
    """The folder below ``out`` of the run at ``uri``: the one that exists, else made from the newest copy.

    Raises ``UserError`` when ``uri`` has no intact checkpoint or cannot be read.
    """
    system, root = locate(uri)
    folder = out / Path(root).name
    if (folder / "config.json").exists():
        return folder
    steps = with_retries(uri, lambda: _steps(system, root))
    if not steps:
        raise UserError(f"--resume {uri}: there is no checkpoint; give the run's folder below --copy-to.")
    name = Path(steps[-1]).name
    temporary = folder / "checkpoints" / f"{TEMPORARY}{name}"
    temporary.mkdir(parents=True, exist_ok=True)
    here = fs.LocalFileSystem()
    with_retries(
        uri,
        lambda: fs.copy_files(steps[-1], str(temporary), source_filesystem=system, destination_filesystem=here),
    )
    shutil.rmtree(folder / "checkpoints" / name, ignore_errors=True)  # of a download that was interrupted
    temporary.rename(folder / "checkpoints" / name)
    if newest(folder / "checkpoints") is None:
        raise UserError(f"--resume {uri}: {name} is damaged there; remove it to continue from the one before it.")
    progress = read_progress(folder / "checkpoints" / name)
    run = RunFolder(folder)
    copied = folder / "checkpoints" / name / run.cycles.name
    if copied.exists():
        copied.replace(run.cycles)
        run.rewind(progress.reported)  # training continued while it was copied
    write_json(run.config, progress.config)
    return folder


def _steps(system: fs.FileSystem, folder: str) -> list[str]:
    """Complete checkpoints in ``folder``, oldest first."""
    found = system.get_file_info(fs.FileSelector(folder, recursive=True, allow_not_found=True))
    return sorted(str(Path(info.path).parent) for info in found if info.base_name == PROGRESS)
