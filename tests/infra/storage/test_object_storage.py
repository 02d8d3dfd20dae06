"""A file in object storage reads like a local one, and requests end: on a real S3 server, and on one that is silent."""

import io
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infra.errors import UserError
from infra.storage import object_storage
from infra.storage.directory import StorageDir
from infra.storage.object_storage import list_files, open_file

S3 = tuple[str, Callable[[float], None]]


@given(st.data())
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])  # each has a file of its own
def test_a_remote_file_reads_like_a_local_one(bucket: str, data: st.DataObject) -> None:
    """Whatever its reader looks for: archives are read from their end."""
    content = bytes(range(256)) * 3
    StorageDir.of(f"s3://places/like/{bucket}").write("file", content)
    local = io.BytesIO(content)
    with open_file(f"s3://places/like/file{bucket}") as buffered:
        whole: Any = buffered
        remote = whole.raw if data.draw(st.booleans()) else whole
        for _ in range(data.draw(st.integers(1, 8))):
            whence = data.draw(st.sampled_from([io.SEEK_SET, io.SEEK_CUR, io.SEEK_END]))
            least = {io.SEEK_SET: 0, io.SEEK_CUR: -local.tell(), io.SEEK_END: -len(content)}[whence]
            offset = data.draw(st.integers(least, least + len(content)))
            assert remote.seek(offset, whence) == local.seek(offset, whence)
            size = data.draw(st.integers(0, 300))
            assert remote.read(size) == local.read(size)
            assert remote.tell() == local.tell()
        begin = data.draw(st.integers(0, len(content)))
        assert (remote.seek(begin), remote.read()) == (begin, content[begin:])


@pytest.mark.parametrize("name", ["a b.txt", "ä#%.txt", "100%25.txt", "plus+and&.txt", "why?.txt", "a%2Fb"])
def test_any_name_is_written_listed_and_read(bucket: str, name: str) -> None:
    place = StorageDir.of(f"s3://places/names/{bucket}")
    place.write(name, b"content")
    assert place.list_files()[name] == 7
    (path,) = {entry.path for entry in list_files(place.address)} & {f"places/names/{name}"}
    assert object_storage.read(f"s3://{quote(path)}{bucket}") == place.read(name) == b"content"
    place.remove([name, "never-there"])
    assert not place.exists(name)


def test_what_storage_refuses_for_good_is_said_at_once(bucket: str) -> None:
    began = time.monotonic()
    with pytest.raises(UserError, match="the bucket nowhere does not exist"):
        StorageDir.of(f"s3://nowhere/{bucket}").write("file", b"content")
    with pytest.raises(UserError, match=r"Cannot open s3://places.*no_setting"):
        StorageDir.of("s3://places/?no_setting=1").write("file", b"content")
    with pytest.raises(UserError, match=r"hf://.* is read-only.*s3://"):
        StorageDir.of("hf://datasets/org/books").write("file", b"content")
    assert time.monotonic() - began < 5


def test_a_profile_has_the_credentials_where_the_environment_has_none(
    bucket: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "credentials").write_text("[mine]\naws_access_key_id = key\naws_secret_access_key = secret\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    object_storage._open_store.cache_clear()
    monkeypatch.setenv("AWS_PROFILE", "gone")
    with pytest.raises(UserError, match="gone"):
        StorageDir.of(f"s3://places/{bucket}").list_files()
    monkeypatch.setenv("AWS_PROFILE", "mine")
    StorageDir.of(f"s3://places/profile/{bucket}").write("file", b"content")


def test_a_large_file_arrives_whole_through_a_storage_that_fails_now_and_then(s3: S3, tmp_path: Path) -> None:
    query, set_rate = s3
    content = os.urandom(20 << 20)  # in several parts
    (tmp_path / "file").write_bytes(content)
    set_rate(0.2)
    place = StorageDir.of(f"s3://places/large/{query}")
    place.upload(tmp_path / "file", "file")
    place.download("file", tmp_path / "copy", checksum=place.checksum("file"))
    assert (tmp_path / "copy").read_bytes() == content


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
from infra.storage import object_storage
object_storage.WARN_AFTER_SECONDS, object_storage.REQUEST_SECONDS = 0.5, 1.0
object_storage.RETRY_TIMEOUT_SECONDS = float(sys.argv.pop(1))
runpy.run_module("pipeline.inspect", run_name="__main__", alter_sys=True)
"""


def inspecting(endpoint: str, patience: float) -> subprocess.Popen[str]:
    """A command that wants to read a data set there, and has so many seconds of patience."""
    secrets = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    address = f"s3://places/tokens?endpoint=http://{endpoint}&region=us-east-1"
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, str(patience), address], env=os.environ | secrets, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def test_a_command_ends_though_storage_never_answers(unanswered: str) -> None:
    with inspecting(unanswered, 2.0) as process:
        began, last = None, ""
        assert process.stderr
        for line in process.stderr:
            if "Press Ctrl-C to exit." in line:
                began = time.monotonic()
            last = line
        process.wait(timeout=60)
    assert began is not None
    assert "Check the address, your credentials and the network" in last
    assert process.returncode == 2
    assert time.monotonic() - began < 10.0


def test_ctrl_c_ends_a_command_that_waits_for_storage(unanswered: str) -> None:
    with inspecting(unanswered, 600.0) as process:
        assert process.stderr
        while "Press Ctrl-C to exit" not in process.stderr.readline():
            pass
        process.send_signal(signal.SIGINT)
        began = time.monotonic()
        _, said = process.communicate(timeout=60)
    assert "Interrupted. Finished work is saved" in said
    assert process.returncode == 130
    assert time.monotonic() - began < 10.0
