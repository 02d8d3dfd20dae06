"""Links to what is in MLflow."""

from pathlib import Path
from urllib.parse import quote

from infra.tracking.key import SQLITE, RunKey


def ui_link(key: RunKey, *, children_by: str | None = None) -> str:
    """What to run and open to see a run in MLflow; with ``children_by``, its children ranked by that metric.

    The link opens MLflow's model-training pages, because its first page is the one for GenAI. For a comparison it
    filters by the parent, because children are collapsed in the list.
    """
    embedded = key.store.startswith("sqlite:")
    server = "http://127.0.0.1:5000" if embedded else key.store.rstrip("/")
    page = f"{server}/#/experiments/{key.experiment_id}/runs"
    if children_by is None:
        link = f"{page}/{key.run_id}?workflowType=machine_learning"
    else:
        parent = quote(f"tags.`mlflow.parentRunId` = '{key.run_id}'")
        order = quote(f"metrics.`{children_by}`")
        link = (
            f"{page}?workflowType=machine_learning&searchFilter={parent}"
            f"&orderByKey={order}&orderByAsc=false&compareRunsMode=CHART"
        )
    if not embedded:
        return link
    local = Path(key.store.removeprefix(SQLITE))
    shown = local.name if local.parent == Path.cwd() else local
    return f"mlflow ui --backend-store-uri sqlite:///{shown}\n{link}"
