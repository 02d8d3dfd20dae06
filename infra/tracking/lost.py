"""Runs whose process has died: they are closed by the next command, and completed from what their folder has.

Every run carries the tag ``home``, the folder that its command holds by a lock for as long as it lives, and ``host``,
this machine. Where that lock can be taken, the process has died. The tag ``complete`` is a run's last entry: a run that
has ended without it lacks something, because it was killed or the store was away.
"""

import platform
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext, suppress

from mlflow.tracking import MlflowClient

from infra.command import uninterrupted
from infra.errors import UserError
from infra.place import Place
from infra.tracking.key import RunKey

COMPLETE = "complete"

NEWEST = 100
"""Runs that are looked at."""

opened: dict[str, str] = {}
"""The homes of this process's open runs, by run id: it holds them itself."""


def labels(home: str) -> dict[str, str]:
    """Tags of a run that is open."""
    return {"home": home, "host": platform.node(), COMPLETE: "false"}


@uninterrupted()
def close_lost(client: MlflowClient, experiments: list[str]) -> None:
    """Close the runs whose process has died on this machine, as KILLED. Never raises: the next command tries again."""
    with suppress(Exception):
        for key in _found(client, experiments, "attributes.status = 'RUNNING'"):
            with suppress(UserError), _held(key.home):
                if client.get_run(key.run_id).info.status == "RUNNING":  # it may have ended since it was found
                    client.set_terminated(key.run_id, "KILLED")


def incomplete(key: RunKey) -> Iterator[RunKey]:
    """Runs of the experiment of ``key`` that have ended on this machine and lack something, the newest first.

    The home of each is held while it is treated.
    """
    client = MlflowClient(key.store)
    for left in _found(client, [key.experiment_id], f"attributes.status != 'RUNNING' and tags.{COMPLETE} = 'false'"):
        with suppress(UserError), _held(left.home):
            yield left


def is_complete(key: RunKey) -> bool:
    """Whether the run has ended with all its entries."""
    return MlflowClient(key.store).get_run(key.run_id).data.tags.get(COMPLETE) == "true"


def _found(client: MlflowClient, experiments: list[str], which: str) -> list[RunKey]:
    here = f"{which} and tags.host = '{platform.node()}'"
    return [
        RunKey(client.tracking_uri, run.info.experiment_id, run.info.run_id, run.data.tags["home"])
        for run in client.search_runs(experiments, here, max_results=NEWEST)
        if run.data.tags.get("home") and run.info.run_id not in opened
    ]


def _held(home: str) -> AbstractContextManager[None]:
    """Hold ``home`` for the block. Raises ``UserError`` where another command does, or that cannot be known."""
    place = Place(home)
    if home in opened.values():
        return nullcontext()
    if place.lock_file.exists():
        return place.locked("a command is running there")
    if place.remote or not place.parent.folder.is_dir():
        raise UserError(f"{home} is not known here")
    return nullcontext()  # it was removed
