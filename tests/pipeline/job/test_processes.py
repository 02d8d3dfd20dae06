"""Processes without Ray: what they raise, print and leave, and a caller's script that is not run again in them."""

import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from infra.errors import UserError
from infra.storage.directory import StorageDir
from pipeline.books.sources import build_inventory
from pipeline.config import TokenizeConfig
from pipeline.job.plan import Partition, make_partitions
from pipeline.job.processes import run_partitions


@pytest.fixture
def partitions(tmp_path: Path, write_books: Callable[..., Path]) -> list[Partition]:
    config = TokenizeConfig((str(write_books(tmp_path / "books", 40, words=12_000)),), shard_size=1_000_000)
    return make_partitions(build_inventory(config.sources), config)


def test_every_piece_is_done_once_and_no_process_is_left(tmp_path: Path, partitions: list[Partition]) -> None:
    done = [
        summary["partition"]
        for summary in run_partitions(partitions, StorageDir.of(tmp_path / "out"), f"test-{uuid.uuid4()}", workers=2)
    ]
    assert sorted(done) == list(range(len(partitions)))
    others = psutil.Process().children()  # of other tests
    begun = run_partitions(partitions, StorageDir.of(tmp_path / "begun"), f"test-{uuid.uuid4()}", workers=2)
    next(begun)
    assert len(set(psutil.Process().children()) - set(others)) == 2
    begun.close()
    assert set(psutil.Process().children()) <= set(others)
    assert list((tmp_path / "begun").rglob(".partial-*")) == []


def test_a_mistake_is_raised_as_the_piece_raised_it_and_a_bug_with_its_traceback(
    tmp_path: Path, partitions: list[Partition]
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RuntimeError, match=r"Partition 00000\d failed:\n(?s:.)*NotADirectoryError"):
        list(run_partitions(partitions, StorageDir.of(tmp_path / "file"), f"test-{uuid.uuid4()}", workers=2))
    (tmp_path / "books/book 0007.txt").unlink()
    with pytest.raises(UserError, match=r"book 0007\.txt was deleted"):
        list(run_partitions(partitions, StorageDir.of(tmp_path / "out"), f"test-{uuid.uuid4()}", workers=2))


def test_processes_that_cannot_start_are_not_started_for_ever(
    tmp_path: Path, partitions: list[Partition], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken/gigatoken").mkdir(parents=True)
    (tmp_path / "broken/gigatoken/__init__.py").write_text("import os; os.kill(os.getpid(), 4)")  # SIGILL
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "broken"))
    with pytest.raises(UserError, match=r"code -4\. .*infra\.doctor"):
        list(run_partitions(partitions, StorageDir.of(tmp_path / "out"), f"test-{uuid.uuid4()}", workers=2))


def test_a_script_without_a_guard_runs_once_and_a_module_of_its_folder_hides_none_of_ours(
    tmp_path: Path, write_books: Callable[..., Path], store: str
) -> None:
    write_books(tmp_path / "books", 5)
    (tmp_path / "train.py").write_text("raise AssertionError")
    (tmp_path / "script.py").write_text(
        "from pipeline import make_shards\n"
        "from pipeline.config import TokenizeConfig\n"
        f"made = make_shards(TokenizeConfig(('books',), out='tokens', tracking_uri={store!r}))\n"
        "print('made', made.splits['train']['books'] + made.splits['val']['books'])\n"
        "import sys; print('ray' in sys.modules)\n"
    )
    root = Path(__file__).parent.parent.parent.parent
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env={"PYTHONPATH": str(root)}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("made 5\nFalse\n")
    assert done.stdout.count("made 5") == 1
