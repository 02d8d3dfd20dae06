"""Registering a model leaves the run that trained it as it was, also when it fails."""

import shutil
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from infra.errors import UserError
from infra.tracking.registry import register
from infra.tracking.store import create_run
from infra.tracking.tracker import Tracker


def test_a_run_whose_model_cannot_be_registered_is_still_finished(tmp_path: Path, empty_store: Path) -> None:
    store = shutil.copy(empty_store, tmp_path / "mlflow.db")
    key = create_run("train", "trained", tracking_uri=f"sqlite:///{store}")
    with Tracker(key):
        pass
    client = MlflowClient(key.store)
    before = client.get_run(key.run_id).info
    with pytest.raises(UserError, match="--register books"):
        register(key, "books", tmp_path / "nothing", 257)
    after = client.get_run(key.run_id).info
    assert (after.status, after.end_time) == (before.status, before.end_time) == ("FINISHED", before.end_time)
