"""Do the pieces by Ray Data, on all workers of the cluster.

A task reads its own files and writes its own shards, because Ray's readers cost 4 ms per file and its
writers use random names. Ray is imported in the functions: planning and dry runs do without it.
"""

from collections.abc import Generator, Iterator, Sequence
from functools import partial
from typing import Any

from infra.cli.command import reduce_gc_frequency
from infra.storage.directory import StorageDir
from pipeline.job.executor import run_tasks
from pipeline.job.plan import Partition
from pipeline.job.task import do_piece

IN_FLIGHT = 4
"""Submitted tasks per worker of our own Ray, of which it runs one at a time: Ray Data takes up to 0.2 s to notice
that one is done, during which a worker would idle."""
TASKS = 12
"""Tasks per worker, if there are as many pieces: with more, a worker idles more often between two (7 ms); with fewer,
longer at the end."""
ASSUMED_CLUSTER_TASKS = 256
"""Tasks that a cluster is assumed to run at a time, because it may grow."""
MAX_PARTITIONS_PER_TASK = 32
"""Pieces per task. Each task costs the driver 13 ms and 70 kB; what was done of it is repeated when its worker dies."""


def run_partitions(
    partitions: list[Partition], out_dir: StorageDir, run: str, *, workers: int | None, is_own_ray: bool
) -> Generator[dict[str, Any], None, None]:
    """Do ``partitions`` on the connected Ray and yield each one's summary when it is done.

    ``workers`` limits how many tasks run at a time (default: Ray Data decides), ``is_own_ray`` says whether Ray was
    started by this command, and ``run`` names the running command, for the crash guard. Raises ``UserError`` as a task
    raised it.
    """
    import ray.data

    # It would stop all but one worker over a queue of 200 bytes.
    ray.data.DataContext.get_current().downstream_capacity_backpressure_ratio = None
    groups = grouped(partitions, workers)
    limit = workers and min(len(groups), IN_FLIGHT * workers if is_own_ray else workers)
    at_a_time = ray.data.TaskPoolStrategy(size=limit)
    return run_tasks(partial(_run_group, out_dir, run), groups, ordered=False, compute=at_a_time)


def _run_group(out_dir: StorageDir, run: str, partitions: Sequence[Partition]) -> Iterator[dict[str, Any]]:
    for partition in partitions:
        yield do_piece(partition, out_dir, run)


def grouped(partitions: Sequence[Partition], workers: int | None) -> list[Sequence[Partition]]:
    """``partitions`` by the task that does them: enough tasks for all workers, and no more of them than that."""
    size = min(MAX_PARTITIONS_PER_TASK, max(1, len(partitions) // (TASKS * (workers or ASSUMED_CLUSTER_TASKS))))
    return [partitions[first : first + size] for first in range(0, len(partitions), size)]


def warm_up(workers: int) -> None:
    """Start worker processes with their imports done and the vocabulary loaded, without waiting for them."""
    import ray

    @ray.remote(num_cpus=1)
    def load() -> None:
        reduce_gc_frequency()
        import ray.data  # noqa: F401 what a map task unpickles needs it

        from pipeline.encoding.tokenizer import gpt2
        from pipeline.job.task import do_piece  # noqa: F401

        gpt2().encode(b"warm")

    for _ in range(workers):
        load.remote()
    import ray.data
