"""Write runs to MLflow without ever slowing or ending the work that they record.

In: metrics, params, tags and files, from the driver; workers do not use MLflow, because a new SQLite store does not
survive being created by several processes at once. Out: an MLflow run. Writes pass through a queue to a thread that
batches them (a call costs microseconds; a single ``log_metric`` costs 2 ms). While the store does not answer, entries
wait in memory. What it lacks when the process ends is sent again from the run's folder; see
``infra.tracking.orphaned_runs``.
"""

import json
import queue
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from mlflow.tracking import MlflowClient

from infra.cli.console import errors
from infra.errors import first_line
from infra.tracking import orphaned_runs
from infra.tracking.run_ref import RunRef
from infra.tracking.send import METRICS_PER_BATCH, Entry, send

FLUSH_SECONDS = 60.0
PARAM_CHARACTERS = 6000
NOTE = "mlflow.note.content"
"""The tag that MLflow shows as a run's description."""


@dataclass(frozen=True)
class TrackerTiming:
    """Seconds of a tracker's writer."""

    batch_seconds: float = 1.0
    """Time in which entries are collected before they are sent together."""
    retry_seconds: float = 30.0
    """Interval between attempts to reach a store that does not respond."""
    end_timeout_seconds: float = 15.0
    """Time limit for a store to respond at the end of a run; an interrupted command ends within 30 seconds."""


class Tracker:
    """Writes to one run. A context manager: when its block ends, it delivers what is queued and closes the run.

    The run becomes KILLED after Ctrl-C, FAILED after another exception, with the tag ``reason``, and otherwise
    :attr:`status`, unless the block has closed it with :meth:`finish`. Methods return at once. They may be called from
    any thread, and never raise because of the store.
    """

    def __init__(self, run_ref: RunRef, timing: TrackerTiming = TrackerTiming()) -> None:
        self.run_ref = run_ref
        self.timing = timing
        self.status = "FINISHED"
        """The run's status after a block that ends without an exception: FINISHED, FAILED or KILLED."""
        self._queue: queue.SimpleQueue[Entry | threading.Event] = queue.SimpleQueue()
        self._unsent: list[Entry] = []
        self._away = False
        """Whether the store did not answer last time."""
        self._retry_at = 0.0
        self._finished = self._hurried = False
        self._client: MlflowClient | None = None
        threading.Thread(target=self._write, name="tracking", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, failure: BaseException | None, *_: object) -> None:
        if self._finished:
            return
        interrupted = kind is not None and issubclass(kind, KeyboardInterrupt)
        if failure and not interrupted:
            self.set_tags({"reason": first_line(failure)})
        self.finish("KILLED" if interrupted else "FAILED" if kind else self.status)

    def log_metrics(self, values: Mapping[str, float | int | None], step: int = 0) -> None:
        """Record numbers at ``step``; names are grouped by a prefix, and see :mod:`infra.tracking.names`."""
        now = int(time.time() * 1000)
        for name, value in values.items():
            if value is not None:
                self._queue.put({"kind": "metric", "key": name, "value": float(value), "step": step, "time": now})

    def log_params(self, values: Mapping[str, Any]) -> None:
        """Record settings; they cannot be changed later."""
        for name, value in values.items():
            self._queue.put({"kind": "param", "key": name, "value": str(value)[:PARAM_CHARACTERS]})

    def set_tags(self, values: Mapping[str, Any]) -> None:
        """Record labels; a later value replaces an earlier one."""
        for name, value in values.items():
            self._queue.put({"kind": "tag", "key": name, "value": str(value)})

    def set_description(self, markdown: str) -> None:
        """Set the description at the top of the run's page."""
        self.set_tags({NOTE: markdown})

    def log_dataset(self, name: str, fingerprint: str, source: str, profile: Mapping[str, Any], context: str) -> None:
        """Record a data set; ``context`` is its role (``training``, ``output``)."""
        self._queue.put(
            {
                "kind": "data", "name": name, "digest": fingerprint[:36], "source": source,
                "profile": dict(profile), "context": context,
            }
        )  # fmt: skip

    def log_text(self, content: str, name: str) -> None:
        self._queue.put({"kind": "text", "content": content, "name": name})

    def log_json(self, value: Any, name: str) -> None:
        self.log_text(json.dumps(value, indent=2, sort_keys=True, default=str), name)

    def log_file(self, path: Path, folder: str | None = None) -> None:
        """Upload a local file, by reference: it must still exist when the queue reaches it."""
        self._queue.put({"kind": "file", "path": str(path.resolve()), "folder": folder})

    def flush(self, seconds: float = FLUSH_SECONDS) -> bool:
        """Wait until everything queued so far is in the store; False if that takes too long or it does not answer."""
        done = threading.Event()
        self._queue.put(done)
        return done.wait(seconds) and not self._away

    def finish(self, status: str = "FINISHED", *, ended: float | None = None, wait: bool = True) -> None:
        """Close the run as FINISHED, FAILED or KILLED once everything is delivered, and wait for that.

        It is its last entry, and the time when it ``ended`` now or another.
        """
        self._finished = True
        self._hurried = status == "KILLED"
        self._queue.put({"kind": "finish", "status": status, "time": int((ended or time.time()) * 1000)})
        if wait:
            self.wait_until_sent()

    def wait_until_sent(self) -> bool:
        """Wait until everything is in the store; False where that is given up.

        A store that does not respond is given up after ``end_timeout_seconds``. So is a slow one at the end of a KILLED
        run: an interrupt at an unlucky moment leaves a lock taken (that of Python's logging), for which the writer
        would wait forever.
        """
        began = time.monotonic()
        while not (delivered := self.flush(self.timing.end_timeout_seconds)):
            if time.monotonic() - began >= self.timing.end_timeout_seconds and (self._away or self._hurried):
                errors.print(
                    f"MLflow ({self.run_ref.store}) does not answer: {len(self._unsent) + self._queue.qsize()} "
                    "entries of "
                    f"this run are missing there; the next command, or --resume, sends them from {self.run_ref.home}."
                )
                break
            if self._away:
                time.sleep(1.0)
            else:
                errors.print(f"MLflow ({self.run_ref.store}) is slow; still sending. Ctrl-C exits without the rest.")
        orphaned_runs.open_run_dirs.pop(self.run_ref.run_id, None)
        return delivered

    def _write(self) -> None:
        """Send what is queued in batches; again what the store has not taken, when that is due or somebody waits."""
        while True:
            waiting = self._take()
            if waiting or time.monotonic() >= self._retry_at:
                self._deliver()
            for event in waiting:
                event.set()

    def _take(self) -> list[threading.Event]:
        """Move what is queued within ``batch_seconds`` to what is unsent; returns who waits for it."""
        patience = max(0.0, self._retry_at - time.monotonic()) if self._unsent else None
        end = 0.0
        for _ in range(METRICS_PER_BATCH):
            try:
                entry = self._queue.get(timeout=patience)
            except queue.Empty:
                break
            if isinstance(entry, threading.Event):
                return [entry]
            self._unsent.append(entry)
            end = end or time.monotonic() + self.timing.batch_seconds
            patience = max(0.0, end - time.monotonic())
        return []

    def _deliver(self) -> None:
        try:
            self._client = self._client or MlflowClient(self.run_ref.store)
            while self._unsent:
                send(self._client, self.run_ref.run_id, self._unsent[:METRICS_PER_BATCH])
                del self._unsent[:METRICS_PER_BATCH]
            self._away = False
        except Exception as failure:  # noqa: BLE001 nothing that the client raises may disturb the work
            if not self._away:
                errors.print(f"MLflow does not answer ({first_line(failure)}); its entries wait, and are sent again.")
            self._away = True
            self._retry_at = time.monotonic() + self.timing.retry_seconds
