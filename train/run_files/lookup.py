"""Find the run or checkpoint that a flag names, and format commands that name a run."""

import shlex
from pathlib import Path

from infra.cli.console import errors
from infra.errors import UserError
from infra.storage.directory import StorageDir
from train.config import TrainConfig, load_config
from train.run_files.progress import PROGRESS
from train.run_files.run_folder import CONFIG, KEY, RESULT, RunFolder
from train.run_files.uploads import CHECKPOINTS


def find_run(text: str, out: Path | str) -> tuple[RunFolder, Path]:
    """Find the run in ``--resume``: a name in ``out``, the location of a run, or the location of its newest checkpoint.

    Raises ``UserError`` if there is nothing to resume.

    Returns: (run, its newest intact checkpoint). For a run in object storage, only the progress of the checkpoint is
    downloaded.
    """
    run = RunFolder.of(_resumable_run(text, out))
    return run, _intact(*run.newest_progress(), f"--resume {text}: {run.location}")


def load_run_config(text: str, out: Path | str) -> TrainConfig:
    """Load the requested settings of the run in ``--resume``."""
    return load_config((_resumable_run(text, out) / CONFIG).address, "--resume")


def find_checkpoint(text: str, out: Path | str) -> tuple[RunFolder, Path]:
    """Find the checkpoint in ``--checkpoint``, or the newest intact checkpoint if it contains a run.

    A checkpoint in object storage is downloaded, unless this machine has a copy.

    Returns: (run, checkpoint).
    """
    location, is_checkpoint = _find(text, out, "--checkpoint")
    run_dir = location.parent.parent if is_checkpoint else location
    run = RunFolder.of(run_dir, "downloads", run_dir.digest, run_dir.name)
    if is_checkpoint:
        checkpoint = run.pull_checkpoint(location)
    else:
        checkpoint = _intact(*run.newest_checkpoint(), f"--checkpoint {text}: {run_dir}")
    for name in (KEY, RESULT):
        if run_dir.exists(name):
            run.pull(name)
    return run, checkpoint


def _intact(checkpoint: Path | None, damaged: list[str], run: str) -> Path:
    """Print the messages about ``damaged`` checkpoints; raise ``UserError`` about ``run`` if none is intact."""
    for message in damaged:
        errors.print(message, markup=False)
    if checkpoint is None:
        raise UserError(f"{run} has no intact checkpoint. Start a new run with --name.")
    return checkpoint


def _find(text: str, out: Path | str, flag: str) -> tuple[StorageDir, bool]:
    """Find the run or checkpoint in ``flag``, by its name in ``out`` or by its location.

    Returns: (location, whether it is a checkpoint and not a run).
    """
    candidates = dict.fromkeys((StorageDir.of(out, text), StorageDir.of(text)))
    for location in candidates:
        if location.exists(PROGRESS):
            return location, True
        if location.exists(CONFIG):
            return location, False
    raise UserError(
        f"{flag} {text}: there is no run {' or '.join(map(str, candidates))}. Use the name of a run in --out {out}, or "
        "the location of its folder."
    )


def _resumable_run(text: str, out: Path | str) -> StorageDir:
    """Find the run in ``--resume``, which may contain the run or its newest checkpoint."""
    location, is_checkpoint = _find(text, out, "--resume")
    if not is_checkpoint:
        return location
    run_dir = location.parent.parent
    names = RunFolder.of(run_dir).checkpoint_names()
    if location.parent.name != CHECKPOINTS or location.name not in names:
        raise UserError(
            f"--resume {text} is outside its run folder, which has other files needed to resume. Move it back to "
            f"runs/NAME/{CHECKPOINTS} under its original name."
        )
    if location.name != names[-1]:
        raise UserError(
            f"--resume {text} is not the newest checkpoint of its run. To resume from it, delete the later ones, up to "
            f"{names[-1]}."
        )
    return run_dir


def format_run_argument(run_dir: StorageDir) -> str:
    """Format the run as an argument from which :func:`find_run` finds it in the current folder."""
    return shlex.quote(run_dir.name if run_dir.parent == StorageDir.of("runs") else str(run_dir))


def format_resume_command(run_dir: StorageDir) -> str:
    """Format the command that resumes the run. For a run in object storage it works on every machine."""
    return f"python -m train.run --resume {format_run_argument(run_dir)}"


def format_run_command(config: StorageDir) -> str:
    """Format the command that starts a run with the settings in ``config``."""
    return f"python -m train.run --config {shlex.quote(str(config))}"
