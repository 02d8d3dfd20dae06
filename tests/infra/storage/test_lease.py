"""A place in object storage is held against commands of other machines, which share nothing but that storage."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import pytest

from infra.errors import UserError
from infra.ray.cluster import PROJECT_DIR
from infra.storage import object_storage
from infra.storage.directory import StorageDir
from infra.storage.lease import LEASE_FILE, LeaseTiming, Write, hold_lease

S3 = tuple[str, Callable[[float], None]]
TIMING = LeaseTiming(renew_seconds=0.2, poll_seconds=0.1)
"""Leases are renewed and read often."""


class Held(Protocol):
    """``held(machine)`` holds the place for a block, on a machine with a scratch of its own."""

    def __call__(
        self, machine: str, stale_seconds: float = 45.0, write: Write = object_storage.write
    ) -> AbstractContextManager[None]: ...


HOLD = """
import sys
from infra.storage.directory import StorageDir
from infra.storage.lease import LeaseTiming, hold_lease
place = StorageDir.of(sys.argv[1])
with place.lock("held on this machine"), hold_lease(place, LeaseTiming(renew_seconds=float(sys.argv[2]))):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def place(bucket: str) -> StorageDir:
    return StorageDir.of(f"s3://places/run{bucket}")


@pytest.fixture
def held(place: StorageDir, set_scratch: Callable[[Path], None], tmp_path: Path) -> Held:
    @contextmanager
    def held(machine: str, stale_seconds: float = 45.0, write: Write = object_storage.write) -> Iterator[None]:
        (tmp_path / machine).mkdir(exist_ok=True)
        set_scratch(tmp_path / machine)
        timing = replace(TIMING, stale_seconds=stale_seconds)
        with place.lock("held on this machine"), hold_lease(place, timing, write):
            yield

    return held


@contextmanager
def process(place: StorageDir, machine: Path, renew: float = 0.2) -> Iterator[subprocess.Popen[str]]:
    """A process that holds ``place`` on another machine, whose scratch is ``machine``; it is killed at the end.

    It renews its lease every ``renew`` seconds.
    """
    machine.mkdir(exist_ok=True)
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, place.address, str(renew)],
        cwd=PROJECT_DIR, env=os.environ | {"TMPDIR": str(machine)}, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as holder:  # fmt: skip
        try:
            assert holder.stdout
            assert holder.stdout.readline() == "held\n"
            yield holder
        finally:
            holder.kill()


def held_by(place: StorageDir) -> dict[str, Any]:
    """Who has the lease of ``place``; nobody where there is none."""
    return json.loads(place.read(LEASE_FILE)) if place.exists(LEASE_FILE) else {}


def test_a_place_is_held_against_another_machine_until_its_command_ends(place: StorageDir, held: Held, s3: S3) -> None:
    with held("one"):
        mine = held_by(place)["id"]
        for rate in (0.0, 0.2):
            s3[1](rate)
            with pytest.raises(UserError, match=rf"in use by process {os.getpid()} on \S+\. Wait"), held("two"):
                pass
        s3[1](0.0)
        assert held_by(place)["id"] == mine
        assert place.list_files() == {}, "a lease is not among a place's files"
        with pytest.raises(UserError, match=r"^held on this machine$"), held("one"):
            pass
        with (place / "another").exclusive_use(""):
            pass
    assert held_by(place) == {}
    began = time.monotonic()
    with held("two"):
        pass
    assert time.monotonic() - began < 5, "there was nothing to wait for"


def test_of_commands_that_start_together_one_holds_the_place(place: StorageDir, tmp_path: Path) -> None:
    commands = []
    for number in range(3):
        (tmp_path / str(number)).mkdir()
        environment = os.environ | {"TMPDIR": str(tmp_path / str(number))}
        commands.append(
            subprocess.Popen(
                [sys.executable, "-c", HOLD, place.address, "0.2"], cwd=PROJECT_DIR, env=environment, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )
        )  # fmt: skip
    deadline = time.monotonic() + 60
    while sum(command.poll() is None for command in commands) > 1 and time.monotonic() < deadline:
        time.sleep(0.05)  # the one that holds it does so until its input ends, however late another one starts
    said = [command.communicate(timeout=60)[0] for command in commands]
    assert sorted(said) == ["", "", "held\n"]


def test_a_killed_command_delays_other_machines_for_a_limited_time_and_its_own_not_at_all(
    place: StorageDir, held: Held, tmp_path: Path
) -> None:
    with process(place, tmp_path / "one") as killed:
        pass
    assert killed.returncode == -signal.SIGKILL
    content = place.read(LEASE_FILE)
    began = time.monotonic()
    with held("one"):
        assert held_by(place)["process"] == os.getpid()
    assert time.monotonic() - began < 5, "its lock was free, so it had been killed"
    place.write(LEASE_FILE, content)
    began = time.monotonic()
    with held("two", stale_seconds=2.0):
        assert time.monotonic() - began >= 2.0
        assert held_by(place)["process"] == os.getpid()


def test_what_another_command_has_just_written_is_not_overlooked(
    place: StorageDir, held: Held, capfd: pytest.CaptureFixture[str]
) -> None:
    """It ends while this one, which has looked at the place before, waits for it."""
    place.write(LEASE_FILE, b"{}")

    def end() -> None:
        while not capfd.readouterr().err:  # that this one waits
            time.sleep(0.01)
        place.remove([LEASE_FILE])

    ending = threading.Thread(target=end, daemon=True)
    ending.start()
    with pytest.raises(UserError, match="Run this command again"), held("one"):
        pass
    ending.join()


def test_a_command_that_had_stopped_exits_when_its_place_has_been_taken(
    place: StorageDir, held: Held, tmp_path: Path
) -> None:
    with process(place, tmp_path / "one") as stopped:
        stopped.send_signal(signal.SIGSTOP)
        with held("two", stale_seconds=1.0):
            stopped.send_signal(signal.SIGCONT)
            assert stopped.wait(60) == 1  # and not before by itself: its input is still open
            assert held_by(place)["process"] == os.getpid()
        assert stopped.stderr
        assert f"Lost the lock on {place}" in stopped.stderr.read()


def test_a_command_that_had_stopped_exits_when_its_place_has_been_taken_and_left_again(
    place: StorageDir, held: Held, tmp_path: Path
) -> None:
    """Its lease is gone, but so may be the files that it knew."""
    with process(place, tmp_path / "one") as stopped:
        stopped.send_signal(signal.SIGSTOP)
        with held("two", stale_seconds=1.0):
            pass
        assert held_by(place) == {}
        stopped.send_signal(signal.SIGCONT)
        assert stopped.wait(60) == 1
    assert held_by(place) == {}, "it does not take the place back"


def test_a_command_that_ends_before_it_notices_leaves_the_lease_of_the_next_one(
    place: StorageDir, held: Held, tmp_path: Path
) -> None:
    with process(place, tmp_path / "one", renew=100.0) as late, held("two", stale_seconds=1.0):
        late.communicate(timeout=60)
        assert late.returncode == 0
        assert held_by(place)["process"] == os.getpid()


def test_a_renewal_whose_answer_was_lost_is_not_taken_for_another_command(place: StorageDir, held: Held) -> None:
    """The storage has the new version, of which this command knows only the one before."""
    losing = threading.Event()

    def write(uri: str, content: bytes, mode: Any) -> dict[str, Any]:
        version = object_storage.write(uri, content, mode)
        return object_storage.write(uri, content, mode) if mode == "create" or losing.is_set() else version

    began = time.monotonic()
    with held("one", write=write):
        assert time.monotonic() - began < 5, "its own lease is not waited for"
        losing.set()
        time.sleep(1.0)
        losing.clear()
        time.sleep(0.5)
        assert held_by(place)["process"] == os.getpid()
