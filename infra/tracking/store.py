"""The MLflow store: open it, create experiments and runs in it, and look them up."""

import logging
import os
import tempfile
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from mlflow.entities import LifecycleStage
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST, ErrorCode
from mlflow.store.tracking import SEARCH_MAX_RESULTS_THRESHOLD
from mlflow.tracking import MlflowClient

from infra.command import uninterrupted
from infra.console import errors
from infra.credentials import has_secret
from infra.errors import UserError, first_line
from infra.provenance import user
from infra.tracking import open_runs, saved_views
from infra.tracking.journal import deliver_journal, deliver_journals
from infra.tracking.key import SQLITE, RunKey
from infra.tracking.open_runs import note_of
from infra.tracking.relocation import FILES, relocate
from infra.tracking.tracker import JOURNAL, NOTE

os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # commands print one link, at their end
for verbose in ("mlflow.store.db.utils", "alembic.runtime.migration"):
    logging.getLogger(verbose).setLevel(logging.WARNING)  # they print a page about new tables on first use


def store_uri(tracking_uri: str | None = None) -> str:
    """The store to use: the flag, else ``MLFLOW_TRACKING_URI``, else ``mlflow.db`` in this folder, as absolute path.

    Raises ``UserError`` when it contains a password, which would be kept with the results, printed with every link,
    and readable in the list of processes.
    """
    uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db"
    if has_secret(uri):
        raise UserError(
            f"the address of the MLflow store at {urlsplit(uri).hostname} contains a password: remove it, and set "
            "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD (PGUSER and PGPASSWORD for PostgreSQL)."
        )
    if uri.startswith(SQLITE):
        return f"{SQLITE}{Path(uri.removeprefix(SQLITE)).resolve()}"
    return uri


@uninterrupted()
def open_store(tracking_uri: str | None = None) -> None:
    """Open the store, and create its database if it is new, which takes seconds.

    Raises ``UserError`` when the store cannot be reached.
    """
    store = store_uri(tracking_uri)
    file = Path(store.removeprefix(SQLITE)) if store.startswith(SQLITE) else None
    if file and file.is_dir():
        raise UserError(f"the MLflow store {store} is a folder: name a file in it, such as sqlite:///mlflow.db.")
    if file and file.exists() and not all(os.access(place, os.W_OK) for place in (file, file.parent)):
        # MLflow opens it, and fails with ninety lines when the first run is created.
        raise UserError(
            f"the MLflow store {store} is not writable: allow writing to the file and its folder, or give another "
            "with --tracking-uri."
        )
    try:
        if file and not file.exists():
            _create_database(file)
        MlflowClient(store).get_experiment_by_name("Default")
        moved_from = relocate(file) if file else []
    except UserError:
        raise
    except Exception as failure:  # a damaged database, a missing driver: each library raises classes of its own
        raise _unusable(store, failure) from failure
    for place in moved_from:
        errors.print(
            f"The MLflow store {store} was copied or moved here from {place}: its runs were kept, and from now on "
            f"their files are read and written next to it, not in {place / FILES}."
        )


def _create_database(file: Path) -> None:
    """Create the database of a store, whole or not at all: MLflow cannot repair one that is incomplete."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=f".{file.name}-") as place:
        MlflowClient(f"{SQLITE}{place}/{file.name}").get_experiment_by_name("Default")  # the first call creates it
        with suppress(OSError):  # another command was first; or there are no links here and MLflow creates it in place
            os.link(f"{place}/{file.name}", file)


def create_run(
    experiment: str,
    name: str,
    *,
    tracking_uri: str | None = None,
    parent: RunKey | None = None,
    tags: Mapping[str, str] | None = None,
    keep: Callable[[RunKey], None] | None = None,
) -> RunKey:
    """Create a run (and the store and experiment when they are new), pass its key to ``keep``, and return it.

    ``keep`` writes the key to disk for a command that continues the run. Ctrl-C and SIGTERM are delayed until it has,
    and a note on disk lets a later command close the run if the process is killed: no run stays RUNNING unnoticed.

    Raises ``UserError`` when the store cannot be reached: nothing has been computed yet, so the user is told now
    rather than after hours.
    """
    store = parent.store if parent else store_uri(tracking_uri)
    journal = Path(parent.journal) if parent else Path(JOURNAL).resolve()
    note = journal / f"{uuid.uuid4().hex}{open_runs.CREATING}"
    labels = {
        "mlflow.user": user(), "mlflow.source.type": "LOCAL", "mlflow.source.name": experiment,
        open_runs.TAG: note.stem,
    } | dict(tags or {})  # fmt: skip
    with uninterrupted():
        if parent:
            labels["mlflow.parentRunId"] = parent.run_id
        else:
            open_store(tracking_uri)
        try:
            client = MlflowClient(store)
            experiment_id = parent.experiment_id if parent else _experiment(client, store, experiment)
            open_runs.announce(note, client, experiment_id)
            run = client.create_run(experiment_id, run_name=name, tags=labels)
        except MlflowException as failure:
            raise _unusable(store, failure) from failure
        key = RunKey(store, experiment_id, run.info.run_id, str(journal))
        if keep:
            keep(key)
        open_runs.rename(note, key.run_id)
    if not parent:
        saved_views.offer(client, experiment, experiment_id, key.run_id)
        deliver_journals(client, journal)
        open_runs.close_abandoned(journal, client)
    return key


def _unusable(store: str, failure: Exception) -> UserError:
    return UserError(
        f"the MLflow store {store} cannot be used: {first_line(failure)} "
        "Start its server, or give another store with --tracking-uri (for example sqlite:///mlflow.db)."
    )


@uninterrupted()
def reopen_run(key: RunKey) -> None:
    """Set a run that has ended to RUNNING again. Raises ``UserError`` when its store does not have it."""
    open_store(key.store)
    try:
        client = MlflowClient(key.store)
        open_runs.close_abandoned(Path(key.journal), client)
        open_runs.announce(note_of(key), client, key.experiment_id)
        if client.get_run(key.run_id).info.lifecycle_stage == LifecycleStage.DELETED:
            client.restore_run(key.run_id)  # of a process that was killed just after it had saved the key
        client.update_run(key.run_id, status="RUNNING")
    except MlflowException as failure:
        raise UserError(
            f"the MLflow run {key.run_id} in {key.store} cannot be continued: {first_line(failure)} "
            "Restore its store, or give another with --tracking-uri."
        ) from failure


@uninterrupted()
def last_steps(key: RunKey) -> dict[str, int]:
    """The last step of every metric of the run, up to which a continued run need not send them again.

    Entries that an earlier process left in its journal are delivered first. Raises ``UserError``.
    """
    try:
        client = MlflowClient(key.store)
        deliver_journal(client, Path(key.journal) / f"{key.run_id}.jsonl")
        names = client.get_run(key.run_id).data.metrics
        return {name: max(m.step for m in client.get_metric_history(key.run_id, name)) for name in names}
    except MlflowException as failure:
        raise UserError(f"the MLflow store {key.store} does not answer: {first_line(failure)}") from failure


@uninterrupted()
def has_run(key: RunKey) -> bool:
    """Whether the run is in its store. Raises ``UserError`` when the store cannot be used."""
    try:
        MlflowClient(key.store).get_run(key.run_id)
    except MlflowException as failure:
        if failure.error_code == ErrorCode.Name(RESOURCE_DOES_NOT_EXIST):
            return False
        raise _unusable(key.store, failure) from failure
    return True


@uninterrupted()
def find_runs(key: RunKey, tag: str, value: str) -> list[str]:
    """Ids of the children of ``key`` (but deleted ones) with this ``value`` of ``tag``, oldest first.

    Raises ``UserError`` when the store cannot be used.
    """
    try:
        found = MlflowClient(key.store).search_runs(
            [key.experiment_id],
            f"tags.`mlflow.parentRunId` = '{key.run_id}' and tags.`{tag}` = '{value}'",
            max_results=SEARCH_MAX_RESULTS_THRESHOLD,
            order_by=["attributes.start_time ASC"],
        )
    except MlflowException as failure:
        raise _unusable(key.store, failure) from failure
    return [run.info.run_id for run in found]


@uninterrupted()
def add_to_page(key: RunKey, paragraph: str, tags: Mapping[str, str]) -> None:
    """Add a ``paragraph`` below the first one of a run's description, and tags; the run may have ended.

    Never raises: a link is a convenience, and its store may be away.
    """
    with suppress(Exception):
        client = MlflowClient(key.store)
        first, mark, rest = client.get_run(key.run_id).data.tags.get(NOTE, "").partition("\n\n")
        client.set_tag(key.run_id, NOTE, f"{first}\n\n{paragraph}{mark}{rest}")
        for name, value in tags.items():
            client.set_tag(key.run_id, name, value)


def _experiment(client: MlflowClient, store: str, name: str) -> str:
    """The experiment's id. A new one in SQLite keeps its files next to the database, by absolute path."""
    found = client.get_experiment_by_name(name)
    if found:
        return found.experiment_id
    files = None
    if store.startswith(SQLITE):
        files = (Path(store.removeprefix(SQLITE)).parent / FILES / name).as_uri()
    try:
        return client.create_experiment(name, artifact_location=files)
    except MlflowException:  # another command created it between the two calls
        found = client.get_experiment_by_name(name)
        if found is None:
            raise
        return found.experiment_id
