"""Files appear whole or not at all, whatever happens to the writer."""

import io
import os
import resource
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infra.errors import UserError
from infra.place import Place
from infra.storage import (
    TEMPORARY,
    atomic_file,
    clear_temporaries,
    locate,
    lock,
    open_file,
    with_retries,
    write_json,
)


def test_an_error_leaves_the_old_file_and_no_temporary_one(tmp_path: Path) -> None:
    target = tmp_path / "manifest.json"
    write_json(target, {"old": 1})

    def fail_half_way() -> None:
        with atomic_file(target) as file:
            file.write(b"new and unfini")
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        fail_half_way()
    assert target.read_text() == '{\n  "old": 1\n}\n'
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]


def test_a_killed_writer_leaves_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "shard.arrow"
    target.write_bytes(b"old")
    code = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom infra.storage import atomic_file\n"
        "with atomic_file(Path(sys.argv[1])) as file:\n"
        "    file.write(b'x' * 100_000)\n    file.flush()\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(target)], env=os.environ | {"PYTHONPATH": str(Path.cwd())})
    assert done.returncode == -signal.SIGKILL
    assert target.read_bytes() == b"old"
    assert list(tmp_path.glob(f"{TEMPORARY}*"))
    clear_temporaries(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["shard.arrow"]


def test_a_temporary_file_is_private_while_it_is_written(tmp_path: Path) -> None:
    with atomic_file(tmp_path / "secret") as file:
        file.write(b"x")
        (temporary,) = tmp_path.iterdir()
        assert temporary.stat().st_mode & 0o077 == 0


def test_a_link_that_another_user_planted_is_not_followed(tmp_path: Path) -> None:
    """In a shared folder: by the name that our temporary file will have, and by that of the file itself."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    victim.chmod(0o600)
    for name in (f"{TEMPORARY}{os.getpid()}-manifest.json", "manifest.json"):
        (tmp_path / name).symlink_to(victim)
    write_json(tmp_path / "manifest.json", {})
    assert victim.read_text() == "mine"
    assert victim.stat().st_mode & 0o777 == 0o600
    assert not (tmp_path / "manifest.json").is_symlink()
    (tmp_path / "lock").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic links"), lock(tmp_path / "lock", "somebody has it"):
        pass


def test_a_full_disk_is_reported_and_leaves_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "manifest.json"
    write_json(target, {"old": 1})
    old, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, most))
    try:
        with pytest.raises(UserError, match=r"manifest\.json cannot be written \(File too large\): make room"):
            write_json(target, {"new": "x" * 100_000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (old, most))
    with pytest.raises(UserError, match="cannot be written"):
        write_json(tmp_path / "gone" / "manifest.json", {})
    assert target.read_text() == '{\n  "old": 1\n}\n'
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]


def test_a_written_file_survives_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it is on the disk before it takes the name, and the name before the writer continues."""
    target, done = tmp_path / "manifest.json", list[tuple[str, int]]()
    fsync, replace = os.fsync, os.replace

    def recorded_fsync(descriptor: int) -> None:
        fsync(descriptor)
        state = os.fstat(descriptor)
        done.append(("folder", state.st_ino) if stat.S_ISDIR(state.st_mode) else ("file", state.st_size))

    def recorded_replace(source: Path, destination: Path) -> None:
        replace(source, destination)
        done.append(("named", destination.stat().st_size))

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "replace", recorded_replace)
    with atomic_file(target) as file:
        file.write(b"x" * 100)
    assert done == [("file", 100), ("named", 100), ("folder", tmp_path.stat().st_ino)]


def test_one_process_at_a_time_has_a_lock(tmp_path: Path) -> None:
    """Also within one process, and it is free once the block has ended, by an error too."""
    path = tmp_path / "lock"
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom infra.errors import UserError\nfrom infra.storage import lock\n"
        "try:\n    with lock(Path(sys.argv[1]), 'taken'):\n"
        "        print('held', flush=True)\n        os.kill(os.getpid(), 9)\n"
        "except UserError as refusal:\n    print(refusal)\n"
    )

    def other_process() -> str:
        done = subprocess.run(
            [sys.executable, "-c", code, str(path)], env=os.environ | {"PYTHONPATH": str(Path.cwd())},
            capture_output=True, text=True,
        )  # fmt: skip
        return done.stdout.strip()

    def fail_while_held() -> None:
        with lock(path, "taken"):
            raise RuntimeError("half way")

    with lock(path, "taken"):
        for patience in (0.0, 0.15):
            with pytest.raises(UserError, match="taken"), lock(path, "taken", patience=patience):
                pass
        assert other_process() == "taken"
    with pytest.raises(RuntimeError, match="half way"):
        fail_while_held()
    with lock(path, "taken"):
        pass
    assert other_process() == "held"
    with lock(path, "taken"):  # the other process was killed while it held the lock
        pass


def test_a_lock_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with ExitStack() as first:
        first.enter_context(lock(path, "taken"))
        release = threading.Timer(0.15, first.close)
        release.start()
        with lock(path, "taken", patience=30.0):
            release.join()


@pytest.mark.parametrize("end", ["", "raise SystemExit(2)", "raise RuntimeError('a bug')"])
def test_a_process_that_used_a_bucket_ends(end: str, bucket: str, tmp_path: Path) -> None:
    """With the credentials of a pod, Arrow waits at the end of the process for filesystems that are still there."""
    (tmp_path / "token").write_text("token")
    program = (
        "from infra.place import Place\n"
        f"place = Place.of('s3://places/one/{bucket}')\n"
        "place.write('file', b'content')\n"
        "try:\n"
        "    place.read('missing')\n"
        "except FileNotFoundError as missing:\n"
        f"    {end or 'pass'}\n"
        "print(place.read('file'))"
    )
    identity = {
        "AWS_ROLE_ARN": "arn:aws:iam::123456789012:role/trainer",
        "AWS_REGION": "us-east-1",
        "AWS_WEB_IDENTITY_TOKEN_FILE": str(tmp_path / "token"),
    }
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | identity, capture_output=True, text=True, timeout=20
    )
    expected = {"": (0, "b'content'\n"), "raise SystemExit(2)": (2, ""), "raise RuntimeError('a bug')": (1, "")}
    assert (done.returncode, done.stdout) == expected[end], done.stderr


def test_what_storage_refuses_for_good_is_not_tried_again(s3: tuple[str, Callable[[float], None]]) -> None:
    system, path = locate(f"s3://nowhere/file{s3[0]}")
    tried = []

    def write() -> None:
        tried.append(path)
        with system.open_output_stream(path) as file:
            file.write(b"content")

    with pytest.raises(UserError, match=r"cannot be written \(.*bucket does not exist\): check the address and your"):
        with_retries("s3://nowhere/file", write, "written")
    assert len(tried) == 1


@given(st.data())
@settings(
    deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture]
)  # each example has a file of its own
def test_a_remote_file_reads_like_a_local_one(bucket: str, data: st.DataObject) -> None:
    """Whatever its reader looks for: archives are read from their end."""
    content = bytes(range(256)) * 3
    Place.of(f"s3://places/like/{bucket}").write("file", content)
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
