"""What the driver does with its workers' messages; the tracker stands in for MLflow, and a list for Ray's machines."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import ray

from infra.schema import to_json
from infra.storage.directory import StorageDir
from infra.tracking.tracker import Logged, Tracker
from pipeline.shards import read_manifest
from train.config import ResolvedConfig
from train.launch.job import ResolvedRun
from train.launch.link import (
    Activity,
    Channel,
    CycleDone,
    MicroBatchTooLarge,
    Order,
    PrintLine,
    RecordedProgress,
    SystemMetrics,
    WorkerStarted,
    WorkerUpdates,
)
from train.launch.listener import SILENCE_SECONDS, Listener, WorkerMonitor
from train.model_config import ModelConfig
from train.result import TRAINING, CycleReport
from train.run_files.progress import Progress
from train.run_files.run_folder import RunFolder


class Recorded:
    """What a tracker records, and what a status shows."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        """Raised when points are recorded."""
        self.points: list[tuple[int, str, float]] = []
        self.labels: dict[str, str] = {}
        self.logged = Logged(steps={"system/cpu": 39})
        self.line = ""

    def log_metrics(self, values: dict[str, float | None], step: int = 0) -> None:
        if self.error:
            raise self.error
        self.points += [(step, name, value) for name, value in values.items() if value is not None]

    def set_tags(self, values: dict[str, str]) -> None:
        self.labels |= values

    def update(self, what: str, more: str = "") -> None:
        self.line = f"{what} {more}"


@pytest.fixture
def config(small_shards: Path, small_model: ModelConfig) -> ResolvedConfig:
    return ResolvedConfig.of(
        data=str(small_shards), model=small_model, micro_batch=4, global_batch=8, time_budget=120.0
    )


@pytest.fixture
def run(config: ResolvedConfig, tmp_path: Path) -> ResolvedRun:
    return ResolvedRun(config, read_manifest(config.dataset.data), RunFolder(tmp_path), config=config)


@pytest.fixture
def cycle(distinct: Callable[..., Any]) -> dict[str, Any]:
    report = distinct(CycleReport, step=12, step_losses=[3.0, 2.0], val_loss=2.5, cycle_seconds=2.0)
    return to_json(report) | {"line": report.format_line()}


def listener_of(run: ResolvedRun) -> tuple[Listener, Recorded, list[dict[str, Any]]]:
    recorded, cycles = Recorded(), list[dict[str, Any]]()
    return Listener(run, cast(Tracker, recorded), cycles.append), recorded, cycles


def test_messages_are_recorded_and_passed_on(
    run: ResolvedRun, cycle: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    listener, recorded, cycles = listener_of(run)
    assert listener.recorded == RecordedProgress(0, 39)
    messages = [
        WorkerStarted(0, ["w1"], ["a"], {"host": "w1", "gpu": "H100"}),
        PrintLine("w1 [fetches] it"),
        CycleDone(cycle),
        SystemMetrics(40, {"system/cpu": 5.0}),
        MicroBatchTooLarge(8, "micro-batch 8 does not fit"),
    ]
    status: Any = Recorded()
    listener.handle(WorkerUpdates(messages, activity=Activity("loading the data", 0)), status)
    assert cycles == [cycle]
    assert recorded.labels["worker"] == "w1"
    assert json.loads(recorded.labels["worker.machine"]) == {"host": "w1", "gpu": "H100"}
    printed = capsys.readouterr().out
    assert "w1 [fetches] it" in printed
    assert "micro-batch 8 does not fit" in printed
    assert (40, "system/cpu", 5.0) in recorded.points
    losses = [(step, name, value) for step, name, value in recorded.points if name.startswith("loss/")]
    assert losses == [
        (11, "loss/step", 3.0), (12, "loss/step", 2.0), (12, "loss/train", cycle["train_loss"]), (12, "loss/val", 2.5),
        (12, "loss/val_bits_per_byte", cycle["val_bits_per_byte"]),
    ]  # fmt: skip
    assert status.line.strip() == "loading the data"


def test_the_drivers_copy_of_a_remote_run_has_the_cycles_that_the_worker_logs_elsewhere(
    run: ResolvedRun, cycle: dict[str, Any], tmp_path: Path
) -> None:
    """A run in this process, or on a disk that is shared, has them already."""
    status: Any = Recorded()
    for folder, logged in ((run.run_folder, []), (RunFolder(tmp_path, StorageDir.of("s3://bucket/runs/one")), [12])):
        listener, _, _ = listener_of(replace(run, run_folder=folder))
        listener.handle(WorkerUpdates([CycleDone(cycle)]), status)
        lines = folder.cycles.read_text().splitlines() if folder.cycles.exists() else []
        assert [json.loads(line)["step"] for line in lines] == logged


def test_the_time_that_is_left_counts_from_where_a_run_is_continued(run: ResolvedRun) -> None:
    progress = Progress(step=7, train_seconds=90.0, data_fingerprint="", tokenizer_sha256="", config={})
    for resumed_from, time_left in ((None, "2m left"), (progress, "30s left")):
        listener, _, _ = listener_of(replace(run, progress=resumed_from))
        status: Any = Recorded()
        listener.handle(WorkerUpdates(activity=Activity(TRAINING, 8)), status)
        assert "step 8" in status.line
        assert time_left in status.line


def test_a_run_is_stopped_once_when_it_is_interrupted_or_cannot_be_recorded(
    run: ResolvedRun, cycle: dict[str, Any]
) -> None:
    status: Any = Recorded()
    for is_interrupted in (True, False):
        listener, recorded, _ = listener_of(run)
        link = Channel(RecordedProgress())
        number, _ = link.start(WorkerStarted(0, ["w1"], [""], {}))
        listener.poll(link, status, stop=False)
        assert link.heartbeat(number, Activity("", 0)) is Order.CONTINUE
        if not is_interrupted:
            recorded.error = OSError("no space left")
            link.post(CycleDone(cycle))
        listener.poll(link, status, stop=is_interrupted)
        assert listener.failure is recorded.error
        assert link.heartbeat(number, Activity("", 0)) is Order.STOP


@pytest.fixture
def alive(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """Whether Ray takes each machine for alive, by its id."""
    alive = {"a": True, "b": True, "c": True}
    monkeypatch.setattr(ray, "nodes", lambda: [{"NodeID": node, "Alive": is_alive} for node, is_alive in alive.items()])
    return alive


def monitor_of(hosts: dict[str, str]) -> WorkerMonitor:
    """The monitor of workers that have started on these machines."""
    recorded = Recorded()
    monitor = WorkerMonitor(cast(Tracker, recorded))
    monitor.on_start(WorkerStarted(0, list(hosts.values()), list(hosts), {"host": "w1", "python": "3.11"}))
    assert recorded.labels["worker"] == ", ".join(hosts.values())
    return monitor


def test_the_loss_of_any_machine_that_trains_is_reported_once(
    alive: dict[str, bool], capsys: pytest.CaptureFixture[str]
) -> None:
    """The first worker's heartbeats arrive all the while: it waits in a collective."""
    monitor = monitor_of({"a": "w1", "b": "w2"})
    alive["c"] = False  # nothing of this run is there
    monitor.check_heartbeat(0.1)
    assert not monitor.is_lost
    assert capsys.readouterr().out == ""
    alive["b"] = False
    monitor.check_heartbeat(0.1)
    assert monitor.is_lost, "at once, while the first worker's heartbeats arrive"
    for silence in (0.2, SILENCE_SECONDS + 1):
        monitor.check_heartbeat(silence)
    assert (monitor.is_lost, monitor.is_silent) == (True, True)
    assert capsys.readouterr().out.count("Lost w2") == 1
    monitor.on_start(WorkerStarted(0, ["w1", "w3"], ["a", "d"], {}))
    assert (monitor.is_lost, monitor.is_silent) == (False, False)
    assert capsys.readouterr().out == "resuming on w1, w3\n"


@pytest.mark.usefixtures("alive")
def test_a_worker_that_is_silent_for_some_time_and_responds_again_is_reported(
    capsys: pytest.CaptureFixture[str],
) -> None:
    monitor = monitor_of({"a": "w1"})
    for silence in (0.1, SILENCE_SECONDS + 1, SILENCE_SECONDS + 2):
        monitor.check_heartbeat(silence)
    assert (monitor.is_lost, monitor.is_silent) == (False, True)
    monitor.check_heartbeat(0.1)
    silent, again = capsys.readouterr().out.splitlines()
    assert re.search("w1 .* 9 s.*Ctrl-C", silent)
    assert "w1" in again
