"""What the driver does with what its workers say: cycles to MLflow and the terminal, telemetry, lines, progress."""

from collections.abc import Callable
from typing import Any

from infra.cli.console import console
from infra.cli.progress import Status
from infra.tracking.tracker import Tracker
from train.config import ResolvedConfig
from train.launch.channel import WorkerUpdates
from train.launch.group import WorkerGroup
from train.launch.job import RunPlan
from train.launch.progress_meter import ProgressMeter
from train.reporting import tracking


class Listener:
    def __init__(
        self,
        run: RunPlan,
        config: ResolvedConfig,
        tracker: Tracker,
        on_cycle: Callable[[dict[str, Any]], None],
    ) -> None:
        self.run = run
        self.config = config
        self.group = WorkerGroup(tracker)
        self.failure: Exception | None = None
        """Why what the workers say can be recorded no longer, such as a full disk: the run is to stop, and save."""
        self._tracker = tracker
        self._on_cycle = on_cycle
        self._pace = ProgressMeter(
            config.step_tokens,
            config.total_steps,
            config.duration.time_budget,
            run.manifest,
            trained_seconds=run.progress.elapsed if run.progress else 0.0,
        )

    def take(self, updates: WorkerUpdates, shown: Status) -> None:
        """Do what follows from ``updates``; ``shown`` is what the terminal shows that is being done.

        Never raises: the thread that calls it has to pass on Ctrl-C, too. The first ``failure`` is kept.
        """
        if self.failure:
            return
        try:
            self._take(updates, shown)
        except Exception as failure:  # noqa: BLE001 raised by whoever started the run, once it has been saved
            self.failure = failure

    def _take(self, updates: WorkerUpdates, shown: Status) -> None:
        for kind, content in updates.messages:
            if kind == "cycle":
                tracking.log_cycle(self._tracker, content)
                self._pace.cycle(content)
                self.run.run_folder.receive_cycle(content)
                self._on_cycle(content)
            elif kind == "system":
                at, metrics = content
                self._tracker.log_metrics(metrics, at)
            elif kind == "worker_started":
                self.group.on_workers_started(content)
            else:
                console.print(content, markup=False)
        if not self.run.is_local:
            self.group.check_heartbeat(updates.silence)
        if self.group.is_silent:
            shown.update("waiting for a worker that answers")
        elif updates.activity:
            shown.update(*self._pace.describe(*updates.activity))
