"""Views of an experiment's runs that MLflow offers in its menu "Views": which columns, which runs, in which order.

MLflow keeps a view that a user saves as a tag of the experiment, ``mlflow.sharedViewState.KEY``, and opens it by
``?viewStateShareKey=KEY``: a JSON object with a name and the page's state, which is JSON compressed by zlib, in base64.
A tag with the state alone opens in the same way and is not in the menu.
"""

import base64
import json
import time
import zlib
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from mlflow.store.tracking import SEARCH_MAX_RESULTS_THRESHOLD
from mlflow.tracking import MlflowClient

from infra.cli.interrupts import interrupts
from infra.tracking.run_ref import RunRef
from infra.tracking.views import children_view

PREFIX, OURS = "mlflow.sharedViewState.", "throughline"
FIRST = {"attributes.`Run Name`": 170, "runDateAndNestInfo": 150}  # of every table; the second is when it was created
MEASURED = {"tags.`tokens/s`": 205, "tags.`memory`": 185}
BATCH = {"params.`micro_batch`": 110, "params.`accumulation`": 115}
COLUMNS = {  # with widths in pixels
    "pipeline": {
        "metrics.`books/kept`": 110, "tags.`dropped`": 260, "metrics.`tokens/train`": 125, "metrics.`tokens/val`": 110,
        "metrics.`throughput/mb_per_second`": 210, "params.`out`": 300,
    },
    "train": {
        "tags.`outcome`": 100, **MEASURED, "tags.`reason`": 200, "metrics.`result/val_loss`": 130,
        "metrics.`result/mfu`": 100, **BATCH, "params.`model`": 140, "params.`data`": 220,
        "metrics.`progress/train_tokens`": 190, "metrics.`detail/memory/prediction_error`": 240,
    },
    "ladder": {
        "tags.`rung`": 160, **MEASURED, "tags.`predicted_memory`": 170, "tags.`batch`": 70, "metrics.`loss/train`": 130,
        "metrics.`result/mfu`": 100, "tags.`outcome`": 85, "tags.`reason`": 300,
    },
    "tune": {
        "tags.`rank`": 95, **MEASURED, "tags.`batch`": 70, "tags.`knobs`": 180, "tags.`outcome`": 85,
        "tags.`reason`": 300, "params.`stage`": 80, "tags.`predicted_memory`": 170, "tags.`global_batch`": 110,
    },
}  # fmt: skip
RUNS = {"pipeline": "", "train": "tags.kind = 'run'", "ladder": "tags.kind = 'trial'", "tune": "tags.kind = 'trial'"}


class View(NamedTuple):
    """A view of runs: their order, and charts of metrics over another, a line per run or over a prediction a point."""

    name: str
    order: str
    ascending: bool = False
    charts: tuple[str, ...] = ()
    over: str = ""

    def state(self, experiment: str, runs: str | None = None) -> str:
        """The view as MLflow keeps the state of its page; of these ``runs`` instead of the experiment's."""
        columns = COLUMNS[experiment]
        page = {
            "searchFilter": RUNS[experiment] if runs is None else runs, "startTime": "ALL", "lifecycleFilter": "Active",
            "orderByKey": self.order, "orderByAsc": self.ascending, "selectedColumns": list(columns),
            "columnOrder": [*FIRST, *columns], "columnWidths": FIRST | columns,
        }  # fmt: skip
        if self.charts:
            section = {"uuid": OURS, "name": self.name, "display": True, "isReordered": False}
            page["compareRunSections"] = [section | {"columns": min(2, len(self.charts))}]
            page["compareRunCharts"] = [self._card(metric) for metric in self.charts]
            page["isAccordionReordered"] = True  # our section stays the first
        return "deflate;" + base64.b64encode(zlib.compress(json.dumps(page).encode())).decode()

    def _card(self, metric: str) -> dict[str, Any]:
        axes = {"xaxis": {"key": self.over, "type": "METRIC"}, "yaxis": {"key": metric, "type": "METRIC"}}
        points = axes | {"type": "SCATTER", "runsCountToCompare": 100}
        over = {"xAxisKey": "metric", "selectedXAxisMetricKey": self.over, "useGlobalXaxisKey": False}
        line = over | {"type": "LINE", "metricKey": metric, "useGlobalLineSmoothing": True}
        return {"uuid": metric, "metricSectionId": OURS} | (points if "predict" in self.over else line)


CREATED, MEMORY = "attributes.start_time", "memory/process_gb"
CURVE_METRICS = ("loss/train", "loss/val", "throughput/tokens_per_second", "optimizer/learning_rate")
CURVES = View("Curves", CREATED, False, CURVE_METRICS, "progress/train_tokens")
MEMORY_VIEW = View("Memory", f"metrics.`{MEMORY}`", False, (MEMORY,), "detail/memory/predicted_gb")
TRIAL_MEMORY_VIEW = MEMORY_VIEW._replace(over="memory/predicted_gb")
VIEWS = {  # the first of ladder and tune is that of each run's children too
    "pipeline": (View("Data", CREATED),),
    "train": (View("Runs", CREATED), CURVES, MEMORY_VIEW),
    "ladder": (  # by name, which begins with the number: by time they would be folded under their parent
        View("Ladder", "tags.`mlflow.runName`", True),
        CURVES._replace(charts=CURVE_METRICS[:1], order="tags.`mlflow.runName`", ascending=True),
        TRIAL_MEMORY_VIEW,
    ),
    "tune": (View("Leaderboard", "metrics.`result/tokens_per_second`"), TRIAL_MEMORY_VIEW),
}


@interrupts.delayed()
def save_views(client: MlflowClient, experiment: str, run: RunRef, tags: Mapping[str, str]) -> None:
    """Save the views whose names the ``tags`` of ``experiment`` lack, and one of the run's children. Never raises."""
    with suppress(Exception):
        names = [json.loads(tags[tag])["name"] for tag in tags if tag.startswith(PREFIX) and tags[tag][0] == "{"]
        for view in VIEWS.get(experiment, ()):
            tag, now = f"{PREFIX}{OURS}-{view.name.lower()}", int(time.time() * 1000)
            if tag not in tags and view.name not in names:
                saved = {"name": view.name, "createdAt": now, "updatedAt": now, "state": view.state(experiment)}
                client.set_experiment_tag(run.experiment_id, tag, json.dumps(saved))
        if experiment in ("ladder", "tune"):
            _offer_children(client, experiment, VIEWS[experiment][0], run)


@interrupts.delayed()
def tag_ranks(search: RunRef, ranks: Mapping[str, str]) -> None:
    """Tag the trials of a search with their ``ranks``, by trial, and order their view by them. Never raises.

    A trial without a rank, such as the control of a further machine, gets no tag.
    """
    with suppress(Exception):
        client = MlflowClient(search.store)
        trials = f"tags.`mlflow.parentRunId` = '{search.run_id}'"
        for trial in client.search_runs([search.experiment_id], trials, max_results=SEARCH_MAX_RESULTS_THRESHOLD):
            if rank := ranks.get(trial.data.tags.get("trial", "")):
                client.set_tag(trial.info.run_id, "rank", rank)
        _offer_children(client, "tune", VIEWS["tune"][0]._replace(order="tags.`rank`", ascending=True), search)


def _offer_children(client: MlflowClient, experiment: str, view: View, run: RunRef) -> None:
    state = view.state(experiment, f"tags.`mlflow.parentRunId` = '{run.run_id}'")
    client.set_experiment_tag(run.experiment_id, f"{PREFIX}{children_view(run.run_id)}", state)
