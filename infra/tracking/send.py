"""Send a run's entries to MLflow in as few calls as its limits allow."""

import json
from pathlib import Path
from typing import Any

from mlflow.entities import Dataset, DatasetInput, InputTag, LifecycleStage, Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INTERNAL_ERROR, TEMPORARILY_UNAVAILABLE, ErrorCode
from mlflow.tracking import MlflowClient

from infra.cli.console import errors
from infra.errors import first_line
from infra.tracking.orphaned_runs import FULLY_LOGGED

METRICS_PER_BATCH = 500

ITEMS_PER_BATCH = 90  # MLflow refuses more than 1,000 metrics, 100 params or 100 tags in one call

UNREACHABLE = (ErrorCode.Name(INTERNAL_ERROR), ErrorCode.Name(TEMPORARILY_UNAVAILABLE))
"""Codes of a store that cannot be asked now, as against one that refuses what it is sent."""

Entry = dict[str, Any]


def send(client: MlflowClient, run_id: str, entries: list[Entry]) -> None:
    """Write ``entries`` to a run in as few calls as MLflow's limits allow.

    Raises when the store does not answer, and when the run was deleted, which can be undone; entries that are sent
    twice are stored once. An entry that the store rejects is reported and dropped, since sending it again would fail
    forever.
    """
    metrics = [Metric(e["key"], e["value"], e["time"], e["step"]) for e in entries if e["kind"] == "metric"]
    params = [Param(e["key"], e["value"]) for e in entries if e["kind"] == "param"]
    tags = [RunTag(e["key"], e["value"]) for e in entries if e["kind"] == "tag"]
    for first in range(0, len(metrics), METRICS_PER_BATCH):
        _log(client, run_id, metrics=metrics[first : first + METRICS_PER_BATCH])
    for first in range(0, max(len(params), len(tags)), ITEMS_PER_BATCH):
        part = slice(first, first + ITEMS_PER_BATCH)
        _log(client, run_id, params=params[part], tags=tags[part])
    for entry in entries:
        match entry["kind"]:
            case "data":
                source = json.dumps({"uri": entry["source"]})
                data = Dataset(entry["name"], entry["digest"], "local", source, profile=json.dumps(entry["profile"]))
                context = InputTag("mlflow.data.context", entry["context"])
                _call(client, client.log_inputs, run_id, [DatasetInput(data, [context])])
            case "text":
                _call(client, client.log_text, run_id, entry["content"], entry["name"])
            case "file":
                if Path(entry["path"]).exists():
                    _call(client, client.log_artifact, run_id, entry["path"], entry["folder"])
                else:
                    errors.print(f"{entry['path']} no longer exists and was not uploaded to MLflow")
            case "finish":
                _call(client, client.set_terminated, run_id, entry["status"], entry["time"])
                _call(client, client.set_tag, run_id, FULLY_LOGGED, "true")


def _log(client: MlflowClient, run_id: str, **items: Any) -> None:
    """Write a batch or, where the store rejects it, its items one by one: a rejected one takes no other with it."""
    try:
        client.log_batch(run_id, **items)
    except MlflowException as failure:
        _raise_if_temporary(client, run_id, failure)
        for kind, values in items.items():
            for value in values:
                _call(client, client.log_batch, run_id, **{kind: [value]})


def _call(client: MlflowClient, method: Any, run_id: str, *arguments: Any, **named: Any) -> None:
    try:
        method(run_id, *arguments, **named)
    except MlflowException as failure:
        _raise_if_temporary(client, run_id, failure)
        errors.print(f"MLflow rejected an entry: {first_line(failure)}")


def _raise_if_temporary(client: MlflowClient, run_id: str, failure: MlflowException) -> None:
    if failure.error_code in UNREACHABLE or is_deleted(client, run_id):
        raise failure


def is_deleted(client: MlflowClient, run_id: str) -> bool:
    """Whether the run, or its experiment, was deleted in MLflow's pages and can be restored."""
    return client.get_run(run_id).info.lifecycle_stage == LifecycleStage.DELETED
