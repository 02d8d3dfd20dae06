"""A place in object storage is held against commands of other machines, which share nothing but that storage."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from infra import claim
from infra.claim import sole_user
from infra.cluster import PROJECT
from infra.errors import UserError
from infra.place import CLAIMS, Place

S3 = tuple[str, Callable[[float], None]]
Held = Callable[[str], AbstractContextManager[None]]

HOLD = """
import sys
from infra import claim
from infra.place import Place
claim.RENEW_SECONDS = 0.2
with claim.sole_user(Place(sys.argv[1]), "held on this machine"):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def place(bucket: str, monkeypatch: pytest.MonkeyPatch) -> Place:
    """A place in object storage, where claims are renewed and looked at often."""
    monkeypatch.setattr(claim, "RENEW_SECONDS", 0.2)
    monkeypatch.setattr(claim, "LOOK_SECONDS", 0.1)
    return Place.of(f"s3://places/run{bucket}")


@pytest.fixture
def held(place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Held:
    """``held(machine)`` holds the place for a block, on a machine with a scratch of its own."""

    @contextmanager
    def held(machine: str) -> Iterator[None]:
        (tmp_path / machine).mkdir(exist_ok=True)
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path / machine))
        with sole_user(place, "held on this machine"):
            yield

    return held


@contextmanager
def process(place: Place, machine: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds ``place`` on another machine, whose scratch is ``machine``; it is killed at the end."""
    machine.mkdir(exist_ok=True)
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, place.address], cwd=PROJECT, env=os.environ | {"TMPDIR": str(machine)}, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as holder:  # fmt: skip
        try:
            assert holder.stdout
            assert holder.stdout.readline() == "held\n"
            yield holder
        finally:
            holder.kill()


def claims(place: Place) -> set[str]:
    """The claims to ``place``."""
    return set((place / CLAIMS).files())


def test_a_place_is_held_against_another_machine_until_its_command_ends(
    place: Place, held: Held, s3: S3, capsys: pytest.CaptureFixture[str]
) -> None:
    refusal = rf"s3://places/run\S* is in use by process {os.getpid()} on \S+: wait for it, or stop it there"
    with held("one"):
        for rate in (0.0, 0.2):
            s3[1](rate)
            with pytest.raises(UserError, match=refusal), held("two"):
                pass
        s3[1](0.0)
        assert len(claims(place)) == 1, "the refused ones are gone"
        assert place.files() == {}, "claims are not among a place's files"
        with pytest.raises(UserError, match=r"^held on this machine$"), held("one"):
            pass
        with sole_user(place / "another", ""):
            pass
    capsys.readouterr()
    assert claims(place) == set()
    with held("two"):
        pass
    assert capsys.readouterr().err == "", "there was nothing to wait for"


def test_a_killed_command_delays_other_machines_for_a_limited_time_and_its_own_not_at_all(
    place: Place, held: Held, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    with process(place, tmp_path / "one") as killed:
        pass
    assert killed.returncode == -signal.SIGKILL
    (left,) = claims(place)
    content = (place / CLAIMS).read(left)
    with held("one"):
        assert left not in claims(place), "its lock was free, so it had been killed"
    assert capsys.readouterr().err == ""
    began = time.monotonic()
    monkeypatch.setattr(claim, "STALE_SECONDS", 2.0)
    (place / CLAIMS).write(left, content)
    with held("two"):
        assert time.monotonic() - began > 0.9  # storage may record whole seconds
        assert left not in claims(place)
    assert f"ago by process {killed.pid} on " in (said := capsys.readouterr().err)
    assert "waiting up to " in said


def test_what_another_command_has_just_written_is_not_overlooked(place: Place, held: Held) -> None:
    """It ends while this one, which has looked at the place before, waits for it."""
    there = place / CLAIMS
    there.write("other.json", b"{}")
    ending = threading.Timer(0.5, there.remove, [["other.json"]])
    ending.start()
    with pytest.raises(UserError, match=r"another command has just ended in .*: run the same one again"), held("one"):
        pass
    ending.join()


def test_a_claim_that_is_removed_as_soon_as_it_is_made_is_made_again(
    place: Place, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a command that takes the place at that moment from one that was killed."""
    write, lost = Place.write, list[str]()

    def write_and_lose(self: Place, name: str, content: bytes) -> None:
        write(self, name, content)
        if not lost:
            lost.append(name)
            self.remove([name])

    monkeypatch.setattr(Place, "write", write_and_lose)
    with held("one"):
        assert claims(place) == set(lost)


def test_a_command_that_had_stopped_exits_when_its_place_has_been_taken(
    place: Place, held: Held, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claim, "STALE_SECONDS", 1.0)
    with process(place, tmp_path / "one") as stopped:
        stopped.send_signal(signal.SIGSTOP)
        (theirs,) = claims(place)
        with held("two"):
            (place / CLAIMS).write(theirs, b"{}")  # as if it had been about to renew it
            while theirs in claims(place):
                time.sleep(0.1)
            stopped.send_signal(signal.SIGCONT)
            assert stopped.wait(60) == 1  # and not before by itself: its input is still open
            assert len(claims(place)) == 1
        assert stopped.stderr
        assert "is in use by another command, because this one had stopped for more than 45 s" in stopped.stderr.read()
