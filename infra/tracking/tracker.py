"""Write runs to MLflow without ever slowing or ending the work that they record.

In: metrics, params, tags and files, from the driver; workers do not use MLflow, because a new SQLite store does not
survive being created by several processes at once. Out: MLflow runs. Writes pass through a queue to the one thread of
this process that sends them in batches (a call costs microseconds; a single ``log_metric`` costs 2 ms). While a store
does not answer, its entries wait in memory. What it lacks when the process ends is sent again from the run's folder;
see ``infra.tracking.orphaned_runs``.
"""

import json
import queue
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
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


@dataclass(frozen=True)
class Logged:
    """What a run in MLflow has already."""

    params: set[str] = field(default_factory=set)
    steps: dict[str, int] = field(default_factory=dict)
    """The last step of each metric."""

    def last_step(self, prefix: str) -> int:
        """The last step of any metric whose name begins with ``prefix``; 0 without one."""
        return max((step for name, step in self.steps.items() if name.startswith(prefix)), default=0)


class Tracker:
    """Writes to one run. A context manager: when its block ends, it delivers what is queued and closes the run.

    The run becomes KILLED after Ctrl-C, FAILED after another exception, with the tag ``reason``, and otherwise
    :attr:`status`, unless the block has closed it with :meth:`finish`. Methods return at once. They may be called from
    any thread, and never raise because of the store. What the run has already is not sent again, so that a run can be
    filled from its folder at any time.
    """

    def __init__(self, run_ref: RunRef, logged: Logged | None = None, timing: TrackerTiming = TrackerTiming()) -> None:
        """Args:
        logged: What a run that is continued has; None for a new run.
        """
        self.run_ref = run_ref
        self.logged = logged or Logged()
        self.timing = timing
        self.status = "FINISHED"
        """The run's status after a block that ends without an exception: FINISHED, FAILED or KILLED."""
        self.is_given_up = False
        """Whether entries that the store has not taken are dropped, because the command no longer waits for it."""
        self._finished = self._hurried = False
        self._sender = _sender_of_process()

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
        """Record numbers at ``step``; names are grouped by a prefix, and see :mod:`infra.tracking.names`.

        Those at step 0 are results, which replace earlier ones.
        """
        now = int(time.time() * 1000)
        for name, value in values.items():
            if value is not None and (not step or step > self.logged.steps.get(name, 0)):
                self._put({"kind": "metric", "key": name, "value": float(value), "step": step, "time": now})
                self.logged.steps[name] = step

    def log_params(self, values: Mapping[str, Any]) -> None:
        """Record settings. They cannot be changed later, so those that the run has stay as they are."""
        for name, value in values.items():
            if name not in self.logged.params:
                self._put({"kind": "param", "key": name, "value": str(value)[:PARAM_CHARACTERS]})

    def set_tags(self, values: Mapping[str, Any]) -> None:
        """Record labels; a later value replaces an earlier one."""
        for name, value in values.items():
            self._put({"kind": "tag", "key": name, "value": str(value)})

    def set_description(self, markdown: str) -> None:
        """Set the description at the top of the run's page."""
        self.set_tags({NOTE: markdown})

    def log_dataset(self, name: str, fingerprint: str, source: str, profile: Mapping[str, Any], context: str) -> None:
        """Record a data set; ``context`` is its role (``training``, ``output``)."""
        self._put(
            {
                "kind": "data", "name": name, "digest": fingerprint[:36], "source": source,
                "profile": dict(profile), "context": context,
            }
        )  # fmt: skip

    def log_text(self, content: str, name: str) -> None:
        self._put({"kind": "text", "content": content, "name": name})

    def log_json(self, value: Any, name: str) -> None:
        self.log_text(json.dumps(value, indent=2, sort_keys=True, default=str), name)

    def log_file(self, path: Path, folder: str | None = None) -> None:
        """Upload a local file, by reference: it must still exist when the queue reaches it."""
        self._put({"kind": "file", "path": str(path.resolve()), "folder": folder})

    def flush(self, seconds: float = FLUSH_SECONDS) -> bool:
        """Wait until everything queued so far is in the store; False if that takes too long or it does not answer."""
        done = threading.Event()
        self._sender.queue.put(done)
        return done.wait(seconds) and not self._sender.lacks_entries_of(self)

    def finish(self, status: str = "FINISHED", *, ended: float | None = None, wait: bool = True) -> None:
        """Close the run as FINISHED, FAILED or KILLED once everything is delivered, and wait for that.

        It is its last entry, and the time when it ``ended`` now or another.
        """
        self._finished = True
        self._hurried = status == "KILLED"
        self._put({"kind": "finish", "status": status, "time": int((ended or time.time()) * 1000)})
        if wait:
            self.wait_until_sent()

    def wait_until_sent(self) -> bool:
        """Wait until everything is in the store; False where that is given up.

        A store that does not respond is given up after ``end_timeout_seconds``. So is a slow one at the end of a KILLED
        run: an interrupt at an unlucky moment leaves a lock taken (that of Python's logging), for which the
        sender would wait forever.
        """
        store, began = self.run_ref.store, time.monotonic()
        while not (is_sent := self.flush(self.timing.end_timeout_seconds)):
            is_away = self._sender.is_away(store)
            if time.monotonic() - began >= self.timing.end_timeout_seconds and (is_away or self._hurried):
                errors.print(
                    f"MLflow ({store}) does not respond: {self._sender.waiting_count} entries of this run are missing "
                    f"there; the next command, or --resume, sends them from {self.run_ref.run_dir}."
                )
                self.is_given_up = True
                break
            if is_away:
                time.sleep(1.0)
            else:
                errors.print(f"MLflow ({store}) is slow; still sending. Ctrl-C exits without the rest.")
        orphaned_runs.open_run_dirs.pop(self.run_ref.run_id, None)
        return is_sent

    def _put(self, entry: Entry) -> None:
        self._sender.queue.put((self, entry))


class _Sender:
    """The thread of this process that sends the entries of all its runs."""

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[tuple[Tracker, Entry] | threading.Event] = queue.SimpleQueue()
        self._unsent: dict[Tracker, list[Entry]] = {}
        self._clients: dict[str, MlflowClient] = {}
        self._retry_at: dict[str, float] = {}
        """When a store that did not answer last time is tried again."""
        self.thread = threading.Thread(target=self._run, name="tracking", daemon=True)
        self.thread.start()

    @property
    def waiting_count(self) -> int:
        """Number of entries that are not in their store."""
        return sum(map(len, [*self._unsent.values()])) + self.queue.qsize()

    def lacks_entries_of(self, tracker: Tracker) -> bool:
        return bool(self._unsent.get(tracker))

    def is_away(self, store: str) -> bool:
        return store in self._retry_at

    def _run(self) -> None:
        """Send what is queued in batches; again what a store has not taken, when that is due or somebody waits."""
        while True:
            waiting = self._take()
            for tracker in [*self._unsent]:
                if waiting or time.monotonic() >= self._retry_at.get(tracker.run_ref.store, 0.0):
                    self._send(tracker)
                if not self._unsent[tracker] or tracker.is_given_up:
                    del self._unsent[tracker]
            for event in waiting:
                event.set()

    def _take(self) -> list[threading.Event]:
        """Move what is queued within ``batch_seconds`` to what is unsent; returns who waits for it."""
        retries = [self._retry_at.get(tracker.run_ref.store, 0.0) for tracker in self._unsent]
        patience = max(0.0, min(retries) - time.monotonic()) if retries else None
        end = 0.0
        for _ in range(METRICS_PER_BATCH):
            try:
                entry = self.queue.get(timeout=patience)
            except queue.Empty:
                break
            if isinstance(entry, threading.Event):
                return [entry]
            self._unsent.setdefault(entry[0], []).append(entry[1])
            end = end or time.monotonic() + entry[0].timing.batch_seconds
            patience = max(0.0, end - time.monotonic())
        return []

    def _send(self, tracker: Tracker) -> None:
        entries, store = self._unsent[tracker], tracker.run_ref.store
        try:
            self._clients[store] = self._clients.get(store) or MlflowClient(store)
            while entries:
                send(self._clients[store], tracker.run_ref.run_id, entries[:METRICS_PER_BATCH])
                del entries[:METRICS_PER_BATCH]
            self._retry_at.pop(store, None)
        except Exception as failure:  # noqa: BLE001 nothing that the client raises may disturb the work
            if store not in self._retry_at:
                errors.print(f"MLflow does not respond ({first_line(failure)}). Its entries wait, and are sent again.")
            self._retry_at[store] = time.monotonic() + tracker.timing.retry_seconds


_senders: list[_Sender] = []
_starting = threading.Lock()


def _sender_of_process() -> _Sender:
    """The sender of this process, which starts one: a process that was forked has no thread of its parent."""
    with _starting:
        if not (_senders and _senders[0].thread.is_alive()):
            _senders[:] = [_Sender()]
        return _senders[0]
