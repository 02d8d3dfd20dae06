"""The MLflow store: open it, create experiments and runs in it, and look them up."""

import logging
import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote, urlsplit

from mlflow.entities import Experiment, LifecycleStage, RunTag
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST, ErrorCode
from mlflow.store.tracking import SEARCH_MAX_RESULTS_THRESHOLD
from mlflow.tracking import MlflowClient

from infra.cli.interrupts import interrupts
from infra.device.provenance import user
from infra.errors import UserError, first_line
from infra.storage.credentials import has_secret
from infra.tracking import orphaned_runs, saved_views
from infra.tracking.run_ref import SQLITE, RunRef, sqlite_file, sqlite_store
from infra.tracking.send import is_deleted
from infra.tracking.tracker import NOTE, Logged

os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # commands print one link, at their end
for verbose in ("mlflow.store.db.utils", "alembic.runtime.migration"):
    logging.getLogger(verbose).setLevel(logging.WARNING)  # they print a page about new tables on first use

EXPERIMENTS = ("pipeline", "train", "ladder", "tune", "doctor")

FILES = "mlartifacts"
"""The folder next to a SQLite store that holds the files of its runs."""


def store_uri(tracking_uri: str | None = None) -> str:
    """The store to use: the flag, else ``MLFLOW_TRACKING_URI``, else ``mlflow.db`` in this folder, as absolute path.

    Raises ``UserError`` when it contains a password, which would be kept with the results, printed with every link,
    and readable in the list of processes.
    """
    uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db"
    if has_secret(uri):
        raise UserError(
            f"The address of the MLflow store at {urlsplit(uri).hostname} contains a password. Remove it, and set "
            "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD (PGUSER and PGPASSWORD for PostgreSQL)."
        )
    file = sqlite_file(uri)
    return sqlite_store(file.resolve()) if file else uri


@interrupts.delayed()
def open_store(tracking_uri: str | None = None) -> None:
    """Open the store, and create its database if it is new, which takes seconds."""
    store = store_uri(tracking_uri)
    file = sqlite_file(store)
    if file and file.is_dir():
        raise UserError(f"The MLflow store {store} is a folder. Use a file in it, such as sqlite:///mlflow.db.")
    if file and file.exists() and not all(os.access(path, os.W_OK) for path in (file, file.parent)):
        # MLflow opens it, and fails with ninety lines when the first run is created.
        raise UserError(
            f"The MLflow store {store} is not writable. Allow writing to the file and its folder, or use another store "
            "with --tracking-uri."
        )
    try:
        if file and not file.exists():
            _create_database(file)
        _open(store)
    except Exception as failure:  # a damaged database, a missing driver: each library raises classes of its own
        raise _unusable(store, failure) from failure


def _create_database(file: Path) -> None:
    """Create the database of a store, whole or not at all: MLflow cannot repair one that is incomplete."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=f".{file.name}-") as temporary_dir:
        _open(sqlite_store(Path(temporary_dir) / file.name))
        with suppress(OSError):  # another command was first; or there are no links here and MLflow creates it in place
            os.link(f"{temporary_dir}/{file.name}", file)


def _open(store: str) -> None:
    """Have MLflow open a store, whose database is created by the first call."""
    MlflowClient(store).get_experiment_by_name("Default")
    if store.startswith(SQLITE) and "%" in store:
        with suppress(OSError):  # it also makes the folder that the address names where nothing is unquoted
            os.removedirs(Path(store.removeprefix(SQLITE)).parent)


def create_run(
    experiment: str,
    name: str,
    *,
    tracking_uri: str | None = None,
    parent: RunRef | None = None,
    run_dir: str = "",
    tags: Mapping[str, str] | None = None,
    keep: Callable[[RunRef], None] | None = None,
) -> RunRef:
    """Create a run (and the store and experiment when they are new), pass its key to ``keep``, and return it.

    ``run_dir`` is the folder that this command holds (:meth:`StorageDir.lock`), by its absolute path or address;
    that of the ``parent`` if there is one. While it is held the run is known to be alive: if this process is killed,
    the next command closes it. ``keep`` writes the key to disk for a command that continues the run. Ctrl-C and SIGTERM
    are delayed until it has.

    Raises ``UserError`` when the store cannot be reached: nothing has been computed yet, so the user is told now
    rather than after hours.
    """
    store = parent.store if parent else store_uri(tracking_uri)
    run_dir = run_dir or (parent.run_dir if parent else "")
    labels = {"mlflow.user": user(), "mlflow.source.type": "LOCAL", "mlflow.source.name": experiment}
    labels |= ({"mlflow.parentRunId": parent.run_id} if parent else {}) | (
        orphaned_runs.open_run_tags(run_dir) if run_dir else {}
    )
    ours: dict[str, Experiment] = {}
    with interrupts.delayed():
        if not parent:
            open_store(tracking_uri)
        try:
            client = MlflowClient(store)
            if parent:
                experiment_id = parent.experiment_id
            else:
                ours = _experiments(client)
                experiment_id = _experiment(client, store, experiment, ours.get(experiment))
            run = client.create_run(experiment_id, run_name=name, tags=labels | dict(tags or {}))
        except MlflowException as failure:
            raise _unusable(store, failure) from failure
        run_ref = RunRef(store, experiment_id, run.info.run_id, run_dir)
        orphaned_runs.open_run_dirs[run_ref.run_id] = run_dir
        if keep:
            keep(run_ref)
    if not parent:
        known = ours.get(experiment)
        saved_views.save_views(client, experiment, run_ref, known.tags if known else {})
        orphaned_runs.close_orphaned_runs(client, [each.experiment_id for each in ours.values()])
    return run_ref


def _restoring(store: str, command: str) -> str:
    return f"'mlflow {command}' with MLFLOW_TRACKING_URI={store}"


def _unusable(store: str, failure: Exception) -> UserError:
    return UserError(
        f"The MLflow store {store} cannot be used: {first_line(failure).rstrip('.')}. "
        "Start its server, or use another store with --tracking-uri (for example sqlite:///mlflow.db)."
    )


@interrupts.delayed()
def reopen_run(run_ref: RunRef) -> None:
    """Set a run that has ended to RUNNING again. Raises ``UserError`` when it is not in its store, or deleted."""
    open_store(run_ref.store)
    try:
        client = MlflowClient(run_ref.store)
        if is_deleted(client, run_ref.run_id):
            raise UserError(
                f"The MLflow run {run_ref.run_id} in {run_ref.store} was deleted. Restore it, and its experiment if "
                f"that was deleted too ({_restoring(run_ref.store, f'runs restore --run-id {run_ref.run_id}')}), or "
                f"start a new MLflow run with --tracking-uri {run_ref.store}."
            )
        client.update_run(run_ref.run_id, status="RUNNING")
        orphaned_runs.open_run_dirs[run_ref.run_id] = run_ref.run_dir
        if run_ref.run_dir:
            client.log_batch(
                run_ref.run_id, tags=[RunTag(*tag) for tag in orphaned_runs.open_run_tags(run_ref.run_dir).items()]
            )
        orphaned_runs.close_orphaned_runs(
            client, [each.experiment_id for each in _experiments(client).values()], run_ref
        )
    except MlflowException as failure:
        raise UserError(
            f"The MLflow run {run_ref.run_id} in {run_ref.store} cannot be resumed: {first_line(failure).rstrip('.')}. "
            "Restore its store, or use another with --tracking-uri."
        ) from failure


@interrupts.delayed()
def read_logged(run_ref: RunRef) -> Logged:
    """What the run has already, from which it is continued."""
    try:
        client = MlflowClient(run_ref.store)
        data = client.get_run(run_ref.run_id).data
        histories = {name: client.get_metric_history(run_ref.run_id, name) for name in data.metrics}
    except MlflowException as failure:
        raise UserError(
            f"The MLflow store {run_ref.store} does not respond: {first_line(failure).rstrip('.')}. Start its server, "
            "or use another store with --tracking-uri."
        ) from failure
    return Logged(set(data.params), {name: max(point.step for point in points) for name, points in histories.items()})


@interrupts.delayed()
def has_run(run_ref: RunRef) -> bool:
    """Whether the run is in its store and not deleted."""
    try:
        return not is_deleted(MlflowClient(run_ref.store), run_ref.run_id)
    except MlflowException as failure:
        if failure.error_code == ErrorCode.Name(RESOURCE_DOES_NOT_EXIST):
            return False
        raise _unusable(run_ref.store, failure) from failure


@interrupts.delayed()
def children(parent: RunRef, tag: str) -> dict[str, tuple[RunRef, bool]]:
    """The children of ``parent`` (but deleted ones) by their value of ``tag``.

    With each is whether it has ended by itself, and has all its entries.
    """
    try:
        runs = MlflowClient(parent.store).search_runs(
            [parent.experiment_id], f"tags.`mlflow.parentRunId` = '{parent.run_id}'",
            max_results=SEARCH_MAX_RESULTS_THRESHOLD,
        )  # fmt: skip
    except MlflowException as failure:
        raise _unusable(parent.store, failure) from failure
    return {
        run.data.tags[tag]: (
            replace(parent, run_id=run.info.run_id),
            run.data.tags.get(orphaned_runs.FULLY_LOGGED) == "true" and run.info.status != "KILLED",
        )
        for run in runs
        if tag in run.data.tags
    }


@interrupts.delayed()
def add_to_page(run_ref: RunRef, paragraph: str, tags: Mapping[str, str]) -> None:
    """Add a ``paragraph`` below the first one of a run's description, and tags; the run may have ended.

    Never raises: a link is a convenience, and its store may be away.
    """
    with suppress(Exception):
        client = MlflowClient(run_ref.store)
        first, mark, remainder = client.get_run(run_ref.run_id).data.tags.get(NOTE, "").partition("\n\n")
        client.set_tag(run_ref.run_id, NOTE, f"{first}\n\n{paragraph}{mark}{remainder}")
        for name, value in tags.items():
            client.set_tag(run_ref.run_id, name, value)


def _experiments(client: MlflowClient) -> dict[str, Experiment]:
    return {experiment.name: experiment for experiment in client.search_experiments() if experiment.name in EXPERIMENTS}


def _experiment(client: MlflowClient, store: str, name: str, experiment: Experiment | None) -> str:
    """The experiment's id, if it was ``experiment``, or of a new one. In SQLite it keeps its files next to the
    database.

    Raises ``UserError`` when it keeps them elsewhere, because the store was copied or moved: MLflow keeps their
    absolute path, and would write into the original's folder.
    """
    files = None
    if file := sqlite_file(store):
        files = (file.parent / FILES / name).as_uri()
    if not experiment:
        try:
            return client.create_experiment(name, artifact_location=files)
        except MlflowException:  # another command created it meanwhile, it is not ours to be listed, or deleted
            experiment = client.get_experiment_by_name(name)
            if experiment is None:
                raise
    if experiment.lifecycle_stage == LifecycleStage.DELETED:
        restoring = _restoring(store, f"experiments restore --experiment-id {experiment.experiment_id}")
        raise UserError(
            f"The experiment {name} of the MLflow store {store} was deleted. Restore it ({restoring}), or use another "
            "store with --tracking-uri."
        )
    location = experiment.artifact_location
    if file and location != files and location.startswith("file:") and location.endswith(f"/{FILES}/{name}"):
        old = Path(unquote(urlsplit(location).path))
        if old.resolve() != file.parent / FILES / name:
            raise UserError(
                f"The MLflow store {store} was copied or moved from {old.parents[1]} and would still write files "
                "there. Move it back, or use another store with --tracking-uri."
            )
    return experiment.experiment_id
