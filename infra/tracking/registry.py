"""Registration of a trained model in MLflow, with its signature and an input example."""

import contextlib
import io
import logging
import os
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")

import mlflow
import numpy as np
from mlflow.entities import LoggedModelOutput
from mlflow.exceptions import MlflowException
from mlflow.models import ModelSignature
from mlflow.tracking import MlflowClient
from mlflow.types import Schema, TensorSpec

from infra.errors import UserError, first_line
from infra.tracking.run_ref import RunRef

SERVING_CODE = Path(__file__).with_name("logits.py")
"""File of the Python model that MLflow stores with the weights."""


def register(run_ref: RunRef, name: str, folder: Path, vocab_size: int, description: str = "") -> str:
    """Log the model in ``folder`` to a run, register it as ``name``, and return its version in the registry.

    The signature has token ids below ``vocab_size``. The page of the version shows ``description`` in Markdown.
    """
    logging.getLogger("torch").setLevel(logging.ERROR)  # Its handler keeps the stderr of when it was imported.
    ids, logits = np.dtype(np.int64), np.dtype(np.float32)
    signature = ModelSignature(
        Schema([TensorSpec(ids, (-1, -1))]),
        Schema([TensorSpec(logits, (-1, -1, vocab_size))]),
    )
    mlflow.set_tracking_uri(run_ref.store)
    client = MlflowClient(run_ref.store)
    # MLflow, transformers and torchao warn on stderr about each other, which helps nobody who registers a model.
    with contextlib.redirect_stderr(io.StringIO()), _errors_as_user_errors(name, run_ref.store):
        # mlflow.start_run would set the run to RUNNING, and an interrupt would leave it in this state.
        model = client.create_logged_model(run_ref.experiment_id, name="model", source_run_id=run_ref.run_id)
        client.log_outputs(run_ref.run_id, [LoggedModelOutput(model.model_id, step=0)])
        model_info = mlflow.pyfunc.log_model(
            model_id=model.model_id,
            python_model=str(SERVING_CODE),
            artifacts={"model": str(folder.resolve())},
            signature=signature,
            input_example=np.array([[vocab_size - 1]]),
            pip_requirements=[f"{package}=={version(package)}" for package in ("torch", "transformers")],
            registered_model_name=name,
        )
        client.update_model_version(name, str(model_info.registered_model_version), description)
    return str(model_info.registered_model_version)


@contextlib.contextmanager
def _errors_as_user_errors(name: str, store: str) -> Iterator[None]:
    """Raise ``UserError`` for an error of MLflow in the block."""
    try:
        yield
    except MlflowException as failure:
        raise UserError(
            f"--register {name}: the MLflow store {store} rejected the model. {first_line(failure).rstrip('.')}. Fix "
            "this, or remove --register."
        ) from failure
