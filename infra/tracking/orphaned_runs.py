"""Runs whose process has died: they are closed by the next command, and completed from what their folder has.

Every run has the tags ``run_dir``, the folder that its command locks for as long as it lives, and ``host``, this
machine. Where that lock can be taken, the process has died. The tag ``fully_logged`` is the last entry of a run: a run
that ended without it is incomplete, because it was killed or the store was unavailable.
"""

import platform
from contextlib import AbstractContextManager, nullcontext, suppress

from mlflow.tracking import MlflowClient

from infra.cli.interrupts import interrupts
from infra.errors import UserError
from infra.storage.directory import StorageDir
from infra.tracking.run_ref import RunRef

FULLY_LOGGED = "fully_logged"

MAX_RUNS_CHECKED = 100
"""Runs that are looked at."""

incomplete: list[RunRef] = []
"""Runs that lacked something when this process opened its own, and have ended; the newest first."""

open_run_dirs: dict[str, str] = {}
"""The homes of this process's open runs, by run id: it holds them itself."""


def open_run_tags(run_dir: str) -> dict[str, str]:
    """Tags of a run that is open."""
    return {"run_dir": run_dir, "host": platform.node(), FULLY_LOGGED: "false"}


@interrupts.delayed()
def close_orphaned_runs(client: MlflowClient, experiments: list[str], parent: RunRef | None = None) -> None:
    """Close as KILLED the runs whose process has died on this machine and, on any machine, the children of ``parent``.

    That is a run that this process continues. Never raises: the next command tries again.
    """
    incomplete.clear()
    which = [f"tags.host = '{platform.node()}'"]
    which += [f"tags.`mlflow.parentRunId` = '{parent.run_id}'"] if parent else []
    with suppress(Exception):
        for one in which:
            for run in client.search_runs(
                experiments, f"tags.{FULLY_LOGGED} = 'false' and {one}", max_results=MAX_RUNS_CHECKED
            ):
                run_ref = RunRef(client.tracking_uri, run.info.experiment_id, run.info.run_id, run.data.tags["run_dir"])
                with suppress(UserError), lock_run_dir(run_ref):
                    if (
                        run.info.status == "RUNNING" and client.get_run(run_ref.run_id).info.status == "RUNNING"
                    ):  # still
                        client.set_terminated(run_ref.run_id, "KILLED")
                    incomplete.append(run_ref)


def is_complete(run_ref: RunRef) -> bool:
    return MlflowClient(run_ref.store).get_run(run_ref.run_id).data.tags.get(FULLY_LOGGED) == "true"


def lock_run_dir(run_ref: RunRef) -> AbstractContextManager[None]:
    """Hold the folder of a run for the block.

    Raises ``UserError`` where the run is open, another command holds its folder, or that cannot be known.
    """
    if run_ref.run_id in open_run_dirs:
        raise UserError(f"{run_ref.run_dir} is in use.")
    if run_ref.run_dir in open_run_dirs.values():
        return nullcontext()
    return StorageDir.of(run_ref.run_dir).lock_orphaned()
