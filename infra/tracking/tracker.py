"""Write runs to MLflow without ever slowing or ending the work that they record.

In: metrics, params, tags and files, from the driver; workers do not use MLflow, because a new SQLite store does not
survive being created by several processes at once. Out: an MLflow run. Writes pass through a queue to a thread that
batches them (a call costs microseconds; a single ``log_metric`` costs 2 ms). While the store does not answer, entries
go to a journal on disk. They are sent as soon as it answers again or a later command opens the store, and the tag
``tracking.delivered_late`` records that.
"""

import json
import queue
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from mlflow.tracking import MlflowClient

from infra.console import errors
from infra.errors import first_line
from infra.tracking import open_runs
from infra.tracking.journal import METRICS_PER_BATCH, Entry, deliver_journal, send
from infra.tracking.key import RunKey
from infra.tracking.open_runs import note_of

BATCH_SECONDS = 1.0
RETRY_SECONDS = 30.0
FLUSH_SECONDS = 60.0
HURRY_SECONDS = 15.0
"""How long a command that was interrupted waits for the store: it promises to exit within 30 seconds."""
PARAM_CHARACTERS = 6000
JOURNAL = "mlflow-journal"
NOTE = "mlflow.note.content"
"""The tag that MLflow shows as a run's description."""


class Tracker:
    """Writes to one run. A context manager: when its block ends, it delivers what is queued and closes the run.

    The run becomes KILLED after Ctrl-C, FAILED after another exception, with the tag ``reason``, and otherwise
    :attr:`status`, unless the block has closed it with :meth:`finish`. Methods return at once. They may be called from
    any thread, and never raise because of the store.
    """

    def __init__(self, key: RunKey) -> None:
        self.key = key
        self.status = "FINISHED"
        """The run's status after a block that ends without an exception: FINISHED, FAILED or KILLED."""
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

    def __exit__(self, kind: type[BaseException] | None, failure: BaseException | None, *_: object) -> None:
        if not self._finished:
            interrupted = kind is not None and issubclass(kind, KeyboardInterrupt)
            if failure and not interrupted:
                self.tags({"reason": first_line(failure)})
            self.finish("KILLED" if interrupted else "FAILED" if kind else self.status)
        elif not self._hurried:
            self._deliver_all()

    def metrics(self, values: Mapping[str, float | int | None], step: int = 0) -> None:
        """Record numbers at ``step``; names are grouped by a prefix, and see :mod:`infra.tracking.names`."""
        now = int(time.time() * 1000)
        for name, value in values.items():
            if value is not None:
                self._queue.put({"kind": "metric", "key": name, "value": float(value), "step": step, "time": now})

    def params(self, values: Mapping[str, Any]) -> None:
        """Record settings; they cannot be changed later."""
        for name, value in values.items():
            self._queue.put({"kind": "param", "key": name, "value": str(value)[:PARAM_CHARACTERS]})

    def tags(self, values: Mapping[str, Any]) -> None:
        """Record labels; a later value replaces an earlier one."""
        for name, value in values.items():
            self._queue.put({"kind": "tag", "key": name, "value": str(value)})

    def note(self, markdown: str) -> None:
        """Set the description at the top of the run's page."""
        self.tags({NOTE: markdown})

    def data(self, name: str, fingerprint: str, source: str, profile: Mapping[str, Any], context: str) -> None:
        """Record a data set; ``context`` is its role (``training``, ``output``)."""
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
        """Upload a local file, by reference: it must still exist when the queue reaches it."""
        self._queue.put({"kind": "file", "path": str(path.resolve()), "folder": folder})

    def flush(self, seconds: float = FLUSH_SECONDS) -> bool:
        """Wait until everything queued so far is in the store or in the journal; False if that takes too long."""
        done = threading.Event()
        self._queue.put(done)
        return done.wait(seconds)

    def finish(self, status: str = "FINISHED") -> None:
        """Deliver everything and close the run as FINISHED, FAILED or KILLED.

        What a KILLED run cannot deliver soon is kept for the next command: an interrupt at an unlucky moment leaves a
        lock taken (that of Python's logging), for which the writer would wait forever.
        """
        self._queue.put({"kind": "finish", "status": status, "time": int(time.time() * 1000)})
        self._finished = True
        self._hurried = status == "KILLED"
        if not self._hurried:
            self._deliver_all()
        elif not self.flush(HURRY_SECONDS):
            self._keep_rest()
        open_runs.release(note_of(self.key))

    def _deliver_all(self) -> None:
        while not self.flush():
            errors.print(f"MLflow ({self.key.store}) is slow; still sending. Ctrl-C exits without the rest.")

    def _write(self) -> None:
        while True:
            batch = [self._queue.get()]
            deadline = time.monotonic() + BATCH_SECONDS
            while not isinstance(batch[-1], threading.Event) and len(batch) < METRICS_PER_BATCH:
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
        """Send ``entries`` after anything that is in the journal; on failure append them to it."""
        if self._journal.exists() and time.monotonic() < self._retry_at:
            return self._keep(entries)
        try:
            self._client = self._client or MlflowClient(self.key.store)
            deliver_journal(self._client, self._journal)
            send(self._client, self.key.run_id, entries)
        except Exception as failure:  # noqa: BLE001 nothing that the client raises may disturb the work
            if not self._journal.exists():
                errors.print(f"MLflow does not answer ({first_line(failure)}); keeping its entries in {self._journal}")
            self._retry_at = time.monotonic() + RETRY_SECONDS
            self._keep(entries)

    def _keep_rest(self) -> None:
        """Journal what is queued and what the writer is sending: an entry that is delivered twice is stored once."""
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
