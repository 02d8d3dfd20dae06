"""The folder of a search or a ladder: locked by one driver, and resumed only with the settings it was created with.

``OUT/NAME/`` contains ``search.json`` or ``ladder.json`` (:class:`ExperimentRecord`), ``trials/`` (a JSON file per
finished trial) and, at the end, the report, tables and charts. If it is in object storage, the driver works in a local
copy and uploads each file as it is written.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from infra.errors import UserError, nearest
from infra.schema import from_json, strict
from infra.storage.directory import StorageDir
from infra.storage.files import clear_temporaries, write_json
from infra.storage.workspace import Workspace
from infra.tracking.run_ref import RunRef
from tune.config import ExperimentConfig

Config = TypeVar("Config", bound=ExperimentConfig)

TRIALS = "trials"


@strict
@dataclass(frozen=True)
class ExperimentRecord:
    """The stored settings of an experiment, by which it is resumed."""

    config: dict[str, Any]
    identity: dict[str, Any]
    """Settings that must be equal when the experiment is resumed."""
    mlflow_run: RunRef
    """The experiment's run in MLflow."""


def read_record(directory: StorageDir, kind: str) -> ExperimentRecord:
    """The stored settings of the ``search`` or ``ladder`` in ``directory``, which :func:`write_record` wrote."""
    try:
        content = directory.read(f"{kind}.json")
    except OSError:
        siblings = directory.parent.entries() or ()
        names = [name for name in siblings if (directory.parent / name).exists(f"{kind}.json")]
        hint = nearest(directory.name, names) if names else f". Check --out, or start a new {kind} with --name."
        raise UserError(f"--resume {directory.name}: there is no {kind} in {directory}{hint}") from None
    try:
        return from_json(ExperimentRecord, json.loads(content), "it")
    except (ValueError, UserError) as damage:
        raise UserError(f"--resume: {directory}/{kind}.json is corrupt ({damage}). Start a new {kind}.") from damage


def read_config(directory: StorageDir, kind: type[Config]) -> Config:
    source = f"--resume: {directory}/{kind.kind}.json is corrupt; it"
    return from_json(kind, read_record(directory, kind.kind).config, source)


@contextmanager
def open_workspace(directory: StorageDir, kind: str) -> Iterator[Workspace]:
    """Hold the experiment's ``directory`` for this driver, and yield the workspace with its record and trials."""
    directory.check_writable("--out")
    workspace = Workspace.of(directory)
    message = f"Another process is running the {kind} in {directory}. Wait for it to finish, or stop it."
    with workspace.exclusive_use(message):
        prefixes = (f"{kind}.json", f"{TRIALS}/")
        workspace.refresh(lambda name: name.startswith(prefixes))
        (workspace.path / TRIALS).mkdir(exist_ok=True)
        clear_temporaries(workspace.path / TRIALS)
        yield workspace


def write_record(workspace: Workspace, config: ExperimentConfig, identity: dict[str, Any], parent: RunRef) -> None:
    """Store the settings of a new experiment, so that it can be resumed."""
    mlflow_run = parent.to_json_for(workspace.location.address)
    file = workspace.path / f"{config.kind}.json"
    write_json(file, {"config": config.to_json(), "identity": identity, "mlflow_run": mlflow_run})
    workspace.push(file)


def resumed_parent(directory: StorageDir, kind: str, identity: dict[str, Any]) -> RunRef:
    """The parent run of the experiment in ``directory``. Raises ``UserError`` if its ``identity`` differs."""
    record, current = read_record(directory, kind), json.loads(json.dumps(identity))
    changed = [
        f"{name}: {record.identity.get(name)!r} → {current.get(name)!r}"
        for name in sorted(set(record.identity) | set(current))
        if record.identity.get(name) != current.get(name)
    ]
    if changed:
        raise UserError(
            f"--resume {directory.name}: its settings differ ({'; '.join(changed)}). Remove these flags to resume it, "
            f"or start a new {kind} with another --name."
        )
    parent = record.mlflow_run.check_belongs_to(directory, f"Or start a new {kind}")
    from infra.tracking.store import reopen_run

    reopen_run(parent)
    return parent
