"""Ray Data's executor, held to what is ours: it ends when we do, and starts no actors where no cluster is to grow.

Of the two that it starts first and waits for, one hands out what the cluster has and asks it to grow, and until its
process is up no task begins; the other keeps statistics for a dashboard. Both take their cores from the tasks: a second
of six and a half, on two cores.
"""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray.data._internal import stats
from ray.data._internal.cluster_autoscaler import ClusterAutoscaler
from ray.data._internal.execution import streaming_executor
from ray.data._internal.execution.interfaces import ExecutionResources

from infra.cluster import replaced

_THREADS = ("StreamingExecutor-", "ray-data-metadata-prefetch", "iter_threaded")
"""How the names of an executor's threads that ask Ray for something begin."""
_PATIENCE = 30.0
"""Seconds that one of them is waited for: the longest question is for a block, and its task is cancelled by then."""


class WholeCluster(ClusterAutoscaler):
    """All of the cluster, as it is."""

    def __init__(self, *_: Any, **__: Any) -> None:
        resources = {name: float(amount) for name, amount in ray.cluster_resources().items()}
        self.resources = ExecutionResources.from_resource_dict(resources)

    def get_total_resources(self) -> ExecutionResources:
        """What the tasks may take."""
        return self.resources

    def try_trigger_scaling(self) -> None:
        """It does not grow."""

    def on_executor_shutdown(self) -> None:
        """Nothing was reserved."""


class Nobody:
    """An actor that is not there: told anything, it does nothing."""

    def __getattr__(self, name: str) -> "Nobody":
        return self

    def remote(self, *_: Any, **__: Any) -> None:
        """Do nothing."""


@contextmanager
def without_actors() -> Iterator[None]:
    """While the block runs, Ray Data executes without its actors."""
    with (
        replaced(streaming_executor, {"create_cluster_autoscaler": WholeCluster}),
        replaced(stats, {"get_or_create_stats_actor": Nobody}),
    ):
        yield


@contextmanager
def executed(rows: Iterable[Any]) -> Iterator[Iterator[Any]]:
    """What Ray Data executes as it is iterated over; once the block is left, however it is, nothing of it runs.

    By itself it runs on for as long as something, a traceback for example, refers to it; and where Ray has been shut
    down by then, the next question of one of its threads ends the process, with exit code 1 and without a word.
    """
    others = set(threading.enumerate())
    iterator: Any = iter(rows)  # a generator
    try:
        yield iterator
    finally:
        iterator.close()
        for thread in set(threading.enumerate()) - others:
            if thread.name.startswith(_THREADS):
                thread.join(_PATIENCE)
