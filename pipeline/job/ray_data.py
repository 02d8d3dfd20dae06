"""Do the pieces by Ray Data, on all workers of the cluster.

A task reads its own files and writes its own shards, because Ray's readers cost 4 ms per file and its
writers use random names. Ray is imported in the functions: planning and dry runs do without it.
"""

from collections.abc import Generator, Iterator, Sequence
from functools import partial
from typing import Any

from infra.cli.command import collect_rarely
from infra.storage.directory import StorageDir
from pipeline.job.executor import answers
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

    # It would stop all but one worker over a queue of 200 bytes.
    ray.data.DataContext.get_current().downstream_capacity_backpressure_ratio = None
    groups = grouped(pieces, workers)
    limit = workers and min(len(groups), IN_FLIGHT * workers if ours else workers)
    at_a_time = ray.data.TaskPoolStrategy(size=limit)
    return answers(partial(_done, place, run), groups, ordered=False, compute=at_a_time)


def _done(place: StorageDir, run: str, pieces: Sequence[Piece]) -> Iterator[dict[str, Any]]:
    for piece in pieces:
        yield do_piece(piece, place, run)


def grouped(pieces: Sequence[Piece], workers: int | None) -> list[Sequence[Piece]]:
    """``pieces`` by the task that does them: enough tasks for all workers, and no more of them than that."""
    size = min(MOST, max(1, len(pieces) // (TASKS * (workers or SLOTS))))
    return [pieces[first : first + size] for first in range(0, len(pieces), size)]


def warm_up(workers: int) -> None:
    """Start worker processes with their imports done and the vocabulary loaded, without waiting for them."""
    import ray

    @ray.remote(num_cpus=1)
    def load() -> None:
        collect_rarely()
        import ray.data  # noqa: F401 what a map task unpickles needs it

        from pipeline.encoding.tokenizer import gpt2
        from pipeline.job.task import do_piece  # noqa: F401

        gpt2().encode(b"warm")

    for _ in range(workers):
        load.remote()
    import ray.data
