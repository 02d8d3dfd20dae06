"""A search for the lowest loss that really trains, in this process, and the run of its winner."""

import csv
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient
from PIL import Image

from infra.ray.cluster import ray_session
from infra.tracking.names import MAX_TOP_LEVEL_METRICS
from infra.tracking.saved_views import COLUMNS, FIRST_WIDTHS, VIEWS
from train import run
from tune import search
from tune.learning.report import METRICS

MODEL = "tiny,layers=2,heads=2,width=32,context_length=32,vocab_size=257,padded_vocab_size=320"
Command = Callable[..., int]


@pytest.fixture(scope="module")
def flags(small_shards: Path) -> list[str]:
    knobs = ["learning_rate=1e-3,1e-2"]
    return [
        "--objective", "loss", "--train-time", "2s", "--knobs", *knobs, "--data", str(small_shards), "--model", MODEL,
        "--device", "cpu", "--global-batch", "4", "--learning-rate", "1e-4", "--trial-steps", "8",
    ]  # fmt: skip


@pytest.mark.usefixtures("in_this_process")
def test_a_search_finds_what_learns_fast_and_the_run_of_its_winner_compares_itself(
    command: Command, working_folder: Path, flags: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert command(search.main, *flags, "--name", "learn") == 0
    printed = " ".join(capfd.readouterr().out.split())
    assert "learning_rate=0.0001" in printed
    assert "predicted after 2s" in printed
    folder = working_folder / "runs" / "learn"
    best = json.loads((folder / "best.json").read_text())
    assert best["config"]["learning_rate"] in (1e-4, 1e-3, 1e-2)  # The data are random, so that any may win.
    assert best["config"]["time_budget"] in (2.0, "2s")
    rows = list(csv.DictReader((folder / "trials.csv").open()))
    stages = Counter(row["stage"] for row in rows)
    assert stages["speed"] == 1
    assert stages["learn"] in (2, 3)  # The third candidate is tried if the second one is better than the control.
    assert stages["final"] in range(2, 10)  # Two or three seeds of the control and of up to two others.
    with Image.open(folder / "loss-by-time.png") as picture:
        assert picture.width > 900
    assert not (folder / "learned").exists() or not any((folder / "learned").iterdir())
    check_mlflow(working_folder)
    assert command(run.main, "--config", str(folder / "best.json"), "--name", "best") == 0
    result = json.loads((working_folder / "runs" / "best" / "result.json").read_text())
    assert result["loss_prediction"] == best["measured"]["loss_prediction"]
    assert result["val_windows"] == best["measured"]["loss_prediction"]["val_windows"]
    assert "Prediction" in (working_folder / "runs" / "best" / "summary.md").read_text()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_search_through_ray_prints_what_it_learns_and_names_a_best(
    command: Command, working_folder: Path, flags: list[str], cluster: str, capfd: pytest.CaptureFixture[str]
) -> None:
    changes = {"learning_rate=1e-3,1e-2": "learning_rate=1e-3", "2s": "12s"}  # Enough steps on a busy machine, too.
    flags = [changes.get(flag, flag) for flag in flags]
    with ray_session(cluster):
        assert command(search.main, *flags, "--name", "ray") == 0
    printed = capfd.readouterr().out
    assert "loss" in printed
    assert "after 1.5s" in printed  # the last rung of the exploration, an eighth of the final run
    assert "best so far: learning_rate" in printed
    rows = list(csv.DictReader((working_folder / "runs" / "ray" / "trials.csv").open()))
    stages = Counter(row["stage"] for row in rows)
    assert (stages["speed"], stages["learn"]) == (1, 2)
    assert stages["final"] in range(2, 7)
    assert (working_folder / "runs" / "ray" / "best.json").exists()


def check_mlflow(folder: Path) -> None:
    """The search has few metrics at the top, and its trials have curves by time and what their view shows."""
    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    experiment = client.get_experiment_by_name("learn")
    assert experiment
    runs = client.search_runs([experiment.experiment_id])
    (parent,) = [run for run in runs if run.data.tags["kind"] == "search"]
    assert "extrapolated x2" in parent.data.tags["mlflow.note.content"]
    first = {name for name in parent.data.metrics if not name.startswith("detail/")}
    assert first <= set(METRICS)
    assert len(first) <= MAX_TOP_LEVEL_METRICS
    finals = [run for run in runs if run.data.params.get("stage") == "final"]
    winner = min(finals, key=lambda run: run.data.tags["rank"])
    assert winner.data.tags["rank"].startswith("01 winner")
    curve = client.get_metric_history(winner.info.run_id, "loss/val_by_time")
    times = client.get_metric_history(winner.info.run_id, "progress/run_seconds")
    assert max(point.value for point in times) == 1.0  # half of the final run
    assert len(curve) == len(times) > 1
    for column in COLUMNS["learn"]:
        kind, _, name = column.partition(".")
        assert name.strip("`") in getattr(winner.data, kind), column
    (view,) = VIEWS["learn"]
    assert {*view.charts, view.x_metric} <= winner.data.metrics.keys()
    first_columns = [*COLUMNS["learn"].values()][:3]
    assert sum((*FIRST_WIDTHS["learn"], *first_columns)) <= 690
