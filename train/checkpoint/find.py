"""Find the run or the checkpoint that a flag names, on disk or in object storage."""

from pathlib import Path

from infra.errors import UserError
from train.checkpoint.progress import checkpoints_in, newest
from train.checkpoint.run_folder import RunFolder


def find_run(text: str, out: Path, flag: str = "--resume") -> RunFolder:
    """The run that ``flag`` names: by its name under ``out``, its folder, or the folder of its newest checkpoint.

    A run in object storage is downloaded. Raises ``UserError`` when there is nothing to continue.
    """
    if "://" in text:
        from train.checkpoint.remote import download  # imported here because most runs are on disk

        text = str(download(text, out))
    for path in (out / text, Path(text)):
        if (path / "progress.json").is_file():
            later = checkpoints_in(path.parent)[-1]
            if later.name != path.name:
                raise UserError(
                    f"{flag} {text} is not the newest checkpoint of its run: to continue from there, remove those "
                    f"after it, up to {later.name}."
                )
            run = RunFolder(path.resolve().parent.parent)
        elif (path / "config.json").is_file():
            run = RunFolder(path.resolve())
        else:
            continue
        if newest(run.checkpoints) is None:
            raise UserError(f"{flag} {text}: {run.path} has no intact checkpoint; start a new run with --name.")
        return run
    raise UserError(f"{flag} {text}: there is no run {out / text} or {text}; 'ls {out}' lists runs.")


def find_checkpoint(text: str, out: Path) -> Path:
    """The checkpoint that ``--checkpoint`` names, or the newest of the run that it names. Raises ``UserError``."""
    if (Path(text) / "progress.json").is_file():
        return Path(text)
    return find_run(text, out, flag="--checkpoint").newest()
