"""Processing of partitions with Ray Data on all workers of the cluster.

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
"""Number of submitted tasks per worker of a local Ray; a worker runs one task at a time. Ray Data takes up to 0.2 s to
notice a finished task, and without queued tasks a worker would idle meanwhile."""
TASKS_PER_WORKER = 12
"""Number of tasks per worker, if there are enough partitions. With more tasks, a worker idles more often between two
tasks (7 ms); with fewer tasks, it idles longer at the end."""
ASSUMED_CLUSTER_TASKS = 256
"""Assumed number of parallel tasks of a cluster, to which machines may be added."""
MAX_PARTITIONS_PER_TASK = 32
"""Maximum number of partitions per task. A task costs the driver 13 ms and 70 kB, but a crash of its worker repeats all
its partitions."""


def run_partitions(
    partitions: list[Partition], out_dir: StorageDir, run: str, *, workers: int | None, is_own_ray: bool
) -> Generator[dict[str, Any], None, None]:
    """Process ``partitions`` on the connected Ray, and yield the summary of each one when it is finished.

    Raises the ``UserError`` of a task.

    Args:
        partitions: partitions to process.
        out_dir: output folder of the data set.
        run: id of the command for the crash guard.
        workers: maximum number of parallel tasks; by default Ray Data decides.
        is_own_ray: whether this command started Ray.
    """
    import ray.data

    # With Ray Data's backpressure, a queue of 200 bytes would stop all workers but one.
    ray.data.DataContext.get_current().downstream_capacity_backpressure_ratio = None
    groups = group_partitions(partitions, workers)
    limit = workers and min(len(groups), TASKS_IN_FLIGHT_PER_WORKER * workers if is_own_ray else workers)
    at_a_time = ray.data.TaskPoolStrategy(size=limit)
    return run_tasks(partial(_run_group, out_dir, run), groups, keeps_order=False, compute=at_a_time)


def _run_group(out_dir: StorageDir, run: str, partitions: Sequence[Partition]) -> Iterator[dict[str, Any]]:
    for partition in partitions:
        yield run_partition(partition, out_dir, run)


def group_partitions(partitions: Sequence[Partition], workers: int | None) -> list[Sequence[Partition]]:
    """Group ``partitions`` by task, so that there are enough tasks for all workers, but not more."""
    size = min(
        MAX_PARTITIONS_PER_TASK, max(1, len(partitions) // (TASKS_PER_WORKER * (workers or ASSUMED_CLUSTER_TASKS)))
    )
    return [partitions[start : start + size] for start in range(0, len(partitions), size)]


def warm_up(workers: int) -> None:
    """Start worker processes that import the modules and load the tokenizer, without waiting for them."""
    import ray

    @ray.remote(num_cpus=1)
    def load() -> None:
        reduce_gc_frequency()
        import ray.data  # noqa: F401 unpickling a map task imports it

        from pipeline.encoding.tokenizer import gpt2
        from pipeline.job.task import run_partition  # noqa: F401

        gpt2().encode(b"warm")

    for _ in range(workers):
        load.remote()
    import ray.data
