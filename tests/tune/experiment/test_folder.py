"""A search's folder: one process at a time, and only the search that it was."""

from collections.abc import Callable
from pathlib import Path

import pytest

from infra.errors import UserError
from infra.storage.directory import StorageDir
from infra.storage.files import TEMPORARY_PREFIX
from infra.storage.workspace import Workspace
from infra.tracking.run_ref import RunRef
from tune.config import LadderConfig, SearchConfig
from tune.experiment.folder import TRIALS, ExperimentRecord, open_workspace, read_config, resumed_parent, write_record

IDENTITY = {"confirm_rounds": 3, "memory_limit": 10**9, "knobs": "compile"}


def record(directory: StorageDir, store: str) -> ExperimentRecord:
    """The record of a search whose run is in ``store``."""
    config, mlflow_run = SearchConfig(name="one").to_json(), RunRef(store, "1", "a", directory.address)
    return ExperimentRecord("search", "tune", config, IDENTITY, {}, "/data", "f" * 64, {}, None, mlflow_run)


def test_another_search_is_refused_by_what_differs(tmp_path: Path) -> None:
    directory = StorageDir.of(tmp_path)
    write_record(Workspace.of(directory), record(directory, "sqlite:///none.db"))
    for now, text in (
        (IDENTITY | {"confirm_rounds": 2}, "confirm_rounds: 3 → 2"),
        (IDENTITY | {"searcher": "grid"}, "searcher: None → 'grid'"),
        ({"confirm_rounds": 3, "knobs": "compile"}, "memory_limit: 1000000000 → None"),
    ):
        with pytest.raises(UserError, match=text):
            resumed_parent(directory, "search", now)


def test_one_process_at_a_time_and_no_halves_of_rows(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "one"
    directory = StorageDir.of(folder)
    with (
        open_workspace(directory, "search"),
        pytest.raises(UserError, match=r"Another process .* the search"),
        open_workspace(directory, "search"),
    ):
        pass
    half = folder / TRIALS / f"{TEMPORARY_PREFIX}1-m8.json"
    half.write_text("{")
    row = folder / TRIALS / "m8.json"
    row.write_text("{}")
    with open_workspace(directory, "search"):
        assert not half.exists()
        assert row.exists()


def test_a_search_in_object_storage_is_continued_from_what_was_sent(
    bucket: str, set_scratch: Callable[[Path], None], tmp_path: Path
) -> None:
    """By a machine that has nothing of it, and while no other driver here holds it."""
    set_scratch(tmp_path)
    directory = StorageDir.of(f"s3://places/deep{bucket}", "one")
    with open_workspace(directory, "search") as workspace:
        write_record(workspace, record(directory, "sqlite:////of/another/machine.db"))
        (workspace.path / TRIALS / "m8.json").write_text("{}")
        (workspace.path / TRIALS / "m4.json").write_text("{}")
        workspace.push(workspace.path / TRIALS / "m8.json")
        with pytest.raises(UserError, match=r"Another process .* the search"), open_workspace(directory, "search"):
            pass
    with open_workspace(directory, "search") as workspace:
        assert [path.name for path in (workspace.path / TRIALS).iterdir()] == ["m8.json"]
    assert read_config(directory, SearchConfig).name == "one"
    with pytest.raises(UserError, match=r"machine\.db of s3://places/deep/one\S* is not on this machine"):
        resumed_parent(directory, "search", IDENTITY)
    with pytest.raises(UserError, match="--resume two: there is no search in s3://places/deep/two"):
        read_config(StorageDir.of(f"s3://places/deep{bucket}", "two"), SearchConfig)
    (tmp_path / "first").mkdir()
    (tmp_path / "first/ladder.json").write_text("{")
    with pytest.raises(UserError, match=r"there is no ladder in .*/frist\. Did you mean first\?"):
        read_config(StorageDir.of(str(tmp_path), "frist"), LadderConfig)
    with pytest.raises(UserError, match=r"ladder\.json is corrupt"):
        read_config(StorageDir.of(str(tmp_path), "first"), LadderConfig)
