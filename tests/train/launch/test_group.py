"""What the driver says of the machines that train; the cluster's machines are listed here, as Ray would list them."""

from typing import Any

import pytest
import ray

from train.launch.group import SILENT_SECONDS, WorkerGroup


class Tags:
    """What a tracker is told."""

    def __init__(self) -> None:
        self.kept: dict[str, str] = {}

    def set_tags(self, tags: dict[str, str]) -> None:
        self.kept |= tags


@pytest.fixture
def alive(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """Whether Ray takes each machine for alive, by its id."""
    alive = {"a": True, "b": True, "c": True}
    monkeypatch.setattr(ray, "nodes", lambda: [{"NodeID": node, "Alive": is_so} for node, is_so in alive.items()])
    return alive


def group_on(hosts: dict[str, str]) -> WorkerGroup:
    """A group that has begun on these machines."""
    tags: Any = Tags()
    group = WorkerGroup(tags)
    group.on_workers_started(
        {"hosts": list(hosts.values()), "nodes": list(hosts), "machine": {"host": "w1", "python": "3.11"}}
    )
    assert tags.kept == {"worker": ", ".join(hosts.values()), "python": "3.11"}
    return group


def test_the_loss_of_any_machine_that_trains_is_reported_once(
    alive: dict[str, bool], capsys: pytest.CaptureFixture[str]
) -> None:
    """The first worker answers all the while: it waits in a collective."""
    group = group_on({"a": "w1", "b": "w2"})
    alive["c"] = False  # where nothing of this run is
    group.check_heartbeat(0.1)
    assert not group.is_lost
    assert capsys.readouterr().out == ""
    alive["b"] = False
    group.check_heartbeat(0.1)
    assert group.is_lost, "at once, while the first worker answers"
    for silence in (0.2, SILENT_SECONDS + 1):
        group.check_heartbeat(silence)
    assert (group.is_lost, group.is_silent) == (True, True)
    assert capsys.readouterr().out.count("w2, which trains, has left the cluster: the run continues") == 1
    group.on_workers_started({"hosts": ["w1", "w3"], "nodes": ["a", "d"], "machine": {}})
    assert (group.is_lost, group.is_silent) == (False, False)
    assert capsys.readouterr().out == "continuing on w1, w3\n"


@pytest.mark.usefixtures("alive")
def test_a_worker_that_is_silent_for_some_time_and_answers_again_is_reported(
    capsys: pytest.CaptureFixture[str],
) -> None:
    group = group_on({"a": "w1"})
    for silence in (0.1, SILENT_SECONDS + 1, SILENT_SECONDS + 2):
        group.check_heartbeat(silence)
    assert (group.is_lost, group.is_silent) == (False, True)
    group.check_heartbeat(0.1)
    silent, again = capsys.readouterr().out.splitlines()
    assert "w1 has not answered for 9 s" in silent
    assert "w1" in again
