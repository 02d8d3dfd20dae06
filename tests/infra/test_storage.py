"""Files appear whole or not at all, whatever happens to the writer."""

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from infra.errors import UserError
from infra.storage import TEMPORARY, atomic_file, clear_temporaries, write_json


def test_an_error_leaves_the_old_file_and_no_litter(tmp_path: Path) -> None:
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


def test_a_disk_that_takes_no_more_is_a_sentence_and_leaves_the_old_file(tmp_path: Path) -> None:
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
