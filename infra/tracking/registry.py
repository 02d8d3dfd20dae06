"""Register a trained model in MLflow, with its signature and an input example."""

import logging
import os
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

SERVED = Path(__file__).with_name("logits.py")


def register(run_ref: RunRef, name: str, folder: Path, vocab_size: int, description: str = "") -> str:
    """Log the model in ``folder`` to the run of ``run_ref``, register it as ``name``, and return its version there.

    Token ids are below ``vocab_size``; the version's page shows ``description``, which is Markdown.
    """
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    ids, logits = np.dtype(np.int64), np.dtype(np.float32)
    signature = ModelSignature(
        Schema([TensorSpec(ids, (-1, -1))]),
        Schema([TensorSpec(logits, (-1, -1, vocab_size))]),
    )
    mlflow.set_tracking_uri(run_ref.store)
    client = MlflowClient(run_ref.store)
    try:
        # Not within mlflow.start_run, which would set the run to RUNNING, where an interrupt would leave it.
        model = client.create_logged_model(run_ref.experiment_id, name="model", source_run_id=run_ref.run_id)
        client.log_outputs(run_ref.run_id, [LoggedModelOutput(model.model_id, step=0)])
        made = mlflow.pyfunc.log_model(
            model_id=model.model_id,
            python_model=str(SERVED),
            artifacts={"model": str(folder.resolve())},
            signature=signature,
            input_example=np.array([[vocab_size - 1]]),
            pip_requirements=[f"{package}=={version(package)}" for package in ("torch", "transformers")],
            registered_model_name=name,
        )
        client.update_model_version(name, str(made.registered_model_version), description)
    except MlflowException as failure:
        raise UserError(
            f"--register {name}: {run_ref.store} rejects the model: {first_line(failure).rstrip('.')}."
        ) from failure
    return str(made.registered_model_version)
