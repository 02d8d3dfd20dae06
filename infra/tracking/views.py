"""Links to pages of MLflow."""

import shlex
from pathlib import Path
from urllib.parse import quote

from infra.tracking.run_ref import RunRef, sqlite_file, sqlite_store


def children_view(run_id: str) -> str:
    """Return the key of the saved view that lists the children of a run."""
    return f"of-{run_id[:10]}"


def page_link(run: RunRef, text: str, *, store: str) -> str:
    """Return a Markdown link with ``text`` to the page of ``run``, for a description in ``store``.

    The link is relative to MLflow's address. For a run in another store, the text names the run and its store instead.
    """
    if run.store != store:
        return f"{text} (MLflow run `{run.run_id}` in {run.store})"
    return f"[{text}](#/experiments/{run.experiment_id}/runs/{run.run_id}?workflowType=machine_learning)"


def model_link(name: str, version: str) -> str:
    """Return a Markdown link to the page of a registered model's version, for a description in the same store."""
    return f"[{name}, version {version}](#/models/{quote(name, safe='')}/versions/{version})"


def ui_link(run_ref: RunRef, *, children: bool = False) -> str:
    """Return the link to a run in MLflow or, with ``children``, to a table of its children, such as a search's trials.

    A local store also needs the command that starts MLflow's server, on the line before the link. Its comment is about
    the panel that MLflow opens at the first visit to a local server, for which it has no setting. The link opens the
    pages for model training, because MLflow's start page is for GenAI. The children have a separate view (see
    ``infra.tracking.saved_views``), because the list of runs shows them collapsed.
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
    backend = sqlite_store(Path(file.name) if file.parent == Path.cwd() else file)
    comment = "# at the first visit, close the assistant on the right"
    return f"mlflow ui --backend-store-uri {shlex.quote(backend)}  {comment}\n{link}"
