"""A project folder that was copied or moved is used in its new place, and nothing is written to the old one."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from mlflow.tracking import MlflowClient

from infra.errors import UserError
from infra.storage import write_json
from infra.tracking.key import RunKey
from infra.tracking.store import create_run, has_run, open_store, reopen_run, store_uri
from infra.tracking.tracker import Tracker


def copy(old: Path, new: Path) -> None:
    shutil.copytree(old, new)


def move(old: Path, new: Path) -> None:
    old.rename(new)


def contents(folder: Path) -> dict[Path, bytes | None]:
    """Every file and folder below ``folder``, which may be gone."""
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.fixture
def old(tmp_path: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with a run, which has a file in MLflow and whose key is kept in ``runs/first``."""
    project = tmp_path / "old project"
    home = project / "runs" / "first"
    home.mkdir(parents=True)
    shutil.copy(empty_store, project / "mlflow.db")
    monkeypatch.chdir(project)
    key = create_run("train", "first", keep=lambda key: write_json(home / "tracking.json", key.kept_in(home)))
    with Tracker(key):
        pass
    files = unquote(urlsplit(MlflowClient(key.store).get_run(key.run_id).info.artifact_uri).path)
    Path(files).mkdir(parents=True)
    Path(files, "said.txt").write_text("of the first run")  # not by MLflow, which keeps the place for this process
    return project


def kept(home: Path, store: str | None = None) -> RunKey:
    """What a command finds in ``home`` that continues the run."""
    key = RunKey(**json.loads((home / "tracking.json").read_text()))
    return key.found_in(home, "do something else", store=store)


@pytest.mark.parametrize("how", [copy, move])
def test_runs_continue_in_the_new_place_and_the_command_reports_it(
    old: Path, how: Callable[[Path, Path], None], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    new = old.with_name("new")
    how(old, new)
    monkeypatch.chdir(new)
    before = contents(old)
    key = kept(new / "runs" / "first")
    reopen_run(key)
    said = capfd.readouterr().err.replace("\n", " ")
    assert f"sqlite:///{new}/mlflow.db was copied or moved here from {old}: its runs were kept" in said
    with Tracker(key) as tracker:
        tracker.text("in the new place", "later.txt")
    with Tracker(create_run("train", "second")) as tracker:
        tracker.text("of the second run", "said.txt")
    assert not capfd.readouterr().err, "it is said once"
    client = MlflowClient(store_uri())
    assert {file.path for file in client.list_artifacts(key.run_id)} == {"said.txt", "later.txt"}
    written = [path.read_text() for path in (new / "mlartifacts").rglob("*.txt")]
    assert sorted(written) == ["in the new place", "of the first run", "of the second run"]
    assert contents(old) == before


def test_a_registered_model_is_read_next_to_its_store(old: Path) -> None:
    client = MlflowClient(store_uri())
    client.create_registered_model("books")
    client.create_model_version("books", f"{old.as_uri()}/mlartifacts/1/models/m-1/artifacts")
    new = old.with_name("new")
    shutil.copytree(old, new)
    store = f"sqlite:///{new}/mlflow.db"
    open_store(store)
    there = f"{new.as_uri()}/mlartifacts/1/models/m-1/artifacts"
    assert MlflowClient(store).get_model_version("books", "1").source == there
    assert MlflowClient(store).get_model_version_download_uri("books", "1") == there


def test_a_store_without_its_files_is_refused(old: Path) -> None:
    new = old.with_name("new")
    shutil.copytree(old, new, ignore=shutil.ignore_patterns("mlartifacts"))
    before = contents(old)
    with pytest.raises(UserError, match=f"{new}/mlflow.db was copied or moved from {old} .* copy {old}/mlartifacts to"):
        open_store(f"sqlite:///{new}/mlflow.db")
    assert contents(old) == before


def test_a_run_without_its_store_is_refused_until_another_is_named(old: Path, empty_store: Path) -> None:
    new = old.with_name("new")
    shutil.copytree(old, new, ignore=shutil.ignore_patterns("ml*"))
    shutil.copy(empty_store, new / "fresh.db")
    with pytest.raises(UserError, match=f"from {old}/runs/first without .* copy {old}/mlflow.db to {new}/mlflow.db"):
        kept(new / "runs" / "first")
    elsewhere = kept(new / "runs" / "first", f"sqlite:///{new}/fresh.db")
    assert (elsewhere.store, elsewhere.journal) == (f"sqlite:///{new}/fresh.db", f"{new}/mlflow-journal")
    assert not has_run(elsewhere)
    assert has_run(kept(old / "runs" / "first"))


def test_a_copied_run_does_not_write_to_its_original(old: Path) -> None:
    first, second, third = (old / "runs" / name for name in ("first", "second", "third"))
    shutil.copytree(first, second)
    with pytest.raises(UserError, match=f"{second} is a copy of {first} .* do something else"):
        kept(second)
    first.rename(third)
    assert kept(third).store == store_uri(), "it was renamed and has no double"


def test_a_store_that_is_gone_is_named(old: Path) -> None:
    (old / "mlflow.db").unlink()
    with pytest.raises(
        UserError, match=rf"{old}/mlflow.db of {old}/runs/first does not exist: restore it, or do something else\."
    ):
        kept(old / "runs" / "first")
    assert not (old / "mlflow.db").exists()


def test_a_store_on_a_server_stays_where_it_is(tmp_path: Path) -> None:
    key = RunKey("http://mlflow:5000", "1", "abc", f"{tmp_path}/old/mlflow-journal", home=f"{tmp_path}/old/runs/first")
    moved = key.found_in(tmp_path / "new/runs/first", "")
    assert (moved.store, moved.journal) == (key.store, f"{tmp_path}/new/mlflow-journal")
