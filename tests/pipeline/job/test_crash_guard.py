"""The notes of the crash guard survive a killed worker, and are complete or absent."""

import json
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.errors import UserError
from infra.storage.files import scratch
from pipeline.job import crash_guard
from pipeline.job.crash_guard import CrashGuard


@pytest.fixture
def notes(tmp_path: Path, set_scratch: Callable[[Path], None]) -> Path:
    set_scratch(tmp_path)
    return scratch("run")


@pytest.mark.parametrize("book", ["book", "ein Büchlein \u2026"])
def test_crashes_are_counted_across_workers(notes: Path, book: str) -> None:
    for deaths in range(crash_guard.MAX_CRASHES):
        assert CrashGuard("run", "000000").enter("a longer name than that of the next book") is True
        assert CrashGuard("run", "000000").enter(book) is (deaths < crash_guard.MAX_CRASHES), deaths  # and dies
    assert CrashGuard("run", "000000").enter(book) is False
    assert [path.name for path in notes.iterdir() if path.name.startswith(".partial")] == []


@pytest.mark.parametrize("cut", [b"", b'{"boo', b'{"book": 1, "\\xc3'])
def test_truncated_counts_start_over(notes: Path, cut: bytes) -> None:
    CrashGuard("run", "000000").enter("book")
    (notes / "000000.json").write_bytes(cut)
    with CrashGuard("run", "000000") as after:
        assert after.crash_counts == {"book": 1}
        assert json.loads((notes / "000000.json").read_bytes()) == {"book": 1}
    assert list(notes.iterdir()) == []


def test_a_worker_that_dies_before_its_first_book_counts_against_no_book(notes: Path) -> None:
    CrashGuard("run", "000000").enter("book")
    CrashGuard("run", "000000")
    with CrashGuard("run", "000000") as after:
        assert after.crash_counts == {"book": 1}


def test_a_folder_of_another_user_is_refused(notes: Path) -> None:
    CrashGuard("run", "000000").enter("book")
    notes.parent.chmod(0o777)
    with pytest.raises(UserError, match=r"is accessible to other users.*TMPDIR"):
        CrashGuard("run", "000000")
    notes.parent.rename(notes.parent.with_name("elsewhere"))
    notes.parent.symlink_to("elsewhere")
    with pytest.raises(UserError, match=r"belongs to another user.*TMPDIR"):
        CrashGuard("run", "000000")


def test_a_full_temporary_folder_is_named(notes: Path) -> None:
    old, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    with CrashGuard("run", "000000") as guard:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, most))
        try:
            with pytest.raises(UserError, match=r"^Cannot write to /\S* on \S+: .* disk space"):
                guard.enter("book")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (old, most))
    notes.parent.joinpath("file").write_text("")
    with pytest.raises(UserError, match="disk space or set TMPDIR"):
        CrashGuard("file/run", "000000")
