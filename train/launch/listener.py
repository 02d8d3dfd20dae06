"""What the driver does with what its workers say: cycles to MLflow and the terminal, telemetry, lines, progress."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from infra.console import console
from infra.errors import UserError
from infra.progress import Doing
from infra.tracking.tracker import Tracker
from train import report
from train.checkpoint.run_folder import RunFolder
from train.config import TrainConfig
from train.launch.channel import WorkerNews
from train.launch.group import WorkerGroup
from train.launch.pace import Pace
from train.launch.run import RunPlan

SEND_SECONDS = 5.0
"""Between two copies of a run's cycles to object storage."""


class Listener:
    """The driver of one run, as its workers know it."""

    def __init__(
        self,
        run: RunPlan,
        config: TrainConfig,
        tracker: Tracker,
        on_cycle: Callable[[dict[str, Any]], None],
        sent: Mapping[str, int],
    ) -> None:
        """``sent`` has the last step of each metric that MLflow has already."""
        self.run = run
        self.config = config
        self.group = WorkerGroup(tracker)
        self._tracker = tracker
        self._on_cycle = on_cycle
        self._sent = sent
        self._pace = Pace(config, run.manifest)
        self._changed = threading.Event()

    def record(self, cycle: dict[str, Any]) -> None:
        """Send MLflow what it lacks of a cycle."""
        report.record_cycle(self._tracker, cycle, self._sent)

    def take(self, news: WorkerNews, shown: Doing) -> None:
        """Do what follows from ``news``; ``shown`` is what the terminal shows that is being done."""
        for kind, content in news.messages:
            if kind == "cycle":
                self.record(content)
                self._pace.cycle(content)
                if self.run.home.remote:
                    self.run.home.log(content)
                    self._changed.set()
                self._on_cycle(content)
            elif kind == "system":
                at, metrics = content
                self._tracker.metrics(metrics, at)
            elif kind == "begun":
                self.group.begun(content)
            else:
                console.print(content, markup=False)
        if not self.run.is_local:
            self.group.look(news.silence)
        if self.group.is_silent:
            shown.now("waiting for a worker that answers")
        elif news.doing:
            shown.now(*self._pace.shown(*news.doing))

    @contextmanager
    def sending(self) -> Iterator[None]:
        """While the block runs, send the cycles of a run in object storage there whenever there are new ones.

        Storage that is away is tried again later; what matters is in each checkpoint, and sent again at the end.
        """
        home: RunFolder = self.run.home
        ended = threading.Event()

        def send() -> None:
            while not ended.wait(SEND_SECONDS):
                if self._changed.is_set():
                    self._changed.clear()
                    try:
                        home.send(home.cycles)
                    except UserError:
                        self._changed.set()

        if not home.remote:
            yield
            return
        threading.Thread(target=send, name="sending", daemon=True).start()
        try:
            yield
        finally:
            ended.set()
