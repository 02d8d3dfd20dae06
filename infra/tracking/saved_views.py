"""Views of an experiment's runs that MLflow offers in its menu "Views": which columns, which runs, in which order.

MLflow 3.15 and later keeps a view that a user saves as a tag of the experiment, ``mlflow.sharedViewState.KEY``, and
opens it by ``?viewStateShareKey=KEY``. The format is that of a view saved in a browser with MLflow 3.17: a JSON object
with a name and the page's state, which is JSON compressed by zlib, in base64. A tag with the state alone opens in the
same way and is not in the menu. A later MLflow that ignores the key opens the plain list of runs.

The state includes charts but not whether they or the table are shown: that is ``compareRunsMode=CHART`` in the page's
address, or its button "Chart view". A chart needs a section; MLflow adds one of each other metric below.
"""

import base64
import json
import time
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from mlflow.store.tracking import SEARCH_MAX_RESULTS_THRESHOLD
from mlflow.tracking import MlflowClient

from infra.command import uninterrupted
from infra.tracking.key import RunKey
from infra.tracking.views import children_view

VERSION = 5
"""Of the views below: an experiment with views of an older version gets them anew."""

PREFIX = "mlflow.sharedViewState."

MARK = "throughline"
"""Field of a view's JSON object that tells ours, with its version, from those of users."""


@dataclass(frozen=True)
class Chart:
    """A chart of one metric over another: a line per run or, of metrics with one value, a point per run."""

    metric: str
    over: str
    points: bool = False

    def card(self) -> dict[str, Any]:
        """The chart as MLflow keeps it in the state of its page."""
        place = {"uuid": f"{self.metric} over {self.over}", "metricSectionId": MARK}
        if self.points:
            axes = {"xaxis": {"key": self.over, "type": "METRIC"}, "yaxis": {"key": self.metric, "type": "METRIC"}}
            return place | axes | {"type": "SCATTER", "runsCountToCompare": 100}
        over = {"xAxisKey": "metric", "selectedXAxisMetricKey": self.over, "useGlobalXaxisKey": False}
        return place | over | {"type": "LINE", "metricKey": self.metric, "useGlobalLineSmoothing": True}


@dataclass(frozen=True)
class View:
    """Some of an experiment's runs, as a table. Columns are metrics, params and tags, with their widths in pixels."""

    name: str
    runs: str
    """MLflow's search filter."""
    columns: dict[str, int]
    order: str
    ascending: bool = False
    charts: tuple[Chart, ...] = ()

    def state(self) -> str:
        """The view as MLflow keeps the state of its page."""
        page = {
            "searchFilter": self.runs,
            "orderByKey": self.order,
            "orderByAsc": self.ascending,
            "startTime": "ALL",
            "lifecycleFilter": "Active",
            "selectedColumns": list(self.columns),
            "columnOrder": [*FIRST, *self.columns],
            "columnWidths": FIRST | self.columns,
        }
        if self.charts:
            wide = min(2, len(self.charts))
            section = {"uuid": MARK, "name": self.name, "display": True, "isReordered": False, "columns": wide}
            page |= {"compareRunCharts": [chart.card() for chart in self.charts], "compareRunSections": [section]}
            page["isAccordionReordered"] = True  # our section stays the first
        return "deflate;" + base64.b64encode(zlib.compress(json.dumps(page).encode())).decode()

    def saved(self) -> str:
        """The view as a tag's value, with its name in the menu."""
        now = int(time.time() * 1000)
        return json.dumps({"name": self.name, "createdAt": now, "updatedAt": now, "state": self.state(), MARK: VERSION})


FIRST = {"attributes.`Run Name`": 170, "runDateAndNestInfo": 150}
"""Columns that every table of runs begins with, under MLflow's names: the run's name, and when it was created."""

CREATED = "attributes.start_time"

NAMED = "tags.`mlflow.runName`"
"""The order of a ladder's rungs; in the order of :data:`CREATED` MLflow would fold them under their parent."""

SPEED = "metrics.`result/tokens_per_second`"

PLACE = "tags.`place`"
"""The place of a trial's candidate in a finished search, which also counts its other trials: ``01 winner``."""

MEASURED = {"tags.`tokens/s`": 205, "tags.`memory`": 185}
"""Speed with its interval and memory with its limit or prediction, as text: MLflow shows metrics with all decimals."""

BATCH = {"params.`micro_batch`": 110, "params.`accumulation`": 115}


def _curves(runs: str) -> View:
    """Loss, speed and learning rate of training runs by the tokens that they have seen."""
    tokens = "progress/train_tokens"
    return View(
        "Curves",
        runs,
        {
            "metrics.`loss/train`": 130,
            "metrics.`result/val_loss`": 130,
            "metrics.`progress/train_tokens`": 190,
            "tags.`tokens/s`": 210,
            "metrics.`optimizer/learning_rate`": 190,
            "params.`global_batch`": 115,
            "params.`data`": 220,
        },
        CREATED,
        charts=tuple(
            Chart(metric, tokens)
            for metric in ("loss/train", "loss/val", "throughput/tokens_per_second", "optimizer/learning_rate")
        ),
    )


def _memory(runs: str, predicted: str, columns: dict[str, int]) -> View:
    """Measured memory against the metric ``predicted``, the largest first."""
    measured = "memory/process_gb"
    return View("Memory", runs, columns, f"metrics.`{measured}`", charts=(Chart(measured, predicted, points=True),))


TRAINING_MEMORY = {
    "tags.`memory`": 220,
    "metrics.`detail/memory/prediction_error`": 240,
    "tags.`outcome`": 100,
    **BATCH,
    "params.`precision`": 100,
    "params.`model`": 200,
}

VIEWS = {
    "pipeline": (
        View(
            "Data",
            "",
            {
                "metrics.`books/kept`": 110,
                "tags.`dropped`": 260,
                "metrics.`tokens/train`": 125,
                "metrics.`tokens/val`": 110,
                "metrics.`throughput/MB_per_second`": 210,
                "params.`out`": 300,
            },
            CREATED,
        ),
    ),
    "train": (
        View(
            "Runs",
            "tags.kind = 'run'",
            {
                "tags.`outcome`": 100,
                **MEASURED,
                "tags.`reason`": 200,
                "metrics.`result/val_loss`": 130,
                "metrics.`result/mfu`": 100,
                "params.`model`": 140,
                **BATCH,
                "params.`data`": 220,
            },
            CREATED,
        ),
        _curves("tags.kind = 'run'"),
        _memory("tags.kind = 'run'", "detail/memory/predicted_gb", TRAINING_MEMORY),
    ),
    "ladder": (
        View(
            "Ladder",
            "tags.kind != 'ladder'",
            {
                "tags.`rung`": 160,
                **MEASURED,
                "metrics.`loss/train`": 130,
                "metrics.`result/mfu`": 100,
                **BATCH,
                "tags.`reason`": 300,
            },
            NAMED,
            ascending=True,
        ),
        _curves("tags.kind != 'ladder'"),
        _memory("tags.kind != 'ladder'", "detail/memory/predicted_gb", {"tags.`rung`": 160} | TRAINING_MEMORY),
    ),
    "tune": (
        View(
            "Leaderboard",
            "tags.kind = 'trial'",
            {
                PLACE: 95,
                **MEASURED,
                "tags.`batch`": 70,
                "tags.`knobs`": 180,
                "tags.`outcome`": 85,
                "tags.`reason`": 300,
                "params.`stage`": 80,
            },
            SPEED,
        ),
        _memory(
            "tags.kind = 'trial'",
            "prediction/memory_gb",
            {
                "tags.`memory`": 150,
                "tags.`predicted memory`": 170,
                "tags.`outcome`": 100,
                **BATCH,
                "params.`stage`": 80,
                "tags.`reason`": 300,
            },
        ),
    ),
}
"""The views of each experiment's runs; the first of ``ladder`` and ``tune`` is that of each run's children too."""

PARENTS = ("ladder", "tune")


@uninterrupted()
def offer(client: MlflowClient, experiment: str, experiment_id: str, run_id: str) -> None:
    """Save the views of ``experiment`` that are missing or of an older version, and one of the new run's children.

    A user's view stays as it is, and the only one of its name. Never raises, because a view is a convenience: where
    the store does not answer, what needs it reports that.
    """
    views = VIEWS.get(experiment, ())
    with suppress(Exception):
        tags = client.get_experiment(experiment_id).tags
        for view in views:
            tag = f"{PREFIX}{MARK}-{view.name.lower()}"
            others = [_read(value) for key, value in tags.items() if key.startswith(PREFIX) and key != tag]
            ours = _read(tags[tag]).get(MARK) if tag in tags else 0
            if isinstance(ours, int) and ours < VERSION and view.name not in [other.get("name") for other in others]:
                client.set_experiment_tag(experiment_id, tag, view.saved())
        if experiment in PARENTS:
            _offer_children(client, views[0], experiment_id, run_id)


@uninterrupted()
def show_places(search: RunKey, places: Mapping[str, str]) -> None:
    """Tag the trials of a finished search with their ``places``, by the trial's key, and order their view by them.

    Never raises, as :func:`offer`.
    """
    with suppress(Exception):
        client = MlflowClient(search.store)
        trials = f"tags.`mlflow.parentRunId` = '{search.run_id}'"
        for trial in client.search_runs([search.experiment_id], trials, max_results=SEARCH_MAX_RESULTS_THRESHOLD):
            client.set_tag(trial.info.run_id, "place", places[trial.data.tags["trial"]])
        view = replace(VIEWS["tune"][0], order=PLACE, ascending=True)
        _offer_children(client, view, search.experiment_id, search.run_id)


def _offer_children(client: MlflowClient, view: View, experiment_id: str, run_id: str) -> None:
    own = replace(view, runs=f"tags.`mlflow.parentRunId` = '{run_id}'")
    client.set_experiment_tag(experiment_id, f"{PREFIX}{children_view(run_id)}", own.state())


def _read(tag: str) -> dict[str, Any]:
    """A saved view's JSON object; empty for a tag that is none."""
    with suppress(ValueError):
        found = json.loads(tag)
        return found if isinstance(found, dict) else {}
    return {}
