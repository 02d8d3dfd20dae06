"""Do the pieces by Ray Data, on all workers of the cluster.

A task reads its own files and writes its own shards, because Ray's readers cost 4 ms per file and its
writers use random names. Ray is imported in the functions: planning and dry runs do without it.
"""

import logging
import pickle
from collections.abc import Generator, Sequence
from typing import Any

from infra.command import collect_rarely
from infra.errors import UserError
from infra.storage_dir import StorageDir
from pipeline.job.plan import Piece
from pipeline.job.task import do_piece

IN_FLIGHT = 4
"""Submitted tasks per worker of our own Ray, of which it runs one at a time: Ray Data takes up to 0.2 s to notice
that one is done, during which a worker would idle."""
TASKS = 12
"""Tasks per worker, if there are as many pieces: with more, a worker idles more often between two (7 ms); with fewer,
longer at the end."""
SLOTS = 256
"""Tasks that a cluster is assumed to run at a time, because it may grow."""
MOST = 32
"""Pieces per task. Each task costs the driver 13 ms and 70 kB; what was done of it is repeated when its worker dies."""


def do_pieces(
    pieces: list[Piece], place: StorageDir, run: str, *, workers: int | None, ours: bool
) -> Generator[dict[str, Any], None, None]:
    """Do ``pieces`` on the connected Ray and yield each one's summary when it is done.

    ``workers`` limits how many tasks run at a time (default: Ray Data decides), ``ours`` says whether Ray was started
    by this command, and ``run`` names the running command, for the crash guard. Raises ``UserError`` as a task raised
    it.
    """
    import ray.data

    from pipeline.job.executor import executed

    logging.getLogger("ray.data").setLevel(logging.ERROR)
    context = ray.data.DataContext.get_current()
    context.execution_options.preserve_order = False
    context.op_resource_reservation_enabled = False  # would reserve more than two CPUs have
    context.downstream_capacity_backpressure_ratio = None  # would stop all but one worker over a queue of 200 bytes
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    items = [{"pieces": pickle.dumps(group), "place": place.address, "run": run} for group in grouped(pieces, workers)]
    limit = workers and min(len(items), IN_FLIGHT * workers if ours else workers)
    work = ray.data.from_items(items, override_num_blocks=len(items)).map_batches(
        _task, batch_size=1, compute=ray.data.TaskPoolStrategy(size=limit), num_cpus=1
    )
    with executed(work.iter_rows()) as rows:
        for row in rows:
            summary = pickle.loads(row["summary"])  # noqa: S301 our own bytes
            if isinstance(summary, Exception):
                raise summary
            yield summary


def grouped(pieces: Sequence[Piece], workers: int | None) -> list[Sequence[Piece]]:
    """``pieces`` by the task that does them: enough tasks for all workers, and no more of them than that."""
    size = min(MOST, max(1, len(pieces) // (TASKS * (workers or SLOTS))))
    return [pieces[first : first + size] for first in range(0, len(pieces), size)]


def _task(batch: Any) -> dict[str, list[bytes]]:
    pieces: list[Piece] = pickle.loads(batch["pieces"][0])  # noqa: S301 our own bytes
    place, run = StorageDir(str(batch["place"][0])), str(batch["run"][0])
    done: list[Any] = []
    try:
        for piece in pieces:
            done.append(do_piece(piece, place, run))
    except UserError as expected:  # as a value, because Ray Data wraps exceptions of tasks
        done.append(expected)
    return {"summary": [pickle.dumps(summary) for summary in done]}


def warm_up(workers: int) -> None:
    """Start worker processes with their imports done and the vocabulary loaded, without waiting for them."""
    import ray

    @ray.remote(num_cpus=1)
    def load() -> None:
        collect_rarely()
        import ray.data  # noqa: F401 what a map task unpickles needs it

        from pipeline.encoding import gpt2
        from pipeline.job.task import do_piece  # noqa: F401

        gpt2().encode(b"warm")

    for _ in range(workers):
        load.remote()
    import ray.data
