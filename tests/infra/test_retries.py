"""Requests to object storage are tried again, and end: on a real S3 server, and on servers that never answer."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from infra import retries
from infra.errors import UserError
from infra.object_storage import locate
from infra.place import Place


def test_what_storage_refuses_for_good_is_not_tried_again(s3: tuple[str, Callable[[float], None]]) -> None:
    system, path = locate(f"s3://nowhere/file{s3[0]}")
    tried = []

    def write() -> None:
        tried.append(path)
        with system.open_output_stream(path) as file:
            file.write(b"content")

    with pytest.raises(UserError, match=r"cannot be written \(.*bucket does not exist\): check the address and your"):
        retries.with_retries("s3://nowhere/file", write, "written")
    assert len(tried) == 1


@pytest.mark.parametrize("failures", range(retries.ATTEMPTS + 1))
def test_failures_are_retried_with_growing_pauses(failures: int) -> None:
    pauses: list[float | None] = []

    class Recorder(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            pauses.append(timeout)
            return False

    left = iter(range(failures))

    def act() -> str:
        if next(left, None) is not None:
            raise OSError("busy")
        return "done"

    if failures < retries.ATTEMPTS:
        assert retries._attempts("s3://bucket/file", act, "read", Recorder()) == "done"
    else:
        with pytest.raises(UserError, match="cannot be read, after 5 attempts: busy"):
            retries._attempts("s3://bucket/file", act, "read", Recorder())
    assert pauses == [0.2, 0.4, 0.8, 1.6][:failures]


def test_a_failure_is_retried_until_it_has_gone() -> None:
    left = iter(range(1))

    def act() -> str:
        if next(left, None) is not None:
            raise OSError("busy")
        return "done"

    assert retries.with_retries("s3://bucket/file", act) == "done"


def test_a_missing_file_is_not_retried() -> None:
    asked: list[int] = []

    def act() -> None:
        asked.append(1)
        raise FileNotFoundError

    with pytest.raises(FileNotFoundError):
        retries.with_retries("s3://bucket/file", act)
    assert len(asked) == 1


def test_what_was_given_up_is_not_tried_again(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """A write whose failure was reported must not happen later."""
    monkeypatch.setattr(retries, "SILENT_SECONDS", 0.02)
    monkeypatch.setattr(retries, "_told", [float("-inf")])
    answer, tried = threading.Event(), list[int]()

    def act() -> None:
        tried.append(1)
        answer.wait()
        raise OSError("busy")

    def write(_: int) -> None:
        with pytest.raises(UserError, match=r"file cannot be written: no complete answer within 0 s\. Check"):
            retries.with_retries("s3://bucket/file", act, "written", seconds=0.3)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(write, range(2)))
    answer.set()
    for thread in tuple(retries._working):
        thread.join(10)
    assert len(tried) == 2
    assert not retries._working
    assert capsys.readouterr().err.count("Still waiting for s3://bucket/file") == 1, "once for many requests"


def test_a_large_file_may_take_longer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(retries, "SILENT_SECONDS", 0.1)
    monkeypatch.setattr(retries, "_told", [float("-inf")])

    def act() -> str:
        time.sleep(0.3)
        return "sent"

    assert retries.with_retries("s3://bucket/file", act, "written", seconds=0.1, size=10_000_000) == "sent"
    assert capsys.readouterr().err == "", "which is no reason to worry"
    with pytest.raises(UserError, match="no complete answer"):
        retries.with_retries("s3://bucket/file", act, "written", seconds=0.1, size=10_000)


def test_a_place_that_does_not_answer_is_refused_by_its_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = threading.Event()

    def write(place: Place, name: str, content: bytes) -> None:
        retries.with_retries(str(place / name), answer.wait, "written", seconds=0.05)

    monkeypatch.setattr(Place, "write", write)
    with pytest.raises(UserError, match=r"^--out s3://bucket/run cannot be written \(no complete answer within 0 s"):
        Place.of("s3://bucket/run").refuse_unusable("--out")
    answer.set()


@pytest.fixture(params=["silent", "byte by byte"])
def unanswered(request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of a storage that accepts requests, and answers them with nothing or with a byte a second."""
    ended = threading.Event()

    def answer(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\nContent-Type: text/xml\r\n\r\n")
            while not ended.wait(1.0):
                connection.sendall(b" ")

    with socket.create_server(("127.0.0.1", 0)) as server:
        held = list[socket.socket]()

        def serve() -> None:
            with suppress(OSError):
                while True:
                    held.append(server.accept()[0])
                    if request.param != "silent":
                        threading.Thread(target=answer, args=(held[-1],), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        ended.set()
        server.shutdown(socket.SHUT_RDWR)
        for connection in held:
            connection.close()


COMMAND = """
import runpy, sys
from infra import retries
retries.SILENT_SECONDS, retries.PATIENCE_SECONDS = 0.5, float(sys.argv.pop(1))
runpy.run_module("pipeline.inspect", run_name="__main__", alter_sys=True)
"""


def inspecting(endpoint: str, patience: float) -> subprocess.Popen[str]:
    """A command that wants to read a data set there, and has so many seconds of patience."""
    secrets = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_EC2_METADATA_DISABLED": "true"}
    address = f"s3://places/tokens?endpoint_override={endpoint}&scheme=http&region=us-east-1"
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, str(patience), address], env=os.environ | secrets, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def test_a_command_ends_though_storage_never_answers(unanswered: str) -> None:
    """And at once: Arrow would wait at Python's exit for as long as the storage does not answer."""
    with inspecting(unanswered, 2.0) as process:
        began, last = None, ""
        assert process.stderr
        for line in process.stderr:
            if "after 0 s, and for up to 2 s; Ctrl-C exits." in line:
                began = time.monotonic()
            last = line
        process.wait(timeout=60)
    assert began is not None
    assert "no complete answer within 2 s. Check the address and the network" in last
    assert process.returncode == 2
    assert time.monotonic() - began < 10.0


def test_ctrl_c_ends_a_command_that_waits_for_storage(unanswered: str) -> None:
    with inspecting(unanswered, 600.0) as process:
        assert process.stderr
        while "Ctrl-C exits" not in process.stderr.readline():
            pass
        process.send_signal(signal.SIGINT)
        began = time.monotonic()
        _, said = process.communicate(timeout=60)
    assert "Interrupted. Finished work is kept" in said
    assert process.returncode == 130
    assert time.monotonic() - began < 10.0
