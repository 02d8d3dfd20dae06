"""Entry: ``python -m train.export`` writes a trained model in the Hugging Face format, with its model card.

In: a checkpoint. Out: a folder, and if asked for a version in MLflow's model registry. Wiring only.
"""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from infra import command
from infra.command import console
from infra.errors import UserError
from infra.options import Checkpoint, Runs
from infra.progress import doing
from infra.tracking.key import RunKey
from train.checkpoint.find import find_checkpoint
from train.checkpoint.progress import read_progress
from train.checkpoint.run_folder import RunFolder
from train.config import config_from_json


@dataclass(frozen=True)
class ExportConfig:
    """What to export, and where."""

    checkpoint: Checkpoint
    to: Path
    """Folder to create."""
    register: str | None = None
    """Also register the model under this name in the MLflow store that holds the run (needs transformers)."""
    out: Runs = "runs"


def main() -> None:
    """Parse, export, report, exit."""
    description = "Write a trained model in the Hugging Face format."
    command.run(export, ExportConfig, module="train.export", description=description)


def export(config: ExportConfig) -> int:
    """Write the folder; returns the exit code. Raises ``UserError`` when it exists.

    torch and MLflow are imported only when the flags are known to be valid.
    """
    if config.to.exists():
        raise UserError(f"--to {config.to} exists already: name a new folder.")
    checkpoint = find_checkpoint(config.checkpoint, config.out)
    key = run_of(checkpoint, config.register) if config.register else None
    with doing("writing the model"):
        from train.hugging_face import write_model

        write_model(checkpoint, config.to)
    console.print(f"{config.to}: load it with transformers' GPT2LMHeadModel.from_pretrained({str(config.to)!r})")
    if key and config.register:
        vocabulary = config_from_json(read_progress(checkpoint).config, str(checkpoint)).model.vocabulary
        with doing("registering the model"):
            from infra.tracking.registry import register

            version = register(key, config.register, config.to, vocabulary)
        console.print(f"registered: mlflow.pyfunc.load_model('models:/{config.register}/{version}')")
    return 0


def run_of(checkpoint: Path, name: str) -> RunKey:
    """The MLflow run of ``checkpoint``, whose model is registered as ``name``. Raises ``UserError``."""
    key = RunFolder(checkpoint.resolve().parent.parent).key()
    if key is None:
        raise UserError(f"--register {name}: {checkpoint} is not in a run's folder, so its MLflow run is not known.")
    if find_spec("transformers") is None:
        raise UserError(f"--register {name} needs transformers: 'pip install transformers', or leave it out.")
    return key


if __name__ == "__main__":
    main()
