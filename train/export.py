"""Entry: ``python -m train.export`` writes a trained model in the Hugging Face format, with its model card.

The model can also be registered in MLflow, and pushed to the Hugging Face Hub.
"""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import tyro

from infra.cli import command
from infra.cli.console import console
from infra.cli.options import Checkpoint, Runs, Switch
from infra.cli.progress import status
from infra.errors import UserError
from infra.tracking.run_ref import RunRef
from train.config import config_from_json
from train.reporting.hub import check_can_push, push
from train.run_files.lookup import find_checkpoint
from train.run_files.progress import read_progress
from train.run_files.run_folder import RunFolder


@dataclass(frozen=True)
class ExportConfig:
    """Write a trained model in the Hugging Face format."""

    checkpoint: Checkpoint
    to: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """Folder to create for the model."""
    register: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """Name under which to register the model in the MLflow store of its run (needs transformers).
    By default the model is not registered."""
    push: Annotated[str | None, tyro.conf.arg(metavar="REPO")] = None
    """Repository of the Hugging Face Hub to push the model to, as NAME or OWNER/NAME; it is created if necessary.
    The token is that of HF_TOKEN or of 'hf auth login'. By default the model is not pushed."""
    public: Switch = False
    """Make a repository that --push creates public instead of private."""
    out: Runs = "runs"

    def __post_init__(self) -> None:
        if self.public and not self.push:
            raise UserError("--public only applies to --push. Add --push REPO, or remove --public.")


def main() -> None:
    command.run(export, ExportConfig, module="train.export")


def export(config: ExportConfig) -> int:
    """Write the model to a new folder, and return the exit code.

    torch and MLflow are imported after the flags are checked, so that invalid flags are reported at once.
    """
    if config.to.exists():
        raise UserError(f"--to {config.to} already exists. Choose a new folder.")
    run, checkpoint = find_checkpoint(config.checkpoint, config.out)
    kind = config_from_json(read_progress(checkpoint).config, str(checkpoint)).model
    if config.register and kind.library != "transformers":
        raise UserError(f"--register {config.register} only supports GPT-2 models, not {kind.text}. Remove --register.")
    run_ref = find_run_ref(run, config.register)
    if config.push:
        check_can_push(config.push)
    name = run.location.name
    with status("writing the model"):
        from train.reporting.hugging_face import write_model

        loading = write_model(checkpoint, config.to, f"{name}, MLflow run {run_ref.run_id}" if run_ref else "")
    console.print(f"{config.to}: {loading}")
    url = None
    if config.push:
        with status(f"pushing the model to {config.push}"):
            url = push(config.to, config.push, is_private=not config.public)
        console.print(f"pushed: {url}", markup=False)
    if run_ref is None:
        return 0
    progress, model = read_progress(checkpoint), None
    if config.register:
        with status("registering the model"):
            from infra.tracking.registry import register
            from infra.tracking.views import page_link

            trained = f"Trained by {page_link(run_ref, name, store=run_ref.store)}, {progress.step:,} steps"
            model = (config.register, register(run_ref, config.register, config.to, kind.vocab_size, trained))
        console.print(f"registered: mlflow.pyfunc.load_model('models:/{'/'.join(model)}')")
    with status("recording the export in MLflow"):
        from train.reporting.tracking import link_export

        link_export(run_ref, progress.step, config.to.resolve(), model, url)
    return 0


def find_run_ref(run: RunFolder, name: str | None) -> RunRef | None:
    """Find the MLflow run of ``run``; None if it is unknown.

    Raises ``UserError`` if the model is to be registered as ``name`` and cannot be.
    """
    try:
        run_ref = run.run_ref()
    except UserError:  # A folder that was copied without its MLflow store can still be exported.
        if name:
            raise
        run_ref = None
    if name is None:
        return run_ref
    if run_ref is None:
        raise UserError(
            f"--register {name}: the MLflow run of {run.location} is unknown, because it has no tracking.json. Use a "
            "checkpoint in runs/NAME, or remove --register."
        )
    if find_spec("transformers") is None:
        raise UserError(
            f"--register {name} needs the package transformers. Run 'pip install transformers', or remove --register."
        )
    return run_ref


if __name__ == "__main__":
    main()
