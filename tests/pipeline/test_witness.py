"""Notes of deaths outlive whatever kills, and are whole or not there."""

import json
from pathlib import Path

import pytest

from pipeline import witness
from pipeline.witness import Witness


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the notes of a run."""
    monkeypatch.setattr(witness, "notes_folder", lambda run: tmp_path / "notes" / run)
    (tmp_path / "notes" / "run").mkdir(parents=True)
    return tmp_path / "notes" / "run"


def test_deaths_are_counted_from_one_worker_to_the_next(notes: Path) -> None:
    for deaths in range(witness.DEATHS):
        assert Witness("run", "000000").at("book") is True, deaths  # and dies
    assert Witness("run", "000000").at("book") is False
    assert [path.name for path in notes.iterdir() if path.name.startswith(".partial")] == []


@pytest.mark.parametrize("cut", [b"", b'{"boo', b'{"book": 1, "\\xc3'])
def test_counts_that_a_kill_cut_short_begin_again(notes: Path, cut: bytes) -> None:
    Witness("run", "000000").at("book")
    (notes / "000000.json").write_bytes(cut)
    with Witness("run", "000000") as after:
        assert after.deaths == {"book": 1}
        assert json.loads((notes / "000000.json").read_bytes()) == {"book": 1}
    assert list(notes.iterdir()) == []
