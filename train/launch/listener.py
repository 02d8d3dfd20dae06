"""What the driver does with its workers' messages: cycles and telemetry to MLflow, lines and progress to the terminal.

It also watches whether the machines that train are still heard from.
"""

import json
import platform
from collections.abc import Callable
from typing import Any

from infra.cli.console import console
from infra.cli.progress import Status
from infra.tracking.tracker import Tracker
from train.launch.job import ResolvedRun
from train.launch.link import (
    CycleDone,
    Link,
    Message,
    MicroBatchTooLarge,
    PrintLine,
    RecordedProgress,
    SystemMetrics,
    WorkerStarted,
    WorkerUpdates,
)
from train.reporting import tracking
from train.reporting.progress_meter import ProgressMeter

SILENCE_SECONDS = 8.0
"""Time without a heartbeat after which a message says so; there are two per second."""


class Listener:
    """The driver's end of a link, for the whole run."""

    def __init__(self, run: ResolvedRun, tracker: Tracker, on_cycle: Callable[[dict[str, Any]], None]) -> None:
        """Call ``on_cycle`` with each new cycle."""
        self.run = run
        reported_step = run.progress.last_reported_step if run.progress else 0
        self.recorded = RecordedProgress(reported_step, tracker.logged.last_step("system/"))
        """The progress that was recorded before this command."""
        self.workers = WorkerMonitor(tracker)
        self.failure: Exception | None = None
        """The exception that prevents recording, such as for a full disk; the run is then stopped and saved."""
        self._has_requested_stop = False
        self._tracker = tracker
        self._on_cycle = on_cycle
        self._progress = ProgressMeter(
            run.config.step_tokens,
            run.config.total_steps,
            run.config.duration.time_budget,
            run.manifest,
            trained_seconds=run.progress.train_seconds if run.progress else 0.0,
        )

    def poll(self, link: Link, status: Status, *, stop: bool) -> None:
        """Handle the updates that have arrived, and request the run to stop if ``stop``, or if they cannot be handled.

        Never raises, because the thread that calls it also passes on Ctrl-C.
        """
        if updates := link.poll():
            self.handle(updates, status)
        if (stop or self.failure) and not self._has_requested_stop:
            self._has_requested_stop = True
            link.request_stop()

    def handle(self, updates: WorkerUpdates, status: Status) -> None:
        """Handle ``updates``, and show the worker's activity as ``status``. The first exception is kept as
        ``failure``."""
        if self.failure:
            return
        try:
            for message in updates.messages:
                self._handle(message)
            if not self.run.is_local:
                self.workers.check_heartbeat(updates.silence)
        except Exception as failure:  # noqa: BLE001 raised by whoever started the run, once it has been saved
            self.failure = failure
            return
        if self.workers.is_silent:
            status.update("waiting for the worker to respond")
        elif activity := updates.activity:
            status.update(
                *self._progress.describe(
                    activity.description, activity.step, activity.micro_batch, activity.micro_batches
                )
            )

    def _handle(self, message: Message) -> None:
        match message:
            case CycleDone(cycle):
                tracking.log_cycle(self._tracker, cycle)
                self._progress.cycle(cycle)
                self.run.run_folder.receive_cycle(cycle)
                self._on_cycle(cycle)
            case SystemMetrics(second, metrics):
                self._tracker.log_metrics(metrics, second)
            case WorkerStarted():
                self.workers.on_start(message)
            case PrintLine(text) | MicroBatchTooLarge(_, text):
                console.print(text, markup=False)


class WorkerMonitor:
    """Monitors the machines that train: records them, and prints a line if one stops responding."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self._hosts: list[str] = []
        self._nodes: dict[str, str] = {}
        """The machines' names by Ray's ids of them."""
        self.is_silent = False
        """Whether the first worker has started, and its heartbeats do not arrive."""
        self.is_lost = False
        """Whether the machine of a worker has left the cluster, and the workers have not started again."""

    def on_start(self, worker: WorkerStarted) -> None:
        """Record the machines of workers that start."""
        if self._hosts:
            console.print(f"resuming on {', '.join(worker.hosts)}", markup=False)
        self._hosts, self._nodes = worker.hosts, dict(zip(worker.nodes, worker.hosts, strict=True))
        self.is_silent = self.is_lost = False
        # The provenance of the driver's machine was recorded when the run was created.
        is_elsewhere = set(self._hosts) != {platform.node()}
        tags = {"worker": ", ".join(self._hosts), "worker.machine": json.dumps(worker.machine)}
        self._tracker.set_tags({name: value if is_elsewhere else "" for name, value in tags.items()})

    def check_heartbeat(self, silence: float | None) -> None:
        """Print a message if the first worker is silent, or if the machine of any worker has left the cluster.

        Ray Train prints nothing while it looks for another machine. When one of several machines is lost, the first
        worker's heartbeats arrive, but it waits for the lost one in a collective.
        """
        if silence is None or self.is_lost:
            return
        is_silent = silence >= SILENCE_SECONDS
        if self.is_silent and not is_silent:
            self.is_silent = False
            console.print(f"{self._hosts[0]} is responding again", markup=False)
        lost_hosts: list[str] = []
        if is_silent or len(self._nodes) > 1:
            import ray  # A run in this process does without.

            dead_nodes = {node["NodeID"] for node in ray.nodes() if not node["Alive"]}
            lost_hosts = [host for node, host in self._nodes.items() if node in dead_nodes]
        if lost_hosts:
            self.is_silent = self.is_lost = True
            verb = "was" if len(lost_hosts) == 1 else "were"
            console.print(
                f"Lost {', '.join(lost_hosts)}, which {verb} training. The run resumes from its newest checkpoint as "
                "soon as another machine has the required resources.",
                markup=False,
            )
        elif is_silent and not self.is_silent:
            self.is_silent = True
            console.print(
                f"The worker on {self._hosts[0]} has not responded for {silence:.0f} s. Its process, machine or "
                "network may have failed; Ray restarts it if it can. Press Ctrl-C to exit.",
                markup=False,
            )
