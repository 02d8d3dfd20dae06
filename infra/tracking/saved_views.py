"""Saved views of an experiment's runs in MLflow's menu "Views", each with its columns, filter, order and charts.

MLflow stores a saved view in the experiment's tag ``mlflow.sharedViewState.KEY`` and opens it at
``?viewStateShareKey=KEY``. The tag is a JSON object with the view's name and the state of the page, which is JSON
compressed with zlib, in base64. A tag that has only the state can be opened as well, but is not in the menu.
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

TAG_PREFIX = "mlflow.sharedViewState."
"""Prefix of the experiment's tags that have saved views."""
VIEW_KEY = "throughline"
"""Beginning of the keys of this project's views."""
NAME_COLUMN, STATUS_COLUMN = "attributes.`Run Name`", "runDateAndNestInfo"
"""Columns with which MLflow begins every table: the run's name, and its status and the time since its creation."""
FIRST_WIDTHS = {"pipeline": (120, 130), "train": (120, 130), "ladder": (190, 50), "tune": (120, 50), "learn": (120, 50)}
"""Widths of these columns by experiment, in pixels. Where 50 is enough for the status, the time is not shown.

In a window of 1,366 pixels, beside MLflow's menu and the panel of its assistant, which is open at a first visit, a
table has 690 pixels. The first columns with the measurements are not wider.
"""
MEASUREMENT_COLUMNS = {"tags.`tokens/s`": 250, "tags.`memory`": 150}
COLUMNS = {
    "pipeline": {
        "metrics.`books/kept`": 100, "metrics.`tokens/train`": 110, "tags.`dropped`": 200, "metrics.`tokens/val`": 110,
        "metrics.`throughput/mb_per_second`": 210, "params.`out`": 300,
    },
    "train": {
        **MEASUREMENT_COLUMNS, "metrics.`result/val_loss`": 125, "tags.`outcome`": 85, "params.`model`": 120,
        "tags.`device`": 120, "metrics.`result/mfu`": 95, "metrics.`loss/val_bits_per_byte`": 160,
        "params.`micro_batch`": 100, "params.`accumulation`": 115, "params.`data`": 180, "tags.`reason`": 200,
        "metrics.`progress/train_tokens`": 170, "metrics.`detail/memory/prediction_error`": 240,
    },
    "ladder": {
        **MEASUREMENT_COLUMNS, "tags.`batch`": 75, "metrics.`loss/train`": 85, "tags.`outcome`": 85,
        "metrics.`result/mfu`": 95, "metrics.`memory/predicted_gb`": 150, "tags.`reason`": 300,
    },
    "tune": {
        "tags.`rank`": 115, **MEASUREMENT_COLUMNS, "tags.`batch`": 70, "tags.`knobs`": 180, "tags.`outcome`": 85,
        "params.`stage`": 80, "metrics.`memory/predicted_gb`": 150, "tags.`global_batch`": 110, "tags.`reason`": 300,
    },
    "learn": {
        "tags.`rank`": 95, "tags.`settings`": 245, "tags.`predicted_loss`": 180, "metrics.`loss/val_by_time`": 140,
        "metrics.`progress/run_seconds`": 160, "params.`stage`": 80, "params.`round`": 70, "tags.`outcome`": 85,
        "tags.`memory`": 150, "tags.`reason`": 300,
    },
}  # fmt: skip
RUN_FILTERS = {
    "pipeline": "",
    "train": "tags.kind = 'run'",
    "ladder": "tags.kind = 'trial'",
    "tune": "tags.kind = 'trial'",
    "learn": "tags.kind = 'trial'",
}


class View(NamedTuple):
    """View of runs: a table in an order, and charts of metrics over another metric.

    A chart has a line per run, or a point per run if the other metric is a prediction.
    """

    name: str
    order: str
    """Column by which the runs are sorted."""
    is_ascending: bool = False
    charts: tuple[str, ...] = ()
    """Metrics to draw, one chart each."""
    x_metric: str = ""
    """Metric on the x axis of the charts."""

    def to_page_state(self, experiment: str, runs: str | None = None) -> str:
        """Return the view in MLflow's format; ``runs`` is a filter, by default the one in :data:`RUN_FILTERS`."""
        columns = COLUMNS[experiment]
        widths = dict(zip((NAME_COLUMN, STATUS_COLUMN), FIRST_WIDTHS[experiment], strict=True)) | columns
        page = {
            "searchFilter": RUN_FILTERS[experiment] if runs is None else runs, "startTime": "ALL",
            "lifecycleFilter": "Active",
            "orderByKey": self.order, "orderByAsc": self.is_ascending, "selectedColumns": list(columns),
            "columnOrder": [*widths], "columnWidths": widths,
        }  # fmt: skip
        if self.charts:
            section = {"uuid": VIEW_KEY, "name": self.name, "display": True, "isReordered": False}
            page["compareRunSections"] = [section | {"columns": min(2, len(self.charts))}]
            page["compareRunCharts"] = [self._make_chart(metric) for metric in self.charts]
            page["isAccordionReordered"] = True  # keeps this section the first one
        return "deflate;" + base64.b64encode(zlib.compress(json.dumps(page).encode())).decode()

    def _make_chart(self, metric: str) -> dict[str, Any]:
        axes = {"xaxis": {"key": self.x_metric, "type": "METRIC"}, "yaxis": {"key": metric, "type": "METRIC"}}
        points = axes | {"type": "SCATTER", "runsCountToCompare": 100}
        x_axis = {"xAxisKey": "metric", "selectedXAxisMetricKey": self.x_metric, "useGlobalXaxisKey": False}
        line = x_axis | {"type": "LINE", "metricKey": metric, "useGlobalLineSmoothing": True}
        return {"uuid": metric, "metricSectionId": VIEW_KEY} | (points if "predict" in self.x_metric else line)


CREATED_COLUMN, MEMORY_METRIC = "attributes.start_time", "memory/process_gb"
CURVE_METRICS = ("loss/train", "loss/val", "throughput/tokens_per_second", "optimizer/learning_rate")
CURVES_VIEW = View("Curves", CREATED_COLUMN, False, CURVE_METRICS, "progress/train_tokens")
# A token of a larger vocabulary has more text. Bits per byte and seconds do not depend on the vocabulary.
VOCABULARIES_VIEW = View(
    "Vocabularies", CREATED_COLUMN, False, ("loss/val_bits_per_byte",), "detail/time/elapsed_seconds"
)
MEMORY_VIEW = View("Memory", f"metrics.`{MEMORY_METRIC}`", False, (MEMORY_METRIC,), "detail/memory/predicted_gb")
TRIAL_MEMORY_VIEW = MEMORY_VIEW._replace(x_metric="memory/predicted_gb")
VIEWS = {
    "pipeline": (View("Data", CREATED_COLUMN),),
    "train": (View("Runs", CREATED_COLUMN), CURVES_VIEW, VOCABULARIES_VIEW, MEMORY_VIEW),
    # Sorted by name, which begins with the rung's number, because MLflow would collapse the children if sorted by time.
    "ladder": (
        View("Ladder", "tags.`mlflow.runName`", True),
        CURVES_VIEW._replace(charts=CURVE_METRICS[:1], order="tags.`mlflow.runName`", is_ascending=True),
        TRIAL_MEMORY_VIEW,
    ),
    "tune": (View("Leaderboard", "metrics.`result/tokens_per_second`"), TRIAL_MEMORY_VIEW),
    "learn": (View("Learning", "metrics.`loss/val_by_time`", True, ("loss/val_by_time",), "progress/run_seconds"),),
}
"""Views of each experiment. The first view of an experiment with trials is also used for the children of each run."""


@interrupts.delayed()
def save_views(client: MlflowClient, experiment: str, run: RunRef, tags: Mapping[str, str]) -> None:
    """Save the views that are missing in the ``tags`` of ``experiment``, and a view of the run's children.

    Never raises, because views are a convenience.
    """
    with suppress(Exception):
        names = [json.loads(tags[tag])["name"] for tag in tags if tag.startswith(TAG_PREFIX) and tags[tag][0] == "{"]
        for view in VIEWS.get(experiment, ()):
            tag, time_ms = f"{TAG_PREFIX}{VIEW_KEY}-{view.name.lower()}", int(time.time() * 1000)
            if tag not in tags and view.name not in names:
                content = {
                    "name": view.name,
                    "createdAt": time_ms,
                    "updatedAt": time_ms,
                    "state": view.to_page_state(experiment),
                }
                client.set_experiment_tag(run.experiment_id, tag, json.dumps(content))
        if experiment in ("ladder", "tune", "learn"):
            _save_children_view(client, experiment, VIEWS[experiment][0], run)


@interrupts.delayed()
def tag_ranks(search: RunRef, tags: Mapping[str, Mapping[str, str]]) -> None:
    """Tag the trials of a search with their ``rank`` and more ``tags``, by trial, and sort the view of them by rank.

    Unranked trials, such as the control of a second machine, are not tagged. Never raises, because ranks are a
    convenience.
    """
    with suppress(Exception):
        client = MlflowClient(search.store)
        trials = f"tags.`mlflow.parentRunId` = '{search.run_id}'"
        for trial in client.search_runs([search.experiment_id], trials, max_results=SEARCH_MAX_RESULTS_THRESHOLD):
            for name, value in tags.get(trial.data.tags.get("trial", ""), {}).items():
                client.set_tag(trial.info.run_id, name, value)
        experiment = client.get_experiment(search.experiment_id).name
        view = VIEWS[experiment][0]._replace(order="tags.`rank`", is_ascending=True)
        _save_children_view(client, experiment, view, search)


def _save_children_view(client: MlflowClient, experiment: str, view: View, run: RunRef) -> None:
    state = view.to_page_state(experiment, f"tags.`mlflow.parentRunId` = '{run.run_id}'")
    client.set_experiment_tag(run.experiment_id, f"{TAG_PREFIX}{children_view(run.run_id)}", state)
