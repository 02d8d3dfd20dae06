"""Runs in MLflow that never slow or kill the work they record.

In: metrics, params, tags, files, from the driver. Out: an MLflow run. A fresh SQLite store does not survive
several processes creating it at once, so workers have none to do with it. Writes pass through a queue to
one thread that batches them (a call costs microseconds; a single ``log_metric`` costs 2 ms). When the
store does not answer, entries go to a journal on disk, are sent as soon as it answers again or when
any later command opens the store, and the run says so in the tag ``tracking.delivered_late``.
"""

import json
import logging
import os
import queue
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "15")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

from mlflow.entities import Dataset, DatasetInput, InputTag, LifecycleStage, Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INTERNAL_ERROR, RESOURCE_DOES_NOT_EXIST, TEMPORARILY_UNAVAILABLE, ErrorCode
from mlflow.store.db.utils import _initialize_tables, create_sqlalchemy_engine
from mlflow.store.tracking import SEARCH_MAX_RESULTS_THRESHOLD
from mlflow.tracking import MlflowClient

from infra import open_runs
from infra.command import UserError, errors, first_line, uninterrupted
from infra.provenance import user
from infra.relocation import FILES, relocate
from infra.run_key import SQLITE, RunKey

for chatter in ("mlflow.store.db.utils", "alembic.runtime.migration"):
    logging.getLogger(chatter).setLevel(logging.WARNING)  # a page about table creation on first use

BATCH_SECONDS = 1.0
RETRY_SECONDS = 30.0
FLUSH_SECONDS = 60.0
HURRY_SECONDS = 15.0
"""How long a command that was interrupted waits for the store: it promises to be gone within 30 seconds."""
METRICS_A_BATCH = 500
ITEMS_A_BATCH = 90  # MLflow refuses more than 1,000 metrics, 100 params or 100 tags in one call
PARAM_CHARACTERS = 6000
JOURNAL = "mlflow-journal"

Entry = dict[str, Any]


def store_uri(tracking_uri: str | None = None) -> str:
    """The store to use: the flag, else ``MLFLOW_TRACKING_URI``, else ``mlflow.db`` in this folder, made absolute."""
    uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db"
    if uri.startswith(SQLITE):
        return f"{SQLITE}{Path(uri.removeprefix(SQLITE)).resolve()}"
    return uri


@uninterrupted()
def open_store(tracking_uri: str | None = None) -> None:
    """Open the store and create its database when it is new: what takes seconds of the first :func:`create_run`.

    Raises ``UserError`` when the store cannot be reached.
    """
    store = store_uri(tracking_uri)
    file = Path(store.removeprefix(SQLITE)) if store.startswith(SQLITE) else None
    if file and file.is_dir():
        raise UserError(f"the MLflow store {store} is a folder: name a file in it, such as sqlite:///mlflow.db.")
    if file and file.exists() and not all(os.access(place, os.W_OK) for place in (file, file.parent)):
        # MLflow opens it, and answers the first run to be noted with ninety lines.
        raise UserError(
            f"the MLflow store {store} may not be written to: allow it for the file and its folder, or give another "
            "with --tracking-uri."
        )
    try:
        if file and not file.exists():
            _create_database(file)
        MlflowClient(store).get_experiment_by_name("Default")
        moved_from = relocate(file) if file else []
    except UserError:
        raise
    except Exception as failure:  # a damaged database, a missing driver: each library has a class of its own
        raise _unusable(store, failure) from failure
    for place in moved_from:
        errors.print(
            f"The MLflow store {store} was copied or moved here from {place}: its runs came along, and their files are "
            f"from now on looked for and written beside it, not in {place / FILES}."
        )


def _create_database(file: Path) -> None:
    """Create the database of a store, whole or not at all: of one that is cut short, MLflow can make nothing more."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=f".{file.name}-") as place:
        engine = create_sqlalchemy_engine(f"sqlite:///{place}/{file.name}")
        _initialize_tables(engine)
        engine.dispose()
        with suppress(OSError):  # another command was first; or there are no links here, and MLflow makes it in place
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
    """Create a run (and the store and experiment when they are new), hand its key to ``keep``, and return it.

    ``keep`` writes the key to disk for a command that continues the run. Ctrl-C and SIGTERM wait until it has, and
    a note on disk says what became of the run where the process is killed: there is never a run RUNNING that
    nobody knows of.

    Raises ``UserError`` when the store cannot be reached: nothing has been computed yet, so the user
    is told now rather than after hours.
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
        deliver_journals(client, journal)
        open_runs.close_abandoned(journal, client)
    return key


def _unusable(store: str, failure: Exception) -> UserError:
    return UserError(
        f"the MLflow store {store} cannot be used: {first_line(failure)} "
        "Start its server, or give another with --tracking-uri (for example sqlite:///mlflow.db)."
    )


@uninterrupted()
def reopen_run(key: RunKey) -> None:
    """Let a run that ended go on. Raises ``UserError`` when its store does not have it."""
    open_store(key.store)
    try:
        client = MlflowClient(key.store)
        open_runs.close_abandoned(Path(key.journal), client)
        open_runs.announce(_note(key), client, key.experiment_id)
        if client.get_run(key.run_id).info.lifecycle_stage == LifecycleStage.DELETED:
            client.restore_run(key.run_id)  # of a process that was killed just when it had kept the key
        client.update_run(key.run_id, status="RUNNING")
    except MlflowException as failure:
        raise UserError(
            f"the MLflow run {key.run_id} in {key.store} cannot be continued: {first_line(failure)} "
            "Bring its store back, or give another with --tracking-uri."
        ) from failure


def _note(key: RunKey) -> Path:
    """Where it is noted that the run is open."""
    return Path(key.journal) / f"{key.run_id}{open_runs.OPEN}"


@uninterrupted()
def last_steps(key: RunKey) -> dict[str, int]:
    """The last step of every metric of the run: what a continued run need not send again.

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
    """Whether the run is in the store. Raises ``UserError`` when that cannot be used."""
    try:
        MlflowClient(key.store).get_run(key.run_id)
    except MlflowException as failure:
        if failure.error_code == ErrorCode.Name(RESOURCE_DOES_NOT_EXIST):
            return False
        raise _unusable(key.store, failure) from failure
    return True


@uninterrupted()
def find_runs(key: RunKey, tag: str, value: str) -> list[str]:
    """Ids of the live children of ``key`` whose ``tag`` has ``value``, oldest first. Raises ``UserError``."""
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


def how_to_look(key: RunKey, *, children_by: str | None = None) -> str:
    """The lines to paste to see a run in MLflow; with ``children_by``, its children ranked by that metric.

    The link asks for MLflow's model-training pages, because its first page is the one for GenAI, and
    for a comparison it names the parent, because children are collapsed in the list.
    """
    embedded = key.store.startswith("sqlite:")
    server = "http://127.0.0.1:5000" if embedded else key.store.rstrip("/")
    page = f"{server}/#/experiments/{key.experiment_id}/runs"
    if children_by is None:
        link = f"{page}/{key.run_id}?workflowType=machine_learning"
    else:
        parent = quote(f"tags.`mlflow.parentRunId` = '{key.run_id}'")
        order = quote(f"metrics.`{children_by}`")
        link = (
            f"{page}?workflowType=machine_learning&searchFilter={parent}"
            f"&orderByKey={order}&orderByAsc=false&compareRunsMode=CHART"
        )
    if not embedded:
        return link
    local = Path(key.store.removeprefix(SQLITE))
    shown = local.name if local.parent == Path.cwd() else local
    return f"mlflow ui --backend-store-uri sqlite:///{shown}\n{link}"


def _experiment(client: MlflowClient, store: str, name: str) -> str:
    """The experiment's id; a new one on SQLite keeps its files beside the database, by absolute path."""
    found = client.get_experiment_by_name(name)
    if found:
        return found.experiment_id
    files = None
    if store.startswith(SQLITE):
        files = (Path(store.removeprefix(SQLITE)).parent / FILES / name).as_uri()
    try:
        return client.create_experiment(name, artifact_location=files)
    except MlflowException:  # another command made it between the two calls
        found = client.get_experiment_by_name(name)
        if found is None:
            raise
        return found.experiment_id


class Tracker:
    """The writer of one run. A context manager: as its block ends, it closes the run and delivers what is queued.

    The run becomes FINISHED, KILLED after Ctrl-C, or FAILED after another exception, unless the block closed it by
    :meth:`finish`. Methods return at once. They may be called from any thread, and never raise because of the store.
    """

    def __init__(self, key: RunKey) -> None:
        self.key = key
        self._queue: queue.SimpleQueue[Entry | threading.Event] = queue.SimpleQueue()
        self._journal = Path(key.journal) / f"{key.run_id}.jsonl"
        self._retry_at = 0.0
        self._finished = False
        self._hurried = False
        self._sending: list[Entry] = []
        self._client: MlflowClient | None = None
        self._thread = threading.Thread(target=self._write, name="tracking", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not self._finished:
            interrupted = kind is not None and issubclass(kind, KeyboardInterrupt)
            self.finish("KILLED" if interrupted else "FAILED" if kind else "FINISHED")
        elif not self._hurried:
            self._deliver_all()

    def metrics(self, values: Mapping[str, float | int | None], step: int = 0) -> None:
        """Record numbers at ``step``; names are grouped by a prefix, ``throughput/tokens_per_second``."""
        now = int(time.time() * 1000)
        for name, value in values.items():
            if value is not None:
                self._queue.put({"kind": "metric", "key": name, "value": float(value), "step": step, "time": now})

    def params(self, values: Mapping[str, Any]) -> None:
        """Record settings; they cannot be changed later."""
        for name, value in values.items():
            self._queue.put({"kind": "param", "key": name, "value": str(value)[:PARAM_CHARACTERS]})

    def tags(self, values: Mapping[str, Any]) -> None:
        """Record labels; the last value stays."""
        for name, value in values.items():
            self._queue.put({"kind": "tag", "key": name, "value": str(value)})

    def note(self, markdown: str) -> None:
        """Set the description that a person reads first on the run's page."""
        self.tags({"mlflow.note.content": markdown})

    def data(self, name: str, fingerprint: str, source: str, profile: Mapping[str, Any], context: str) -> None:
        """Record a data set input: ``context`` says what for (``training``, ``output``)."""
        self._queue.put(
            {
                "kind": "data", "name": name, "digest": fingerprint[:36], "source": source,
                "profile": dict(profile), "context": context,
            }
        )  # fmt: skip

    def text(self, content: str, name: str) -> None:
        """Store ``content`` as the artifact file ``name``."""
        self._queue.put({"kind": "text", "content": content, "name": name})

    def json(self, value: Any, name: str) -> None:
        """Store ``value`` as the JSON artifact ``name``."""
        self.text(json.dumps(value, indent=2, sort_keys=True, default=str), name)

    def file(self, path: Path, folder: str | None = None) -> None:
        """Upload a local file, by reference: it must still be there when the queue reaches it."""
        self._queue.put({"kind": "file", "path": str(path.resolve()), "folder": folder})

    def flush(self, seconds: float = FLUSH_SECONDS) -> bool:
        """Wait until everything queued so far is in the store or in the journal; False if that took too long."""
        done = threading.Event()
        self._queue.put(done)
        return done.wait(seconds)

    def finish(self, status: str = "FINISHED") -> None:
        """Deliver everything and close the run as FINISHED, FAILED or KILLED.

        What a KILLED one cannot deliver at once is kept for the next command: an interrupt at an unlucky moment
        leaves a lock taken (that of Python's logging), and the writer would wait for it for ever.
        """
        self._queue.put({"kind": "finish", "status": status, "time": int(time.time() * 1000)})
        self._finished = True
        self._hurried = status == "KILLED"
        if not self._hurried:
            self._deliver_all()
        elif not self.flush(HURRY_SECONDS):
            self._keep_rest()
        open_runs.release(_note(self.key))

    def _deliver_all(self) -> None:
        while not self.flush():
            errors.print(f"MLflow ({self.key.store}) is slow; still sending. Ctrl-C leaves without the rest.")

    def _write(self) -> None:
        while True:
            batch = [self._queue.get()]
            deadline = time.monotonic() + BATCH_SECONDS
            while not isinstance(batch[-1], threading.Event) and len(batch) < METRICS_A_BATCH:
                try:
                    batch.append(self._queue.get(timeout=max(0.0, deadline - time.monotonic())))
                except queue.Empty:
                    break
            self._sending = [entry for entry in batch if not isinstance(entry, threading.Event)]
            self._deliver(self._sending)
            self._sending = []
            for entry in batch:
                if isinstance(entry, threading.Event):
                    entry.set()

    def _deliver(self, entries: list[Entry]) -> None:
        """Send ``entries`` after anything journalled before them; on failure append them to the journal."""
        if self._journal.exists() and time.monotonic() < self._retry_at:
            return self._keep(entries)
        try:
            self._client = self._client or MlflowClient(self.key.store)
            deliver_journal(self._client, self._journal)
            send(self._client, self.key.run_id, entries)
        except Exception as failure:  # noqa: BLE001 whatever the client raises must not reach the work
            if not self._journal.exists():
                errors.print(f"MLflow does not answer ({first_line(failure)}); keeping its entries in {self._journal}")
            self._retry_at = time.monotonic() + RETRY_SECONDS
            self._keep(entries)

    def _keep_rest(self) -> None:
        """Journal what is queued, and what the writer holds: a store that takes an entry twice has it once."""
        rest: list[Entry | threading.Event] = [*self._sending]
        with suppress(queue.Empty):
            while True:
                rest.append(self._queue.get_nowait())
        self._keep([entry for entry in rest if not isinstance(entry, threading.Event)])
        errors.print(f"MLflow ({self.key.store}) does not answer; its entries are kept in {self._journal}")

    def _keep(self, entries: list[Entry]) -> None:
        try:
            self._journal.parent.mkdir(parents=True, exist_ok=True)
            with self._journal.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(entry | {"store": self.key.store}) + "\n" for entry in entries)
        except OSError as failure:
            errors.print(f"{len(entries)} MLflow entries are lost: {self._journal} cannot be written ({failure})")


def send(client: MlflowClient, run_id: str, entries: list[Entry]) -> None:
    """Write ``entries`` to a run in as few calls as MLflow's limits allow.

    Raises when the store does not answer; an entry that the store refuses for what it says is reported
    and dropped, since sending it again would fail for ever.
    """
    metrics = [Metric(e["key"], e["value"], e["time"], e["step"]) for e in entries if e["kind"] == "metric"]
    params = [Param(e["key"], e["value"]) for e in entries if e["kind"] == "param"]
    tags = [RunTag(e["key"], e["value"]) for e in entries if e["kind"] == "tag"]
    for first in range(0, len(metrics), METRICS_A_BATCH):
        _call(client.log_batch, run_id, metrics=metrics[first : first + METRICS_A_BATCH])
    for first in range(0, max(len(params), len(tags)), ITEMS_A_BATCH):
        part = slice(first, first + ITEMS_A_BATCH)
        _call(client.log_batch, run_id, params=params[part], tags=tags[part])
    for entry in entries:
        match entry["kind"]:
            case "data":
                source = json.dumps({"uri": entry["source"]})
                data = Dataset(entry["name"], entry["digest"], "local", source, profile=json.dumps(entry["profile"]))
                context = InputTag("mlflow.data.context", entry["context"])
                _call(client.log_inputs, run_id, [DatasetInput(data, [context])])
            case "text":
                _call(client.log_text, run_id, entry["content"], entry["name"])
            case "file":
                if Path(entry["path"]).exists():
                    _call(client.log_artifact, run_id, entry["path"], entry["folder"])
                else:
                    errors.print(f"{entry['path']} is gone and was not uploaded to MLflow")
            case "finish":
                _call(client.set_terminated, run_id, entry["status"], entry["time"])


def _call(method: Any, *arguments: Any, **named: Any) -> None:
    try:
        method(*arguments, **named)
    except MlflowException as failure:
        unreachable = (ErrorCode.Name(INTERNAL_ERROR), ErrorCode.Name(TEMPORARILY_UNAVAILABLE))
        if failure.error_code in unreachable:
            raise
        errors.print(f"MLflow refuses an entry: {first_line(failure)}")


@uninterrupted()
def deliver_journal(client: MlflowClient, journal: Path) -> None:
    """Send what ``journal`` kept for its run, then remove it. Raises when the store does not answer."""
    if not journal.exists():
        return
    entries = []
    for line in journal.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(json.JSONDecodeError):  # a kill may have cut it short
            entries.append(json.loads(line))
    send(client, journal.stem, entries)
    client.set_tag(journal.stem, "tracking.delivered_late", f"{len(entries)} entries")
    journal.unlink()


def deliver_journals(client: MlflowClient, folder: Path) -> None:
    """Send every journal in ``folder`` that belongs to the client's store; those that fail stay."""
    for journal in sorted(folder.glob("*.jsonl")) if folder.is_dir() else []:
        try:
            with journal.open(encoding="utf-8") as file:
                first = file.readline()
            if first.endswith("\n") and json.loads(first).get("store") == client.tracking_uri:
                deliver_journal(client, journal)
        except Exception as failure:  # noqa: BLE001 an old run's journal must not stop a new run
            errors.print(f"{journal} could not be delivered: {first_line(failure)}")
