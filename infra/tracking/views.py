"""Links to what is in MLflow."""

import shlex
from pathlib import Path
from urllib.parse import quote

from infra.tracking.run_ref import RunRef, sqlite_file, sqlite_store


def children_view(run_id: str) -> str:
    return f"of-{run_id[:10]}"


def page_link(run: RunRef, text: str, *, store: str) -> str:
    """A Markdown link with ``text`` to the page of ``run``, for a description in ``store``.

    Its address is relative to MLflow's own; the run of another store is named instead.
    """
    if run.store != store:
        return f"{text} (MLflow run `{run.run_id}` in {run.store})"
    return f"[{text}](#/experiments/{run.experiment_id}/runs/{run.run_id}?workflowType=machine_learning)"


def model_link(name: str, version: str) -> str:
    """A Markdown link to the page of a version of a registered model, for a description in the same store."""
    return f"[{name}, version {version}](#/models/{quote(name, safe='')}/versions/{version})"


def ui_link(run_ref: RunRef, *, children: bool = False) -> str:
    """What to run and open to see a run in MLflow, or its ``children`` as a table, such as the trials of a search.

    The link opens MLflow's model-training pages, because its first page is the one for GenAI. The children have a view
    of their own (see ``infra.tracking.saved_views``), because in the list of runs they are collapsed.
    """
    file = sqlite_file(run_ref.store)
    server = "http://127.0.0.1:5000" if file else run_ref.store.rstrip("/")
    link = f"{server}/#/experiments/{run_ref.experiment_id}/runs"
    if children:
        link += f"?workflowType=machine_learning&viewStateShareKey={children_view(run_ref.run_id)}"
    else:
        link += f"/{run_ref.run_id}?workflowType=machine_learning"
    if not file:
        return link
    shown = sqlite_store(Path(file.name) if file.parent == Path.cwd() else file)
    return f"mlflow ui --backend-store-uri {shlex.quote(shown)}\n{link}"
