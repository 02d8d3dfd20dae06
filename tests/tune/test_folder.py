"""A search's folder: one process at a time, and only the search that it was."""

from dataclasses import replace
from pathlib import Path

import pytest

from infra.errors import UserError
from infra.storage import TEMPORARY
from infra.tracking.key import RunKey
from tune.config import SearchConfig
from tune.folder import TRIALS, begin, kept_config, kept_identity, locked, resumed_parent
from tune.plan import make_search
from tune.report import summary
from tune.trial.row import Proposal, read_rows

IDENTITY = {"confirm": 3, "memory_limit": 10**9, "knobs": "compile"}


def test_another_search_is_refused_by_what_differs(tmp_path: Path) -> None:
    begin(tmp_path, SearchConfig(name="one"), IDENTITY, RunKey("sqlite:///none.db", "1", "a", "journal"))
    for now, said in (
        (IDENTITY | {"confirm": 2}, "confirm was 3 and is now 2"),
        (IDENTITY | {"searcher": "grid"}, "searcher was None and is now 'grid'"),
        ({"confirm": 3, "knobs": "compile"}, "memory_limit was 1000000000 and is now None"),
    ):
        with pytest.raises(UserError, match=said):
            resumed_parent(tmp_path, now)


def test_one_process_at_a_time_and_no_halves_of_rows(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "one"
    with locked(folder), pytest.raises(UserError, match="another process runs the search"), locked(folder):
        pass
    half = folder / TRIALS / f"{TEMPORARY}1-m8.json"
    half.write_text("{")
    row = folder / TRIALS / "m8.json"
    row.write_text("{}")
    with locked(folder):
        assert not half.exists()
        assert row.exists()


def test_a_search_of_an_earlier_version_is_read(small_shards: Path) -> None:
    """``fixtures/earlier`` was written by commit e44792d: a grid of two sizes, each confirmed once."""
    earlier = Path(__file__).parent / "fixtures" / "earlier"
    config = kept_config(earlier)
    search = make_search(replace(config, training=replace(config.training, data=str(small_shards)), resume="one"))
    rows = read_rows(earlier / TRIALS)
    assert [(row.candidate.micro_batch, row.stage, row.outcome) for row in rows] == [
        (1, "probe", "ok"), (2, "probe", "ok"), (1, "confirm", "ok"), (2, "confirm", "ok")
    ]  # fmt: skip
    assert search.strategy.propose(rows) is None, "nothing is left to run"
    assert (earlier / "leaderboard.md").read_text().strip() in summary(search, rows)
    kept = kept_identity(earlier)
    assert search.identity() | {"data": ""} == kept | {"data": ""}, "it is continued as the search that it was"
    assert {row.key for row in rows} == {
        Proposal(row.candidate, row.stage, row.round).key(config.name or "") for row in rows
    }
