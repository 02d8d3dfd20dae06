"""Views of an experiment are written once, open by a short link, and leave a user's own alone."""

import base64
import json
import shutil
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient

from infra.tracking import saved_views
from infra.tracking.run_ref import RunRef
from infra.tracking.saved_views import RUN_FILTERS, TAG_PREFIX, VIEWS
from infra.tracking.store import create_child_run, create_run
from infra.tracking.views import children_view, ui_link

LEADERBOARD = f"{TAG_PREFIX}throughline-leaderboard"


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def tags_of(key: RunRef) -> dict[str, str]:
    return MlflowClient(key.store).get_experiment(key.experiment_id).tags


def page(state: str) -> dict[str, Any]:
    """The state of MLflow's page, as its browser code unpacks it."""
    kind, _, packed = state.partition(";")
    assert kind == "deflate"
    return json.loads(zlib.decompress(base64.b64decode(packed)))


def test_the_first_command_saves_the_view_that_later_ones_leave_as_it_is() -> None:
    key = create_run("tune", "first", tags={"kind": "search"})
    saved = tags_of(key)[LEADERBOARD]
    view = json.loads(saved)
    assert view["name"] == "Leaderboard"
    shown = page(view["state"])
    assert shown["orderByKey"] == "metrics.`result/tokens_per_second`"
    assert {"tags.`tokens/s`", "tags.`memory`", "tags.`outcome`"} <= set(shown["selectedColumns"])
    assert set(shown["columnWidths"]) == set(shown["columnOrder"])
    assert tags_of(create_run("tune", "second"))[LEADERBOARD] == saved


def test_the_charts_of_a_view_stand_in_its_own_section() -> None:
    """Before those that MLflow adds, and with losses by tokens."""
    saved = tags_of(create_run("train", "first"))
    curves, memory = (
        page(json.loads(saved[f"{TAG_PREFIX}throughline-{name}"])["state"]) for name in ("curves", "memory")
    )
    for shown in (curves, memory):
        (section,) = shown["compareRunSections"]
        assert {chart["metricSectionId"] for chart in shown["compareRunCharts"]} == {section["uuid"]}
        assert shown["isAccordionReordered"]
    loss = next(chart for chart in curves["compareRunCharts"] if chart["metricKey"] == "loss/train")
    assert (loss["type"], loss["selectedXAxisMetricKey"]) == ("LINE", "progress/train_tokens")
    assert [chart["type"] for chart in memory["compareRunCharts"]] == ["SCATTER"]
    assert "compareRunCharts" not in page(json.loads(saved[f"{TAG_PREFIX}throughline-runs"])["state"])


def test_a_users_view_remains_the_only_one_of_its_name() -> None:
    key = create_run("tune", "first")
    client = MlflowClient(key.store)
    client.delete_experiment_tag(key.experiment_id, LEADERBOARD)
    own = json.dumps({"name": "Leaderboard", "createdAt": 1, "state": "{}"})
    client.set_experiment_tag(key.experiment_id, f"{TAG_PREFIX}17954", own)
    create_run("tune", "second")
    assert LEADERBOARD not in tags_of(key)
    assert tags_of(key)[f"{TAG_PREFIX}17954"] == own


def test_the_link_of_a_search_is_short_and_opens_its_trials_alone() -> None:
    key, other = (create_run("tune", name, tags={"kind": "search"}) for name in ("first", "second"))
    trial = create_child_run(key, "tune", "001 m4", {"kind": "trial"})
    create_child_run(other, "tune", "001 m8", {"kind": "trial"})
    link = ui_link(key, children=True).splitlines()[-1]
    assert len(link) < 110
    shown = page(tags_of(key)[f"{TAG_PREFIX}{link.partition('viewStateShareKey=')[2]}"])
    found = MlflowClient(key.store).search_runs([key.experiment_id], shown["searchFilter"])
    assert [run.info.run_id for run in found] == [trial.run_id]


def test_the_trials_of_a_finished_search_are_in_the_order_of_their_places() -> None:
    """Those of another search and their view stay as they are."""
    key, other = (create_run("tune", name, tags={"kind": "search"}) for name in ("first", "second"))
    trials = [create_child_run(key, "tune", name, {"trial": name}) for name in ("m4", "m8")]
    stranger = create_child_run(other, "tune", "m4", {"trial": "m4"})
    before = tags_of(key)[f"{TAG_PREFIX}{children_view(other.run_id)}"]
    saved_views.tag_ranks(key, {"m4": {"rank": "02"}, "m8": {"rank": "01 winner"}})
    client = MlflowClient(key.store)
    assert [client.get_run(trial.run_id).data.tags["rank"] for trial in trials] == ["02", "01 winner"]
    assert "rank" not in client.get_run(stranger.run_id).data.tags
    assert tags_of(key)[f"{TAG_PREFIX}{children_view(other.run_id)}"] == before
    shown = page(tags_of(key)[f"{TAG_PREFIX}{children_view(key.run_id)}"])
    order = f"{shown['orderByKey']} {'ASC' if shown['orderByAsc'] else 'DESC'}"
    found = client.search_runs([key.experiment_id], shown["searchFilter"], order_by=[order])
    assert [run.info.run_id for run in found] == [trials[1].run_id, trials[0].run_id]


def test_a_search_for_the_lowest_loss_has_a_view_of_its_own() -> None:
    key = create_run("learn", "first", tags={"kind": "search"})
    create_child_run(key, "learn", "m4", {"trial": "m4"})
    saved_views.tag_ranks(key, {"m4": {"rank": "01 winner", "predicted_loss": "3.5"}})
    shown = page(tags_of(key)[f"{TAG_PREFIX}{children_view(key.run_id)}"])
    assert {"tags.`predicted_loss`", "tags.`settings`"} <= set(shown["selectedColumns"])
    (chart,) = shown["compareRunCharts"]
    assert (chart["metricKey"], chart["selectedXAxisMetricKey"]) == ("loss/val_by_time", "progress/run_seconds")


def test_a_trial_without_a_place_does_not_keep_the_others_from_theirs() -> None:
    """As the control of a second machine, which is not compared; MLflow returns the newest run first."""
    key = create_run("tune", "two machines", tags={"kind": "search"})
    ranked = create_child_run(key, "tune", "m4", {"trial": "m4"})
    control = create_child_run(key, "tune", "control", {"trial": "control"})
    untagged = create_child_run(key, "tune", "by hand", {})
    saved_views.tag_ranks(key, {"m4": {"rank": "01 winner"}})
    client = MlflowClient(key.store)
    places = [client.get_run(run.run_id).data.tags.get("rank") for run in (ranked, control, untagged)]
    assert places == ["01 winner", None, None]
    assert "rank" in str(page(tags_of(key)[f"{TAG_PREFIX}{children_view(key.run_id)}"])["orderByKey"])


@pytest.mark.parametrize(
    ("experiment", "shown"), [("pipeline", 2), ("train", 1), ("ladder", 1), ("tune", 1), ("learn", 1)]
)
def test_mlflow_takes_the_filter_and_the_order_of_each_view(experiment: str, shown: int) -> None:
    kinds = {
        "pipeline": ("", ""),
        "train": ("run", "profile"),
        "ladder": ("trial", "ladder"),
        "tune": ("trial", "search"),
        "learn": ("trial", "search"),
    }
    keys = [create_run(experiment, "a run", tags={"kind": kind}) for kind in kinds[experiment]]
    for view in VIEWS[experiment]:
        order = f"{view.order} {'ASC' if view.is_ascending else 'DESC'}"
        found = MlflowClient(keys[0].store).search_runs(
            [keys[0].experiment_id], RUN_FILTERS[experiment], order_by=[order]
        )
        assert len(found) == shown
        assert keys[0].run_id in [run.info.run_id for run in found]


def test_a_store_without_the_experiment_does_not_stop_a_command() -> None:
    key = create_run("tune", "first")
    saved_views.save_views(MlflowClient(key.store), "tune", replace(key, experiment_id="4711"), {})
