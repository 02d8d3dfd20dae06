"""Have Ray Data do the pieces: one task each, on however many workers the cluster has.

In: pieces. Out: their summaries, as they are done. Ray Data hands out the work and limits how much is in
flight; a task reads its own files and writes its own shard, because Ray's readers cost 4 ms a file and
its writers use random names. Ray is imported in the functions: planning and dry runs do without it.
"""

import logging
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from infra.command import UserError
from pipeline.encoding import EncodingMismatch
from pipeline.piece import do_piece
from pipeline.plan import Piece


def do_pieces(pieces: list[Piece], folder: Path, tasks: int | None, run: str) -> Iterator[dict[str, Any]]:
    """Do ``pieces`` on the connected Ray and yield each one's summary when it is done.

    ``tasks`` limits how many are handed out at a time (default: as many as Ray Data sees fit), and ``run`` names
    the command's run, for the notes that survive a dead worker.
    Raises ``UserError`` or ``EncodingMismatch`` as a task raised it.
    """
    import ray.data

    logging.getLogger("ray.data").setLevel(logging.ERROR)
    context = ray.data.DataContext.get_current()
    context.execution_options.preserve_order = False
    context.op_resource_reservation_enabled = False  # reserves more than two CPUs have
    context.downstream_capacity_backpressure_ratio = None  # held all but one worker back over a queue of 200 bytes
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    items = [{"piece": pickle.dumps(piece), "folder": str(folder), "run": run} for piece in pieces]
    work = ray.data.from_items(items, override_num_blocks=len(items)).map_batches(
        _task, batch_size=1, compute=ray.data.TaskPoolStrategy(size=tasks and min(tasks, len(items))), num_cpus=1
    )
    for row in work.iter_rows():
        summary = pickle.loads(row["summary"])  # noqa: S301 our own bytes
        if isinstance(summary, Exception):
            raise summary
        yield summary


def _task(batch: Any) -> dict[str, list[bytes]]:
    piece: Piece = pickle.loads(batch["piece"][0])  # noqa: S301 our own bytes
    try:
        summary = do_piece(piece, Path(str(batch["folder"][0])), str(batch["run"][0]))
    except (UserError, EncodingMismatch) as expected:  # as a value, because Ray Data wraps what a task raises
        return {"summary": [pickle.dumps(expected)]}
    return {"summary": [pickle.dumps(summary)]}


def warm_up(workers: int) -> None:
    """Start worker processes with their imports done and the vocabulary loaded, without waiting for them."""
    import ray

    @ray.remote(num_cpus=1)
    def load() -> None:
        import ray.data  # noqa: F401 what a map task unpickles needs it

        from pipeline.encoding import encode
        from pipeline.piece import do_piece  # noqa: F401

        encode(b"warm")

    for _ in range(workers):
        load.remote()
    import ray.data
