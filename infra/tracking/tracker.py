"""Writing runs to MLflow without slowing or ending the work that they record.

The driver logs metrics, params, tags and files. Workers do not use MLflow, because several processes cannot create a
SQLite store at once. A call puts an entry into a queue in microseconds, where MLflow's ``log_metric`` takes 2 ms. One
thread of the process sends the entries in batches. While a store does not respond, its entries wait in memory. If
entries are unsent when the process ends, a later command sends them from the run folder (see
``infra.tracking.orphaned_runs``).
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

FLUSH_TIMEOUT_SECONDS = 60.0
MAX_PARAM_CHARACTERS = 6000
"""Length at which the value of a param is cut off, because of MLflow's limit."""
DESCRIPTION_TAG = "mlflow.note.content"
"""Tag that MLflow shows as a run's description."""
MAX_DESCRIPTION_CHARACTERS = 7500
"""Length to which a description is shortened; MLflow cuts a tag off at 8,000, and a link may be added later."""


@dataclass(frozen=True)
class TrackerTiming:
    """Intervals and time limits of sending entries to a store."""

    batch_seconds: float = 1.0
    """Time in which entries are collected before they are sent together."""
    retry_seconds: float = 30.0
    """Interval between attempts to reach a store that does not respond."""
    end_timeout_seconds: float = 15.0
    """Time limit for a store to respond at the end of a run; an interrupted command must exit within 30 seconds."""


@dataclass(frozen=True)
class Logged:
    """Entries that a run in MLflow already has."""

    params: set[str] = field(default_factory=set)
    """Names of the run's params."""
    steps: dict[str, int] = field(default_factory=dict)
    """Last step of each metric."""
    tags: dict[str, str] = field(default_factory=dict)
    """Values of the run's tags."""
    texts: dict[str, str] = field(default_factory=dict)
    """Content of the text artifacts that this process has sent, by name."""

    def last_step(self, prefix: str) -> int:
        """Return the last step of the metrics whose names begin with ``prefix``; 0 if there are none."""
        return max((step for name, step in self.steps.items() if name.startswith(prefix)), default=0)


class Tracker:
    """Writer of one MLflow run; as a context manager it closes the run when its block ends.

    The run's status becomes KILLED after Ctrl-C, FAILED with the tag ``reason`` after another exception, and otherwise
    :attr:`status`, unless the block has called :meth:`finish`. The methods that log or set values return at once, may
    be called from any thread, and never raise because of the store. Entries that the run already has are not sent
    again, so that a run can be completed from its folder at any time.
    """

    def __init__(self, run_ref: RunRef, logged: Logged | None = None, timing: TrackerTiming = TrackerTiming()) -> None:
        """Create a writer for the run; ``logged`` are the entries of a resumed run, None for a new one."""
        self.run_ref = run_ref
        self.logged = logged or Logged()
        self.timing = timing
        self.status = "FINISHED"
        """Status of the run after a block without an exception: FINISHED, FAILED or KILLED."""
        self.is_abandoned = False
        """Whether unsent entries are dropped, because the command no longer waits for the store."""
        self._is_finished = self._is_killed = False
        self._sender = _get_sender()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, failure: BaseException | None, *_: object) -> None:
        if self._is_finished:
            return
        is_interrupted = kind is not None and issubclass(kind, KeyboardInterrupt)
        if failure and not is_interrupted:
            self.set_tags({"reason": first_line(failure)})
        self.finish("KILLED" if is_interrupted else "FAILED" if kind else self.status)

    def log_metrics(self, values: Mapping[str, float | int | None], step: int = 0) -> None:
        """Log numbers at ``step``, with names as in :mod:`infra.tracking.names`.

        Values at step 0 are results, which replace earlier results of the same name.
        """
        time_ms = int(time.time() * 1000)
        for name, value in values.items():
            if value is not None and (not step or step > self.logged.steps.get(name, 0)):
                self._put({"kind": "metric", "key": name, "value": float(value), "step": step, "time": time_ms})
                self.logged.steps[name] = step

    def log_params(self, values: Mapping[str, Any]) -> None:
        """Log settings. MLflow cannot change a param, so the params that the run already has are skipped."""
        for name, value in values.items():
            if name not in self.logged.params:
                self._put({"kind": "param", "key": name, "value": str(value)[:MAX_PARAM_CHARACTERS]})
                self.logged.params.add(name)

    def set_tags(self, values: Mapping[str, Any]) -> None:
        """Set tags; a later value replaces an earlier one, and an empty value removes the tag."""
        for name, value in values.items():
            if self.logged.tags.get(name, "") != str(value):
                self._put({"kind": "tag", "key": name, "value": str(value)})
                self.logged.tags[name] = str(value)

    def set_description(self, markdown: str) -> None:
        """Set the description at the top of the run's page; a long report is cut off after a line, with a note."""
        if len(markdown) > MAX_DESCRIPTION_CHARACTERS:
            whole_lines, _, _ = markdown[:MAX_DESCRIPTION_CHARACTERS].rpartition("\n")
            markdown = f"{whole_lines}\n\nThis description is cut off here; `summary.md` in the artifacts is complete."
        self.set_tags({DESCRIPTION_TAG: markdown})

    def log_dataset(self, name: str, fingerprint: str, source: str, profile: Mapping[str, Any], context: str) -> None:
        """Log a data set; ``context`` is its role in the run, ``training`` or ``output``."""
        self._put(
            {
                "kind": "data", "name": name, "digest": fingerprint[:36], "source": source,
                "profile": dict(profile), "context": context,
            }
        )  # fmt: skip

    def log_text(self, content: str, name: str) -> None:
        """Log text as the artifact ``name``."""
        if self.logged.texts.get(name) != content:
            self._put({"kind": "text", "content": content, "name": name})
            self.logged.texts[name] = content

    def log_json(self, value: Any, name: str) -> None:
        """Log ``value`` as JSON in the artifact ``name``."""
        self.log_text(json.dumps(value, indent=2, sort_keys=True, default=str), name)

    def log_file(self, path: Path, folder: str | None = None) -> None:
        """Log a local file as an artifact in ``folder``; the file must still exist when its entry is sent."""
        self._put({"kind": "file", "path": str(path.resolve()), "folder": folder})

    def flush(self, seconds: float = FLUSH_TIMEOUT_SECONDS) -> bool:
        """Wait until all entries so far are sent; return False after ``seconds`` or if the store does not respond."""
        sent = threading.Event()
        self._sender.queue.put(sent)
        return sent.wait(seconds) and not self._sender.has_unsent_entries(self)

    def finish(self, status: str = "FINISHED", *, ended: float | None = None, wait: bool = True) -> None:
        """Close the run as FINISHED, FAILED or KILLED after all other entries.

        ``ended`` is the run's end in seconds since the epoch, by default now. With ``wait``, waits until all entries
        are sent.
        """
        self._is_finished = True
        self._is_killed = status == "KILLED"
        self._put({"kind": "finish", "status": status, "time": int((ended or time.time()) * 1000)})
        if wait:
            self.wait_until_sent()

    def wait_until_sent(self) -> bool:
        """Wait until all entries are sent; return False if entries remain unsent.

        The wait ends after ``end_timeout_seconds`` if the store does not respond. For a KILLED run it also ends if the
        store is slow, because an interrupt may leave the lock of Python's logging acquired, for which the sender would
        wait forever.
        """
        store, started_at = self.run_ref.store, time.monotonic()
        while not (is_sent := self.flush(self.timing.end_timeout_seconds)):
            is_unavailable = self._sender.is_unavailable(store)
            seconds = time.monotonic() - started_at
            if seconds >= self.timing.end_timeout_seconds and (is_unavailable or self._is_killed):
                errors.print(
                    f"MLflow at {store} does not respond; {self._sender.unsent_count} entries of this run are unsent. "
                    f"The next command, or --resume, sends them from {self.run_ref.run_dir}.",
                    markup=False,
                )
                self.is_abandoned = True
                break
            if is_unavailable:
                time.sleep(1.0)
            else:
                errors.print(
                    f"MLflow at {store} is slow: {self._sender.unsent_count} entries are unsent. Press Ctrl-C to exit; "
                    "the next command sends them.",
                    markup=False,
                )
        orphaned_runs.open_run_dirs.pop(self.run_ref.run_id, None)
        return is_sent

    def _put(self, entry: Entry) -> None:
        self._sender.queue.put((self, entry))


class _Sender:
    """Thread of this process that sends the entries of all its runs."""

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[tuple[Tracker, Entry] | threading.Event] = queue.SimpleQueue()
        self._unsent: dict[Tracker, list[Entry]] = {}
        self._clients: dict[str, MlflowClient] = {}
        self._retry_at: dict[str, float] = {}
        """Times at which to try stores again that did not respond."""
        self.thread = threading.Thread(target=self._run, name="tracking", daemon=True)
        self.thread.start()

    @property
    def unsent_count(self) -> int:
        """Number of entries that have not been sent."""
        return sum(map(len, [*self._unsent.values()])) + self.queue.qsize()

    def has_unsent_entries(self, tracker: Tracker) -> bool:
        """Return whether entries of the tracker's run have not been sent."""
        return bool(self._unsent.get(tracker))

    def is_unavailable(self, store: str) -> bool:
        """Return whether the store did not respond to the last attempt."""
        return store in self._retry_at

    def _run(self) -> None:
        """Send queued entries in batches, and unsent ones again when their retry is due or a thread waits for them."""
        while True:
            flush_events = self._collect_batch()
            for tracker in [*self._unsent]:
                if flush_events or time.monotonic() >= self._retry_at.get(tracker.run_ref.store, 0.0):
                    self._send(tracker)
                if not self._unsent[tracker] or tracker.is_abandoned:
                    del self._unsent[tracker]
            for event in flush_events:
                event.set()

    def _collect_batch(self) -> list[threading.Event]:
        """Move entries queued within ``batch_seconds`` to the unsent ones; return the events of waiting threads."""
        retry_times = [self._retry_at.get(tracker.run_ref.store, 0.0) for tracker in self._unsent]
        timeout = max(0.0, min(retry_times) - time.monotonic()) if retry_times else None
        end_time = 0.0
        for _ in range(METRICS_PER_BATCH):
            try:
                entry = self.queue.get(timeout=timeout)
            except queue.Empty:
                break
            if isinstance(entry, threading.Event):
                return [entry]
            self._unsent.setdefault(entry[0], []).append(entry[1])
            end_time = end_time or time.monotonic() + entry[0].timing.batch_seconds
            timeout = max(0.0, end_time - time.monotonic())
        return []

    def _send(self, tracker: Tracker) -> None:
        entries, store = self._unsent[tracker], tracker.run_ref.store
        try:
            self._clients[store] = self._clients.get(store) or MlflowClient(store)
            while entries:
                send(self._clients[store], tracker.run_ref.run_id, entries[:METRICS_PER_BATCH])
                del entries[:METRICS_PER_BATCH]
            self._retry_at.pop(store, None)
        except Exception as failure:  # noqa: BLE001 errors of the MLflow client must not end the work
            if store not in self._retry_at:
                errors.print(
                    f"MLflow does not respond ({first_line(failure)}). Entries are queued and will be retried.",
                    markup=False,
                )
            self._retry_at[store] = time.monotonic() + tracker.timing.retry_seconds


_senders: list[_Sender] = []
_start_lock = threading.Lock()


def _get_sender() -> _Sender:
    """Return the sender of this process; start one if there is none, as in a process that was forked."""
    with _start_lock:
        if not (_senders and _senders[0].thread.is_alive()):
            _senders[:] = [_Sender()]
        return _senders[0]
