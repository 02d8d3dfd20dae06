"""Process partitions with Ray Data, on all workers of the cluster.

A task reads its own files and writes its own shards, because Ray's readers take 4 ms per file and its writers use
random names. Ray is imported inside the functions, because planning and dry runs do not need it.
"""

from collections.abc import Generator, Iterator, Sequence
from functools import partial
from typing import Any

from infra.cli.command import reduce_gc_frequency
from infra.storage.directory import StorageDir
from pipeline.job.executor import run_tasks
from pipeline.job.plan import Partition
from pipeline.job.task import run_partition

TASKS_IN_FLIGHT_PER_WORKER = 4
"""Submitted tasks per worker of a Ray that this command started; a worker runs one at a time. Ray Data takes up to 0.2
s to notice a finished task, and without queued tasks a worker would idle meanwhile."""
TASKS_PER_WORKER = 12
"""Tasks per worker, if there are enough partitions. With more tasks, a worker idles more often between two (7 ms); with
fewer, longer at the end."""
ASSUMED_CLUSTER_TASKS = 256
"""Assumed number of parallel tasks of a cluster, which may grow."""
MAX_PARTITIONS_PER_TASK = 32
"""Maximum number of partitions per task. A task costs the driver 13 ms and 70 kB; all its partitions are repeated if
its worker crashes."""


def run_partitions(
    partitions: list[Partition], out_dir: StorageDir, run: str, *, workers: int | None, is_own_ray: bool
) -> Generator[dict[str, Any], None, None]:
    """Process ``partitions`` on the connected Ray, and yield the summary of each one when it is finished.

    ``workers`` limits the number of parallel tasks (by default Ray Data decides). ``is_own_ray`` says whether this
    command started Ray. ``run`` is the id of the command, for the crash guard. Raises the ``UserError`` of a task.
    """
    import ray.data

    # The backpressure would stop all but one worker for a queue of 200 bytes.
    ray.data.DataContext.get_current().downstream_capacity_backpressure_ratio = None
    groups = group_partitions(partitions, workers)
    limit = workers and min(len(groups), TASKS_IN_FLIGHT_PER_WORKER * workers if is_own_ray else workers)
    at_a_time = ray.data.TaskPoolStrategy(size=limit)
    return run_tasks(partial(_run_group, out_dir, run), groups, ordered=False, compute=at_a_time)


def _run_group(out_dir: StorageDir, run: str, partitions: Sequence[Partition]) -> Iterator[dict[str, Any]]:
    for partition in partitions:
        yield run_partition(partition, out_dir, run)


def group_partitions(partitions: Sequence[Partition], workers: int | None) -> list[Sequence[Partition]]:
    """Group ``partitions`` by task: enough tasks for all workers, but not more."""
    size = min(
        MAX_PARTITIONS_PER_TASK, max(1, len(partitions) // (TASKS_PER_WORKER * (workers or ASSUMED_CLUSTER_TASKS)))
    )
    return [partitions[first : first + size] for first in range(0, len(partitions), size)]


def warm_up(workers: int) -> None:
    """Start worker processes that import the modules and load the tokenizer, without waiting for them."""
    import ray

    @ray.remote(num_cpus=1)
    def load() -> None:
        reduce_gc_frequency()
        import ray.data  # noqa: F401 needed to unpickle a map task

        from pipeline.encoding.tokenizer import gpt2
        from pipeline.job.task import run_partition  # noqa: F401

        gpt2().encode(b"warm")

    for _ in range(workers):
        load.remote()
    import ray.data
