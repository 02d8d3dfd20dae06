"""Files appear whole or not at all, whatever happens to the writer."""

import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from infra.errors import UserError
from infra.storage.files import TEMPORARY_PREFIX, atomic_file, clear_temporaries, lock, scratch, write_json


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
        "import os, signal, sys\nfrom pathlib import Path\nfrom infra.storage.files import atomic_file\n"
        "with atomic_file(Path(sys.argv[1])) as file:\n"
        "    file.write(b'x' * 100_000)\n    file.flush()\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(target)], env=os.environ | {"PYTHONPATH": str(Path.cwd())})
    assert done.returncode == -signal.SIGKILL
    assert target.read_bytes() == b"old"
    assert list(tmp_path.glob(f"{TEMPORARY_PREFIX}*"))
    clear_temporaries(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["shard.arrow"]


@pytest.mark.parametrize(("umask", "mode"), [(0o077, 0o600), (0o027, 0o640), (0o022, 0o644), (0o002, 0o664)])
def test_the_umask_decides_who_can_read_a_file_also_while_it_is_written(umask: int, mode: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        with atomic_file(tmp_path / "result") as file:
            file.write(b"x")
            (temporary,) = tmp_path.iterdir()
            assert temporary.stat().st_mode & 0o777 == mode
        assert (tmp_path / "result").stat().st_mode & 0o777 == mode
    finally:
        os.umask(before)


def test_a_link_that_another_user_planted_is_not_followed(tmp_path: Path) -> None:
    """In a shared folder: by the name that our temporary file will have, and by that of the file itself."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    victim.chmod(0o600)
    for name in (f"{TEMPORARY_PREFIX}{os.getpid()}-manifest.json", "manifest.json"):
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
        with pytest.raises(UserError, match=r"Cannot write \S*manifest\.json: File too large.*Free disk space"):
            write_json(target, {"new": "x" * 100_000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (old, most))
    with pytest.raises(UserError, match="Cannot write"):
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
        "import os, sys\nfrom pathlib import Path\n"
        "from infra.errors import UserError\nfrom infra.storage.files import lock\n"
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
        for timeout in (0.0, 0.15):
            with pytest.raises(UserError, match="taken"), lock(path, "taken", timeout=timeout):
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
        with lock(path, "taken", timeout=30.0):
            release.join()


def test_scratch_is_private_and_never_another_users(tmp_path: Path, set_scratch: Callable[[Path], None]) -> None:
    set_scratch(tmp_path)
    folder = scratch("data", "abc")
    assert folder.stat().st_mode & 0o077 == 0
    assert folder.is_relative_to(tmp_path)
    shutil.rmtree(folder.parents[1])
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / f"throughline-{os.getuid()}").symlink_to(elsewhere)
    with pytest.raises(UserError, match=r"belongs to another user.*TMPDIR"):
        scratch("data")


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o702])
def test_scratch_into_which_others_could_have_put_files_is_refused(
    mode: int, tmp_path: Path, set_scratch: Callable[[Path], None]
) -> None:
    set_scratch(tmp_path)
    scratch("data").parent.chmod(mode)
    with pytest.raises(UserError, match=r"is accessible to other users.*TMPDIR"):
        scratch("data")
