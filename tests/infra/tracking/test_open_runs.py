"""No run stays RUNNING after its command has ended, and none exists twice, whenever the command was interrupted."""

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import FrameType

import pytest
from mlflow.entities import Run
from mlflow.tracking import MlflowClient

from infra.command import interrupt_on_termination
from infra.storage import write_json
from infra.tracking import open_runs
from infra.tracking.key import RunKey
from infra.tracking.store import create_run, reopen_run, store_uri
from infra.tracking.tracker import Tracker

MOMENTS = 200
OURS = str(Path(open_runs.__file__).parents[1])


@pytest.fixture
def project(tmp_path: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a store of its own, in a process that takes SIGTERM as commands do."""
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    monkeypatch.chdir(tmp_path)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    interrupt_on_termination()
    yield tmp_path
    for number, handler in before.items():
        signal.signal(number, handler)


def command(name: str) -> None:
    """What a command does: continue the run whose key was kept, or create it, and write to it."""
    kept = Path(f"{name}.json")
    if kept.exists():
        key = RunKey(**json.loads(kept.read_text()))
        reopen_run(key)
    else:
        key = create_run("train", name, keep=lambda key: write_json(kept, asdict(key)))
    with Tracker(key) as tracker:
        tracker.metrics({"loss": 1.0})


def steps_of(work: Callable[[], None], at: int = -1, act: Callable[[], object] = int) -> int:
    """The number of steps that ``work`` takes in this thread; ``act`` before step ``at``.

    A step is a line of ours or the entry into any function, also of MLflow and SQLAlchemy.
    """
    count = 0

    def trace(frame: FrameType, event: str, _: object):
        nonlocal count
        if event in ("call", "line"):
            if count == at:
                sys.settrace(None)
                act()
            count += 1
        return trace if frame.f_code.co_filename.startswith(OURS) else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def runs() -> dict[str, list[Run]]:
    """The runs of each name."""
    named: dict[str, list[Run]] = {}
    for run in MlflowClient(store_uri()).search_runs(["1"], max_results=10 * MOMENTS):
        named.setdefault(str(run.info.run_name), []).append(run)
    return named


def killed(name: str, at: int) -> None:
    """Run the command in a process that is killed before step ``at``."""
    child = os.fork()
    if not child:
        steps_of(lambda: command(name), at, lambda: os.kill(os.getpid(), signal.SIGKILL))
        os._exit(0)
    os.waitpid(child, 0)


def test_an_interrupt_at_any_moment_leaves_no_run_running_and_none_twice(project: Path) -> None:
    """A command that is repeated makes a new run, unless the key of one was kept: only then may there be one."""
    command("whole")
    steps = steps_of(lambda: command("counted"))
    moments = {f"moment-{number}": number * steps // MOMENTS for number in range(MOMENTS)}
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
    for number, (name, at) in enumerate(moments.items()):
        with suppress(KeyboardInterrupt):
            if signals[number % 3] == signal.SIGKILL:
                killed(name, at)
            else:
                steps_of(
                    lambda name=name: command(name), at, lambda sent=signals[number % 3]: signal.raise_signal(sent)
                )
                pytest.fail(f"the interrupt at step {at} was lost")
        open_runs.close_own()  # as at the end of the process
    command("next")
    left = runs()
    for name, at in moments.items():
        kept = Path(f"{name}.json")
        expected = [json.loads(kept.read_text())["run_id"]] if kept.exists() else []
        assert [run.info.run_id for run in left.get(name, [])] in ([], expected), f"at step {at} of {steps}"
        assert all(run.info.status in ("KILLED", "FINISHED") for run in left.get(name, [])), f"at step {at} of {steps}"
    again = {*list(moments)[::10], *(name for name in moments if Path(f"{name}.json").exists() and name not in left)}
    for name in again:
        command(name)
    assert all([run.info.status for run in runs()[name]] == ["FINISHED"] for name in again)
    assert not list(project.glob("mlflow-journal/*"))


def test_a_run_that_ended_before_its_process_was_killed_stays_as_it_ended(project: Path) -> None:
    child = os.fork()
    if not child:
        key = create_run("train", "ended", keep=lambda key: None)
        MlflowClient(key.store).set_terminated(key.run_id, "FINISHED")
        os.kill(os.getpid(), signal.SIGKILL)  # before its note is removed
    os.waitpid(child, 0)
    assert list(project.glob("mlflow-journal/*"))
    command("next")
    assert [run.info.status for run in runs()["ended"]] == ["FINISHED"]
    assert not list(project.glob("mlflow-journal/*"))
