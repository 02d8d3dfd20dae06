"""The MLflow store: opening it, and creating and finding experiments and runs."""

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
from infra.device.provenance import find_user_name
from infra.errors import UserError, first_line
from infra.storage.credentials import has_secret
from infra.tracking import orphaned_runs, saved_views
from infra.tracking.run_ref import SQLITE_PREFIX, RunRef, sqlite_file, sqlite_store
from infra.tracking.send import is_deleted
from infra.tracking.tracker import DESCRIPTION_TAG, Logged

os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # Commands print their own link.
for logger_name in ("mlflow.store.db.utils", "alembic.runtime.migration"):
    logging.getLogger(logger_name).setLevel(logging.WARNING)  # They print many lines when a database is created.

EXPERIMENTS = ("pipeline", "train", "ladder", "tune", "learn", "doctor")
"""Names of this project's MLflow experiments, one for each kind of command."""

PARENT_TAG, SOURCE_TAG = "mlflow.parentRunId", "mlflow.source.name"
"""MLflow's tags of the parent of a run and of the program that started it."""

ARTIFACTS_FOLDER = "mlartifacts"
"""Name of the folder beside a SQLite store that has the artifacts of its runs."""


def store_uri(tracking_uri: str | None = None) -> str:
    """Return the URI of the store: the flag, else MLFLOW_TRACKING_URI, else ``mlflow.db`` in the current folder.

    Paths become absolute. Raises ``UserError`` if the URI contains a password, because results, links and the process
    list would reveal it.
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
    """Open the store; create its database if it does not exist, which takes seconds."""
    store = store_uri(tracking_uri)
    file = sqlite_file(store)
    if file and file.is_dir():
        raise UserError(f"The MLflow store {store} is a folder. Use a file in it, such as sqlite:///mlflow.db.")
    if file and file.exists() and not all(os.access(path, os.W_OK) for path in (file, file.parent)):
        # MLflow would open the store, and fail with ninety lines when it creates the first run.
        raise UserError(
            f"The MLflow store {store} is not writable. Allow writing to the file and its folder, or use another store "
            "with --tracking-uri."
        )
    try:
        if file and not file.exists():
            _create_database(file)
        _open(store)
    except (
        Exception
    ) as failure:  # The libraries below MLflow raise their own classes, for example for a missing driver.
        raise _store_error(store, failure) from failure


def _create_database(file: Path) -> None:
    """Create the database of a store atomically, because MLflow cannot repair an incomplete one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=f".{file.name}-") as temporary_dir:
        _open(sqlite_store(Path(temporary_dir) / file.name))
        # Linking fails if another command was faster, or on a disk without links, where MLflow then creates the file.
        with suppress(OSError):
            os.link(f"{temporary_dir}/{file.name}", file)


def _open(store: str) -> None:
    """Open a store in MLflow, which creates the database at the first call."""
    MlflowClient(store).get_experiment_by_name("Default")
    if store.startswith(SQLITE_PREFIX) and "%" in store:
        with suppress(OSError):  # MLflow also creates a folder with the percent-encoded name, which is removed here.
            os.removedirs(Path(store.removeprefix(SQLITE_PREFIX)).parent)


def create_run(
    experiment: str,
    name: str,
    *,
    tracking_uri: str | None = None,
    run_dir: str = "",
    tags: Mapping[str, str] | None = None,
    keep: Callable[[RunRef], None] = lambda run_ref: None,
) -> RunRef:
    """Create a run, and the store and experiment if they do not exist.

    Raises ``UserError`` if the store cannot be reached, so that the user learns it before hours of work.

    Args:
        experiment: name of the experiment, one of :data:`EXPERIMENTS`.
        name: name of the run.
        tracking_uri: URI of the store; by default as in :func:`store_uri`.
        run_dir: address of the folder that this command has locked (:meth:`StorageDir.lock`). The next command closes
            the run if it can lock the folder, because this process was killed then.
        tags: tags of the run.
        keep: saves the reference for a command that resumes the run; interrupts are delayed until it has returned.
    """
    store = store_uri(tracking_uri)
    with interrupts.delayed():
        open_store(tracking_uri)
        try:
            client = MlflowClient(store)
            experiments = _find_experiments(client)
            experiment_id = _experiment_id(client, store, experiment, experiments.get(experiment))
            run_ref = _start_run(store, experiment_id, run_dir, name, {SOURCE_TAG: experiment, **(tags or {})})
        except MlflowException as failure:
            raise _store_error(store, failure) from failure
        keep(run_ref)
    existing = experiments.get(experiment)
    saved_views.save_views(client, experiment, run_ref, existing.tags if existing else {})
    orphaned_runs.close_orphaned_runs(client, [each.experiment_id for each in experiments.values()])
    return run_ref


@interrupts.delayed()
def create_child_run(parent: RunRef, experiment: str, name: str, tags: Mapping[str, str]) -> RunRef:
    """Create a child of the run ``parent`` in the same ``experiment``, with the folder of the parent.

    Raises ``UserError`` if the store cannot be reached.
    """
    tags = {SOURCE_TAG: experiment, PARENT_TAG: parent.run_id, **tags}
    try:
        return _start_run(parent.store, parent.experiment_id, parent.run_dir, name, tags)
    except MlflowException as failure:
        raise _store_error(parent.store, failure) from failure


def _start_run(store: str, experiment_id: str, run_dir: str, name: str, tags: Mapping[str, str]) -> RunRef:
    system_tags = {"mlflow.user": find_user_name(), "mlflow.source.type": "LOCAL"}
    system_tags |= orphaned_runs.open_run_tags(run_dir) if run_dir else {}
    run = MlflowClient(store).create_run(experiment_id, run_name=name, tags=system_tags | dict(tags))
    orphaned_runs.open_run_dirs[run.info.run_id] = run_dir
    return RunRef(store, experiment_id, run.info.run_id, run_dir)


def _restore_command(store: str, command: str) -> str:
    return f"'mlflow {command}' with MLFLOW_TRACKING_URI={store}"


def _store_error(store: str, failure: Exception) -> UserError:
    return UserError(
        f"The MLflow store {store} cannot be used: {first_line(failure).rstrip('.')}. Start its server, or use another "
        "store with --tracking-uri, for example sqlite:///mlflow.db."
    )


@interrupts.delayed()
def reopen_run(run_ref: RunRef) -> None:
    """Set an ended run to RUNNING again. Raises ``UserError`` if the run is not in its store, or was deleted."""
    open_store(run_ref.store)
    try:
        client = MlflowClient(run_ref.store)
        if is_deleted(client, run_ref.run_id):
            command = _restore_command(run_ref.store, f"runs restore --run-id {run_ref.run_id}")
            raise UserError(
                f"The MLflow run {run_ref.run_id} in {run_ref.store} was deleted. Restore it, and its experiment if "
                f"that was deleted, too ({command}), or start a new MLflow run with --tracking-uri {run_ref.store}."
            )
        client.update_run(run_ref.run_id, status="RUNNING")
        orphaned_runs.open_run_dirs[run_ref.run_id] = run_ref.run_dir
        if run_ref.run_dir:
            client.log_batch(
                run_ref.run_id, tags=[RunTag(*tag) for tag in orphaned_runs.open_run_tags(run_ref.run_dir).items()]
            )
        orphaned_runs.close_orphaned_runs(
            client, [each.experiment_id for each in _find_experiments(client).values()], run_ref
        )
    except MlflowException as failure:
        raise UserError(
            f"The MLflow run {run_ref.run_id} in {run_ref.store} cannot be resumed: {first_line(failure).rstrip('.')}. "
            "Restore its store, or use another store with --tracking-uri."
        ) from failure


@interrupts.delayed()
def read_logged(run_ref: RunRef) -> Logged:
    """Read which params, steps and tags the run already has, so that resuming it does not send them again."""
    try:
        client = MlflowClient(run_ref.store)
        data = client.get_run(run_ref.run_id).data
        histories = {name: client.get_metric_history(run_ref.run_id, name) for name in data.metrics}
    except MlflowException as failure:
        raise UserError(
            f"The MLflow store {run_ref.store} does not respond: {first_line(failure).rstrip('.')}. Start its server, "
            "or use another store with --tracking-uri."
        ) from failure
    steps = {name: max(point.step for point in points) for name, points in histories.items()}
    return Logged(set(data.params), steps, dict(data.tags))


@interrupts.delayed()
def run_exists(run_ref: RunRef) -> bool:
    """Return whether the run is in its store and was not deleted."""
    try:
        return not is_deleted(MlflowClient(run_ref.store), run_ref.run_id)
    except MlflowException as failure:
        if failure.error_code == ErrorCode.Name(RESOURCE_DOES_NOT_EXIST):
            return False
        raise _store_error(run_ref.store, failure) from failure


@interrupts.delayed()
def find_children(parent: RunRef, tag: str) -> dict[str, tuple[RunRef, bool]]:
    """Find the children of ``parent`` that have ``tag`` and were not deleted.

    Returns:
        (child run, whether it has all entries and was not killed) by the value of the tag.
    """
    try:
        runs = MlflowClient(parent.store).search_runs(
            [parent.experiment_id], f"tags.`{PARENT_TAG}` = '{parent.run_id}'",
            max_results=SEARCH_MAX_RESULTS_THRESHOLD,
        )  # fmt: skip
    except MlflowException as failure:
        raise _store_error(parent.store, failure) from failure
    return {
        run.data.tags[tag]: (
            replace(parent, run_id=run.info.run_id),
            run.data.tags.get(orphaned_runs.FULLY_LOGGED) == "true" and run.info.status != "KILLED",
        )
        for run in runs
        if tag in run.data.tags
    }


@interrupts.delayed()
def add_to_description(run_ref: RunRef, paragraph: str, tags: Mapping[str, str]) -> None:
    """Add a ``paragraph`` below the first one of a run's description, and set ``tags``; the run may have ended.

    Never raises, because the paragraph is a convenience, and the store may be unavailable.
    """
    with suppress(Exception):
        client = MlflowClient(run_ref.store)
        description = client.get_run(run_ref.run_id).data.tags.get(DESCRIPTION_TAG, "")
        first_paragraph, separator, remainder = description.partition("\n\n")
        client.set_tag(run_ref.run_id, DESCRIPTION_TAG, f"{first_paragraph}\n\n{paragraph}{separator}{remainder}")
        for name, value in tags.items():
            client.set_tag(run_ref.run_id, name, value)


def _find_experiments(client: MlflowClient) -> dict[str, Experiment]:
    return {experiment.name: experiment for experiment in client.search_experiments() if experiment.name in EXPERIMENTS}


def _experiment_id(client: MlflowClient, store: str, name: str, experiment: Experiment | None) -> str:
    """Return the id of ``experiment``, or create an experiment ``name`` if that is None.

    A SQLite store has the artifacts in a folder beside the database. MLflow stores the absolute path of that folder, so
    a copied or moved store would write to the original folder; this raises ``UserError``.
    """
    artifacts = None
    if file := sqlite_file(store):
        artifacts = (file.parent / ARTIFACTS_FOLDER / name).as_uri()
    if not experiment:
        try:
            return client.create_experiment(name, artifact_location=artifacts)
        except MlflowException:  # Another command may have created it meanwhile, or it was deleted.
            experiment = client.get_experiment_by_name(name)
            if experiment is None:
                raise
    if experiment.lifecycle_stage == LifecycleStage.DELETED:
        command = _restore_command(store, f"experiments restore --experiment-id {experiment.experiment_id}")
        raise UserError(
            f"The experiment {name} of the MLflow store {store} was deleted. Restore it ({command}), or use another "
            "store with --tracking-uri."
        )
    location = experiment.artifact_location
    is_standard_location = location.startswith("file:") and location.endswith(f"/{ARTIFACTS_FOLDER}/{name}")
    if file and location != artifacts and is_standard_location:
        original = Path(unquote(urlsplit(location).path))
        if original.resolve() != file.parent / ARTIFACTS_FOLDER / name:
            raise UserError(
                f"The MLflow store {store} was copied or moved from {original.parents[1]} and would still write "
                "artifacts there. Move it back, or use another store with --tracking-uri."
            )
    return experiment.experiment_id
