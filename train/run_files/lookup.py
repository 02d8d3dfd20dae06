"""Find the run or the checkpoint that a flag names, on disk or in object storage; and how to name it."""

import shlex
from pathlib import Path

from infra.errors import UserError
from infra.storage.directory import StorageDir, scratch
from infra.storage.object_storage import is_remote
from train.config import TrainConfig, load_config
from train.run_files.progress import checkpoints_in, newest, read_progress
from train.run_files.run_folder import KEY, RunFolder, working_copy
from train.run_files.uploads import CHECKPOINTS, download_newest, download_progress, newest_uploaded


def find_run(text: str, out: Path | str, flag: str = "--resume") -> RunFolder:
    """The run that ``flag`` names: by its name under ``out``, its folder, or the folder of its newest checkpoint.

    Of a run in object storage its small files are copied to this machine. Raises ``UserError`` when there is nothing to
    continue.
    """
    if run_dir := _remote_run(text, out):
        copy = _newest(run_dir, text, flag)
        run = working_copy(run_dir, fresh=False)
        progress = read_progress(download_progress(run_dir, copy, run.checkpoints))
        run.truncate_after(progress.reported)  # training continued while it was copied
        return run
    out = Path(out)
    for path in (out / text, Path(text)):
        if (path / "progress.json").is_file():
            run = RunFolder(path.resolve().parent.parent)
            there = checkpoints_in(run.checkpoints)
            if path.resolve() not in there:
                raise UserError(
                    f"{flag} {text} was copied or moved out of its run, whose other files tell how to continue: put it "
                    f"back into runs/NAME/{CHECKPOINTS}, under its name."
                )
            if path.resolve() != there[-1]:
                raise _not_newest(flag, text, there[-1].name)
        elif (path / "config.json").is_file():
            run = RunFolder(path.resolve())
        else:
            continue
        if newest(run.checkpoints) is None:
            raise UserError(f"{flag} {text}: {run.path} has no intact checkpoint; start a new run with --name.")
        return run
    raise UserError(f"{flag} {text}: there is no run {out / text} or {text}; 'ls {out}' lists runs.")


def load_run_config(text: str, out: Path | str) -> TrainConfig:
    run_dir = _remote_run(text, out)
    if run_dir is None:
        return load_config(find_run(text, out).config)
    _newest(run_dir, text, "--resume")
    return load_config((run_dir / "config.json").address, "--resume")


def find_checkpoint(text: str, out: Path | str) -> Path:
    """The checkpoint that ``--checkpoint`` names, or the newest of the run that it names.

    One in object storage is copied to this machine, unless it is here already.
    """
    if run_dir := _remote_run(text, out):
        newest_uploaded(run_dir, "--checkpoint")
        folder = scratch("fetched", run_dir.digest)
        named = StorageDir.of(text).name if is_remote(text) else run_dir.name
        wanted = None if named == run_dir.name else named
        checkpoint, damaged = download_newest(run_dir, folder / "checkpoints", only=wanted)
        if checkpoint is None:
            raise UserError(f"--checkpoint {text}: " + (damaged[-1] if damaged else "there is no such checkpoint."))
        for name in (KEY, "result.json"):
            if run_dir.exists(name):
                run_dir.download(name, folder / name)
        return checkpoint
    if (Path(text) / "progress.json").is_file():
        return Path(text)
    return find_run(text, out, flag="--checkpoint").newest()


def format_run_argument(run_dir: StorageDir) -> str:
    """The run at ``run_dir`` as :func:`find_run` finds it in the folder in which this command was called."""
    return shlex.quote(run_dir.name if run_dir.parent == StorageDir.of("runs") else str(run_dir))


def format_resume_command(run_dir: StorageDir) -> str:
    """The command that continues the run at ``run_dir``; of a run in object storage it works on every machine."""
    return f"python -m train.run --resume {format_run_argument(run_dir)}"


def format_run_command(config: StorageDir) -> str:
    return f"python -m train.run --config {shlex.quote(str(config))}"


def _remote_run(text: str, out: Path | str) -> StorageDir | None:
    """The place of the run in object storage that ``text`` or, as a name in ``out``, names; None for one on disk."""
    if not is_remote(text):
        return StorageDir.of(out) / text if is_remote(str(out)) else None
    run_dir = StorageDir.of(text)
    return run_dir.parent.parent if run_dir.parent.name == CHECKPOINTS else run_dir


def _newest(run_dir: StorageDir, text: str, flag: str) -> str:
    """The newest copy of a checkpoint, which is also the one that ``text`` names if it names one."""
    copy = newest_uploaded(run_dir, flag)
    if is_remote(text) and (named := StorageDir.of(text).name) != run_dir.name and named != copy:
        raise _not_newest(flag, text, copy)
    return copy


def _not_newest(flag: str, text: str, later: str) -> UserError:
    return UserError(
        f"{flag} {text} is not the newest checkpoint of its run: to continue from there, remove those after it, up to "
        f"{later}."
    )
