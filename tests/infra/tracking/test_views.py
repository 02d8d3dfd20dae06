"""Links open the page that they name, in the store that a run is in."""

from pathlib import Path

import pytest

from infra.tracking.run_ref import RunRef, sqlite_store
from infra.tracking.views import children_view, model_link, page_link, ui_link

RUN = "ee9478f222a74d1c"


def key(store: str) -> RunRef:
    return RunRef(store, "3", RUN)


def test_a_run_on_a_server_is_opened_there() -> None:
    page = "https://mlflow.example.org/#/experiments/3/runs"
    for store in ("https://mlflow.example.org", "https://mlflow.example.org/"):
        assert ui_link(key(store)) == f"{page}/{RUN}?workflowType=machine_learning"
        children = f"{page}?workflowType=machine_learning&viewStateShareKey={children_view(RUN)}"
        assert ui_link(key(store), children=True) == children


def test_a_run_in_a_file_is_opened_with_the_server_to_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of the current folder is named as one would; any other by its whole path."""
    monkeypatch.chdir(tmp_path)
    page = f"http://127.0.0.1:5000/#/experiments/3/runs/{RUN}?workflowType=machine_learning"
    for file, shown in (
        (tmp_path / "mlflow.db", "sqlite:///mlflow.db"),
        (tmp_path / "other" / "mlflow.db", f"sqlite:///{tmp_path}/other/mlflow.db"),
        (Path("/why not?/mlflow.db"), "'sqlite:////why not%3F/mlflow.db'"),
    ):
        command, link = ui_link(key(sqlite_store(file))).splitlines()
        assert command.startswith(f"mlflow ui --backend-store-uri {shown}  # ")
        assert link == page


def test_a_description_links_within_its_store_and_names_what_is_in_another() -> None:
    here, there = "https://mlflow.example.org", "sqlite:////home/mlflow.db"
    within = f"[first](#/experiments/3/runs/{RUN}?workflowType=machine_learning)"
    assert page_link(key(here), "first", store=here) == within
    assert page_link(key(there), "first", store=here) == f"first (MLflow run `{RUN}` in {there})"


def test_the_name_of_a_model_may_contain_anything() -> None:
    assert model_link("books/gpt 2", "7") == "[books/gpt 2, version 7](#/models/books%2Fgpt%202/versions/7)"
