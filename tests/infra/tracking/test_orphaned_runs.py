"""No run stays RUNNING after its command has ended, whenever that was interrupted or killed."""

import json
import os
import platform
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import FrameType

import pytest
from mlflow.entities import Run
from mlflow.tracking import MlflowClient

from infra.cli.interrupts import interrupts
from infra.errors import UserError
from infra.storage.directory import StorageDir
from infra.storage.files import write_json
from infra.tracking import orphaned_runs
from infra.tracking.orphaned_runs import incomplete_runs, lock_run_dir
from infra.tracking.run_ref import RunRef
from infra.tracking.store import create_child_run, create_run, find_children, reopen_run, store_uri
from infra.tracking.tracker import Tracker

MOMENTS = 20
OURS = str(Path(orphaned_runs.__file__).parents[1])


@pytest.fixture
def project(tmp_path: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a store of its own, in a process that takes SIGTERM as commands do."""
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    monkeypatch.chdir(tmp_path)
    with interrupts.handled():
        yield tmp_path


def command(name: str, experiment: str = "train", work: Callable[[RunRef], object] = bool) -> None:
    """What a command does: hold its folder, continue the run whose key it keeps or create one, and write to it."""
    home = StorageDir.of(name)
    with home.lock(f"{name} is in use"):
        kept = Path(home.address) / "key.json"
        if kept.exists():
            key = RunRef(**json.loads(kept.read_text())).check_belongs_to(home, "Do something else")
            reopen_run(key)
        else:
            key = create_run(
                experiment, name, run_dir=home.address, keep=lambda key: write_json(kept, key.to_json_for(home.address))
            )
        with Tracker(key) as tracker:
            tracker.log_metrics({"loss": 1.0})
            work(key)


def in_a_process(work: Callable[[], object]) -> int:
    """Start ``work`` in a process of its own; returns its id."""
    child = os.fork()
    if not child:
        with suppress(BaseException):
            work()
        os._exit(0)
    return child


def killed(work: Callable[[], object]) -> None:
    """Do ``work`` in a process that kills itself meanwhile."""
    assert os.WIFSIGNALED(os.waitpid(in_a_process(work), 0)[1])


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def runs(experiment: str = "train") -> dict[str, list[Run]]:
    client, named = MlflowClient(store_uri()), dict[str, list[Run]]()
    found = client.get_experiment_by_name(experiment)
    for run in client.search_runs([found.experiment_id]) if found else ():
        named.setdefault(str(run.info.run_name), []).append(run)
    return named


def status(name: str, experiment: str = "train") -> str:
    (run,) = runs(experiment)[name]
    return run.info.status


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


def test_an_interrupt_at_any_moment_leaves_no_run_running_and_no_second_of_a_key(project: Path) -> None:
    command("whole")
    steps = steps_of(lambda: command("counted"))
    moments = {f"moment-{number}": number * steps // MOMENTS for number in range(MOMENTS)}
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
    for number, (name, at) in enumerate(moments.items()):

        def interrupted(name: str = name, at: int = at, sent: int = signals[number % 3]) -> None:
            steps_of(lambda: command(name), at, lambda: os.kill(os.getpid(), sent))

        os.waitpid(in_a_process(interrupted), 0)
    command("next")
    left = runs()
    for name, at in moments.items():
        states = [run.info.status for run in left.get(name, [])]
        assert set(states) <= {"KILLED", "FINISHED"}, f"at step {at} of {steps}"
        if Path(name, "key.json").exists():
            assert json.loads(Path(name, "key.json").read_text())["run_id"] in [r.info.run_id for r in left[name]]
        command(name)
        assert len(runs()[name]) == len(states) + (not Path(name, "key.json").exists() or not states), f"at step {at}"
        assert "FINISHED" in [run.info.status for run in runs()[name]]


def test_a_killed_run_is_closed_by_the_next_command_of_another_package(project: Path) -> None:
    killed(lambda: command("ladder", "ladder", lambda key: die(create_child_run(key, "ladder", "rung", {}))))
    assert (status("ladder", "ladder"), status("rung", "ladder")) == ("RUNNING", "RUNNING")
    command("next")
    assert (status("ladder", "ladder"), status("rung", "ladder")) == ("KILLED", "KILLED")


@pytest.mark.parametrize("host", [platform.node(), "another machine"])
def test_the_child_of_a_killed_command_is_closed_when_that_is_resumed(project: Path, host: str) -> None:
    """Its folder is held by the command itself, which may have been killed on another machine."""
    killed(lambda: command("ladder", "ladder", lambda key: die(create_child_run(key, "ladder", "rung", {}))))
    for name in ("ladder", "rung"):
        MlflowClient(store_uri()).set_tag(runs("ladder")[name][0].info.run_id, "host", host)
    seen: list[str] = []
    command("ladder", "ladder", lambda key: seen.extend((status("ladder", "ladder"), status("rung", "ladder"))))
    assert seen == ["RUNNING", "KILLED"]
    assert status("ladder", "ladder") == "FINISHED"


def test_a_run_whose_process_lives_stays_as_it_is(project: Path) -> None:
    child = in_a_process(lambda: command("alive", work=lambda key: time.sleep(600)))
    try:
        deadline = time.monotonic() + 60
        while not Path("alive", "key.json").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        mine: list[str] = []
        command(
            "next", work=lambda key: mine.extend([create_run("train", "own", run_dir=key.run_dir) and status("next")])
        )
        assert (status("alive"), mine) == ("RUNNING", ["RUNNING"])
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    command("after")
    assert status("alive") == "KILLED"


@pytest.mark.parametrize("gone", ["the folder", "its parent"])
def test_a_run_whose_folder_was_removed_is_closed_where_that_is_certain(project: Path, gone: str) -> None:
    """A disk that is not mounted may return."""
    killed(lambda: command("runs/first", work=die))
    shutil.rmtree("runs/first" if gone == "the folder" else "runs")
    command("next")
    assert status("runs/first") == ("KILLED" if gone == "the folder" else "RUNNING")
    assert not Path("runs/first").exists()


def test_a_run_of_another_machine_or_without_a_folder_stays_as_it_is(project: Path) -> None:
    killed(lambda: command("there", work=die))
    client = MlflowClient(store_uri())
    (run,) = runs()["there"]
    client.set_tag(run.info.run_id, "host", f"not-{platform.node()}")
    nowhere = create_run("train", "nowhere")
    command("next")
    assert (status("there"), client.get_run(nowhere.run_id).info.status) == ("RUNNING", "RUNNING")


def test_a_run_that_ended_before_its_process_was_killed_stays_as_it_ended(project: Path) -> None:
    killed(lambda: command("ended", work=lambda key: die(MlflowClient(key.store).set_terminated(key.run_id))))
    command("next")
    assert status("ended") == "FINISHED"


def test_runs_that_lack_something_are_found_until_they_are_closed_with_all_they_have(project: Path) -> None:
    for name, experiment in (("first", "train"), ("other", "tune")):
        killed(lambda name=name, experiment=experiment: command(name, experiment, work=die))
    command("whole")
    assert [StorageDir.of(left.run_dir).name for left in incomplete_runs] == ["other", "first"]
    with (
        lock_run_dir(incomplete_runs[1]),
        pytest.raises(UserError, match="in use"),
        StorageDir.of(incomplete_runs[1].run_dir).lock("in use"),
    ):
        pass
    with Tracker(incomplete_runs[1]) as tracker:
        tracker.set_tags({"more": "of it"})
    command("next")
    assert [StorageDir.of(left.run_dir).name for left in incomplete_runs] == ["other"]


def test_a_childs_end_tells_a_resumed_command_what_it_need_not_do_again(project: Path) -> None:
    parent = create_run("tune", "search", run_dir=str(project / "search"))
    keys = {name: create_child_run(parent, "tune", name, {"trial": name}) for name in ("ended", "open", "killed")}
    for name, ends in (("ended", "FINISHED"), ("killed", "KILLED")):
        with Tracker(keys[name]) as tracker:
            tracker.status = ends
    found = find_children(parent, "trial")
    assert {name: key for name, (key, _) in found.items()} == keys
    assert [name for name, (_, complete) in found.items() if complete] == ["ended"]


def test_a_folder_that_was_copied_or_moved_does_not_continue_the_run(project: Path) -> None:
    command("first")
    shutil.copytree("first", "second")
    with pytest.raises(
        UserError, match=f"{project}/second was copied or moved from {project}/first.* Do something else"
    ):
        command("second")
    Path("mlflow.db").rename("away.db")
    with pytest.raises(UserError, match=rf"{project}/mlflow.db .*Do something else\."):
        command("first")
    assert not Path("mlflow.db").exists()


def test_a_store_that_was_copied_or_moved_writes_no_file_to_its_old_place(project: Path) -> None:
    command("first")
    new = project / "new"
    new.mkdir()
    shutil.copy("mlflow.db", new)
    with pytest.raises(UserError, match=f"copied or moved from {project} .*--tracking-uri"):
        create_run("train", "second", tracking_uri=f"sqlite:///{new}/mlflow.db")
    assert asdict(create_run("train", "third"))["store"] == store_uri()
