"""Runs whose process has died: they are closed by the next command, and completed from what their folder has.

Every run carries the tag ``home``, the folder that its command holds by a lock for as long as it lives, and ``host``,
this machine. Where that lock can be taken, the process has died. The tag ``complete`` is a run's last entry: a run that
has ended without it lacks something, because it was killed or the store was away.
"""

import platform
from contextlib import AbstractContextManager, nullcontext, suppress

from mlflow.tracking import MlflowClient

from infra.cli.command import uninterrupted
from infra.errors import UserError
from infra.storage.directory import StorageDir
from infra.tracking.run_ref import RunKey

COMPLETE = "complete"

NEWEST = 100
"""Runs that are looked at."""

incomplete: list[RunKey] = []
"""Runs that lacked something when this process opened its own, and have ended; the newest first."""

opened: dict[str, str] = {}
"""The homes of this process's open runs, by run id: it holds them itself."""


def labels(home: str) -> dict[str, str]:
    """Tags of a run that is open."""
    return {"home": home, "host": platform.node(), COMPLETE: "false"}


@uninterrupted()
def close_lost(client: MlflowClient, experiments: list[str], parent: RunKey | None = None) -> None:
    """Close as KILLED the runs whose process has died on this machine and, on any machine, the children of ``parent``.

    That is a run that this process continues. Never raises: the next command tries again.
    """
    incomplete.clear()
    which = [f"tags.host = '{platform.node()}'"]
    which += [f"tags.`mlflow.parentRunId` = '{parent.run_id}'"] if parent else []
    with suppress(Exception):
        for one in which:
            for run in client.search_runs(experiments, f"tags.{COMPLETE} = 'false' and {one}", max_results=NEWEST):
                key = RunKey(client.tracking_uri, run.info.experiment_id, run.info.run_id, run.data.tags["home"])
                with suppress(UserError), held(key):
                    if run.info.status == "RUNNING" and client.get_run(key.run_id).info.status == "RUNNING":  # still
                        client.set_terminated(key.run_id, "KILLED")
                    incomplete.append(key)


def is_complete(key: RunKey) -> bool:
    return MlflowClient(key.store).get_run(key.run_id).data.tags.get(COMPLETE) == "true"


def held(key: RunKey) -> AbstractContextManager[None]:
    """Hold the home of a run for the block.

    Raises ``UserError`` where the run is open, another command holds its home, or that cannot be known.
    """
    place = StorageDir(key.home)
    if key.run_id not in opened:
        if key.home in opened.values():
            return nullcontext()
        if place.lock_file.exists():
            return place.locked(f"a command is running in {place}")
        if not place.remote and place.parent.folder.is_dir():  # it was removed
            return nullcontext()
    raise UserError(f"{place} may be in use")
