"""The folder of a search or a ladder, which one driver locks, and which can only be resumed with the same settings.

``OUT/NAME/`` contains ``search.json`` or ``ladder.json`` (:class:`ExperimentRecord`), ``trials/`` (a JSON file per
finished trial) and, at the end, ``result.json`` (:class:`ExperimentResult`), the report, tables and charts. If it is in
object storage, the driver works in a local copy and uploads each file as it is written.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from infra.errors import UserError, suggest_nearest
from infra.schema import from_json, strict, to_json
from infra.storage.directory import StorageDir
from infra.storage.files import clear_temporaries, write_json
from infra.storage.workspace import Workspace
from infra.tracking.run_ref import RunRef
from tune.config import ExperimentConfig

Config = TypeVar("Config", bound=ExperimentConfig)

TRIALS = "trials"
"""Folder of the trials' rows and tracebacks in an experiment's folder."""
SUMMARY = "summary.md"
"""File of the report in an experiment's folder."""
RESULT = "result.json"
"""File of the :class:`ExperimentResult` in an experiment's folder."""


@strict
@dataclass(frozen=True)
class ExperimentRecord:
    """The stored settings of an experiment, by which it is resumed and its runs in MLflow are filled."""

    kind: str
    """Noun for the experiment: search or ladder."""
    mlflow_experiment: str
    """Name of the experiment in MLflow."""
    config: dict[str, Any]
    """Settings of the experiment by name."""
    identity: dict[str, Any]
    """Settings that cannot be changed when the experiment is resumed."""
    params: dict[str, Any]
    """Params of the experiment's run in MLflow."""
    data: str
    """Location of the token shards, as an absolute path or URI."""
    fingerprint: str
    """Fingerprint of the token shards."""
    splits: dict[str, dict[str, int]]
    """Totals of the token shards by split."""
    limit: int | None
    """Memory limit of a trial's process in bytes; None without a limit."""
    mlflow_run: RunRef
    """The experiment's run in MLflow."""

    @property
    def name(self) -> str:
        """Name of the experiment, which is the name of its folder."""
        return StorageDir.of(self.mlflow_run.run_dir).name


@strict
@dataclass(frozen=True)
class ExperimentResult:
    """The result of a finished experiment, which is logged to its run in MLflow."""

    has_winner: bool
    """Whether the experiment has a winner."""
    metrics: list[tuple[str, float]]
    """Metrics of the report: (name in MLflow, value)."""
    files: list[str]
    """Names of the report's files in the experiment's folder."""
    tags: dict[str, str] = field(default_factory=dict)
    """Tags of the experiment's run in MLflow."""
    trial_tags: dict[str, dict[str, str]] = field(default_factory=dict)
    """Tags of the trials' runs in MLflow by the trial's key: the rank, and the speed of the trial's candidate."""


def read_record(directory: StorageDir, kind: str) -> ExperimentRecord:
    """Read the record of the ``search`` or ``ladder`` in ``directory`` that :func:`write_record` stored."""
    try:
        content = directory.read(f"{kind}.json")
    except OSError:
        siblings = directory.parent.entries() or ()
        names = [name for name in siblings if (directory.parent / name).exists(f"{kind}.json")]
        hint = suggest_nearest(directory.name, names) if names else f". Check --out, or start a new {kind} with --name."
        raise UserError(f"--resume {directory.name}: there is no {kind} in {directory}{hint}") from None
    try:
        return from_json(ExperimentRecord, json.loads(content), "it")
    except (ValueError, UserError) as damage:
        raise UserError(f"--resume: {directory}/{kind}.json is corrupt ({damage}). Start a new {kind}.") from damage


def read_config(directory: StorageDir, kind: type[Config]) -> Config:
    """Read the config of the experiment in ``directory``, for ``--resume``."""
    source = f"--resume: {directory}/{kind.kind}.json is corrupt; it"
    return from_json(kind, read_record(directory, kind.kind).config, source)


@contextmanager
def open_workspace(directory: StorageDir, kind: str) -> Iterator[Workspace]:
    """Lock the experiment's ``directory`` for this driver, and yield the workspace with its record and trials."""
    directory.check_writable("--out")
    workspace = Workspace.of(directory)
    message = f"Another process is running the {kind} in {directory}. Wait for it to finish, or stop it."
    with workspace.exclusive_use(message):
        prefixes = (f"{kind}.json", f"{TRIALS}/")
        workspace.refresh(lambda name: name.startswith(prefixes))
        (workspace.path / TRIALS).mkdir(exist_ok=True)
        clear_temporaries(workspace.path / TRIALS)
        yield workspace


def write_record(workspace: Workspace, record: ExperimentRecord) -> None:
    """Store the record of a new experiment."""
    file = workspace.path / f"{record.kind}.json"
    write_json(file, to_json(record))
    workspace.push(file)


def read_result(folder: Path) -> ExperimentResult | None:
    """Read the result of the experiment in the local ``folder``; None if it has not finished."""
    file = folder / RESULT
    if not file.exists():
        return None
    try:
        return from_json(ExperimentResult, json.loads(file.read_text(encoding="utf-8")), file)
    except ValueError as damage:
        raise UserError(f"{file} is corrupt ({damage}). Delete it, and resume the experiment.") from damage


def resumed_parent(directory: StorageDir, kind: str, identity: dict[str, Any]) -> RunRef:
    """Reopen the parent run of the experiment in ``directory``. Raises ``UserError`` if its ``identity`` differs."""
    record, current = read_record(directory, kind), json.loads(json.dumps(identity))
    differences = [
        f"{name}: {record.identity.get(name)!r} → {current.get(name)!r}"
        for name in sorted(set(record.identity) | set(current))
        if record.identity.get(name) != current.get(name)
    ]
    if differences:
        raise UserError(
            f"--resume {directory.name}: its settings differ ({'; '.join(differences)}). Remove these flags to resume "
            f"it, or start a new {kind} with another --name."
        )
    parent = record.mlflow_run.check_belongs_to(directory, f"Or start a new {kind}")
    from infra.tracking.store import reopen_run

    reopen_run(parent)
    return parent
