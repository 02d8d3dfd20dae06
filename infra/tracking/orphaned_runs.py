"""Orphaned runs, whose process has died: the next command closes them and completes them from their run folder.

Every run has the tags ``run_dir``, the folder that its command locks until it ends, and ``host``, the machine of the
command. If another command can lock the folder, the process has died. The tag ``fully_logged`` is the last entry of a
run. A run that ended without it is incomplete, because it was killed or the store was unavailable.
"""

import platform
from contextlib import AbstractContextManager, nullcontext, suppress

from mlflow.tracking import MlflowClient

from infra.cli.interrupts import interrupts
from infra.errors import UserError
from infra.storage.directory import StorageDir
from infra.tracking.run_ref import RunRef

FULLY_LOGGED = "fully_logged"
"""Tag whose value is ``true`` once the store has all entries of a run."""

MAX_RUNS_CHECKED = 100
"""Maximum number of runs that one command checks."""

incomplete_runs: list[RunRef] = []
"""Runs that had ended without all entries when this process opened its own run, the newest first."""

open_run_dirs: dict[str, str] = {}
"""Run folders of this process's open runs by run id; this process has locked them itself."""


def open_run_tags(run_dir: str) -> dict[str, str]:
    """Return the tags of an open run."""
    return {"run_dir": run_dir, "host": platform.node(), FULLY_LOGGED: "false"}


@interrupts.delayed()
def close_orphaned_runs(client: MlflowClient, experiments: list[str], parent: RunRef | None = None) -> None:
    """Close runs whose process has died as KILLED, and collect them in :data:`incomplete_runs`.

    These are runs of this machine and, if this process resumes the run ``parent``, its children on any machine. Never
    raises, because the next command tries again.
    """
    incomplete_runs.clear()
    filters = [f"tags.host = '{platform.node()}'"]
    filters += [f"tags.`mlflow.parentRunId` = '{parent.run_id}'"] if parent else []
    with suppress(Exception):
        for run_filter in filters:
            for run in client.search_runs(
                experiments, f"tags.{FULLY_LOGGED} = 'false' and {run_filter}", max_results=MAX_RUNS_CHECKED
            ):
                run_ref = RunRef(client.tracking_uri, run.info.experiment_id, run.info.run_id, run.data.tags["run_dir"])
                with suppress(UserError), lock_run_dir(run_ref):
                    # Another command may have closed the run since it was listed.
                    if run.info.status == "RUNNING" and client.get_run(run_ref.run_id).info.status == "RUNNING":
                        client.set_terminated(run_ref.run_id, "KILLED")
                    incomplete_runs.append(run_ref)


def is_complete(run_ref: RunRef) -> bool:
    """Return whether the store has all entries of the run."""
    return MlflowClient(run_ref.store).get_run(run_ref.run_id).data.tags.get(FULLY_LOGGED) == "true"


def lock_run_dir(run_ref: RunRef) -> AbstractContextManager[None]:
    """Lock the folder of a run during the block.

    Raises ``UserError`` if the run is open, or if another command has locked or may have locked the folder.
    """
    if run_ref.run_id in open_run_dirs:
        raise UserError(f"{run_ref.run_dir} is in use.")
    if run_ref.run_dir in open_run_dirs.values():
        return nullcontext()
    return StorageDir.of(run_ref.run_dir).lock_orphaned()
