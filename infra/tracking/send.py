"""Sending a run's entries to MLflow in as few calls as its limits allow."""

import json
from pathlib import Path
from typing import Any

from mlflow.entities import Dataset, DatasetInput, InputTag, LifecycleStage, Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INTERNAL_ERROR, RESOURCE_DOES_NOT_EXIST, TEMPORARILY_UNAVAILABLE, ErrorCode
from mlflow.tracking import MlflowClient

from infra.cli.console import errors
from infra.errors import first_line
from infra.tracking.orphaned_runs import FULLY_LOGGED

METRICS_PER_BATCH = 500
"""Number of metrics in one call; MLflow rejects more than 1,000."""

ITEMS_PER_BATCH = 90
"""Number of params or tags in one call; MLflow rejects more than 100 of each."""

UNREACHABLE_CODES = (ErrorCode.Name(INTERNAL_ERROR), ErrorCode.Name(TEMPORARILY_UNAVAILABLE))
"""Error codes of a store that is temporarily unavailable, and does not reject an entry."""

Entry = dict[str, Any]
"""Queued metric, param, tag, data set, text, file, or end of a run, by its ``kind``; a tag without value is removed."""


def send(client: MlflowClient, run_id: str, entries: list[Entry]) -> None:
    """Write ``entries`` to a run in as few calls as MLflow's limits allow.

    Entries may be sent twice; the store has them once. An entry that the store rejects is reported and dropped, because
    sending it again would always fail.

    Raises:
        MlflowException: if the store does not respond, or if the run was deleted, because it may be restored.
    """
    metrics = [Metric(e["key"], e["value"], e["time"], e["step"]) for e in entries if e["kind"] == "metric"]
    params = [Param(e["key"], e["value"]) for e in entries if e["kind"] == "param"]
    tag_values = {e["key"]: e["value"] for e in entries if e["kind"] == "tag"}
    tags = [RunTag(name, value) for name, value in tag_values.items() if value]
    for start in range(0, len(metrics), METRICS_PER_BATCH):
        _log(client, run_id, metrics=metrics[start : start + METRICS_PER_BATCH])
    for start in range(0, max(len(params), len(tags)), ITEMS_PER_BATCH):
        part = slice(start, start + ITEMS_PER_BATCH)
        _log(client, run_id, params=params[part], tags=tags[part])
    for name in (name for name, value in tag_values.items() if not value):
        _remove_tag(client, run_id, name)
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
                    errors.print(f"{entry['path']} no longer exists and was not uploaded to MLflow.")
            case "finish":
                _call(client, client.set_terminated, run_id, entry["status"], entry["time"])
                _call(client, client.set_tag, run_id, FULLY_LOGGED, "true")


def _log(client: MlflowClient, run_id: str, **items: Any) -> None:
    """Write a batch; if the store rejects it, write each item separately, so that only invalid items are dropped."""
    try:
        client.log_batch(run_id, **items)
    except MlflowException as failure:
        _raise_if_temporary(client, run_id, failure)
        for kind, values in items.items():
            for value in values:
                _call(client, client.log_batch, run_id, **{kind: [value]})


def _call(client: MlflowClient, method: Any, run_id: str, *arguments: Any, **keyword_arguments: Any) -> None:
    try:
        method(run_id, *arguments, **keyword_arguments)
    except MlflowException as failure:
        _raise_if_temporary(client, run_id, failure)
        errors.print(f"MLflow rejected an entry: {first_line(failure)}", markup=False)


def _remove_tag(client: MlflowClient, run_id: str, name: str) -> None:
    """Remove a tag; it may be missing, because an entry may be sent twice."""
    try:
        client.delete_tag(run_id, name)
    except MlflowException as failure:
        _raise_if_temporary(client, run_id, failure)
        if failure.error_code != ErrorCode.Name(RESOURCE_DOES_NOT_EXIST):
            errors.print(f"MLflow did not remove the tag {name}: {first_line(failure)}", markup=False)


def _raise_if_temporary(client: MlflowClient, run_id: str, failure: MlflowException) -> None:
    if failure.error_code in UNREACHABLE_CODES or is_deleted(client, run_id):
        raise failure


def is_deleted(client: MlflowClient, run_id: str) -> bool:
    """Return whether the run or its experiment is marked as deleted in MLflow, and can be restored."""
    return client.get_run(run_id).info.lifecycle_stage == LifecycleStage.DELETED
