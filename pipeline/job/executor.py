"""Tasks of Ray Data on the connected Ray, which end when the code that iterates over their answers does."""

import logging
import pickle
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from infra.errors import UserError

Item = TypeVar("Item")
Answer = TypeVar("Answer")

_THREADS = ("StreamingExecutor-", "ray-data-metadata-prefetch", "iter_threaded")
"""How the names of an executor's threads that ask Ray for something begin."""
_JOIN_TIMEOUT_SECONDS = 10.0
"""Seconds for which they are waited for, out of the 28 in which a command leaves: the longest question is for a block,
and its task is cancelled by then."""


def run_tasks(
    work: Callable[[Item], Iterable[Answer]], items: Sequence[Item], *, ordered: bool, **map_options: Any
) -> Generator[Answer, None, None]:
    """What ``work(item)`` yields for each of the ``items``, of which each is a task with a core.

    In the order of the items where it is ``ordered``; ``map_options`` are other arguments of Ray Data's
    ``map_batches``. Raises ``UserError`` as ``work`` does. Once the generator is closed or has raised, nothing of it
    runs: by itself Ray Data runs on for as long as something, a traceback for example, refers to it; and where Ray has
    been shut down by then, the next question of one of its threads ends the process, with exit code 1 and without a
    word.
    """
    import ray.data

    logging.getLogger("ray.data").setLevel(logging.ERROR)
    context = ray.data.DataContext.get_current()
    context.execution_options.preserve_order = ordered
    context.op_resource_reservation_enabled = False  # would reserve more than two CPUs have
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    packed = [{"item": pickle.dumps(item)} for item in items]
    tasks = ray.data.from_items(packed, override_num_blocks=len(packed)).map_batches(
        _task,  # type: ignore[arg-type] Ray's type has no further arguments
        fn_args=(work,), batch_size=1, num_cpus=1, **map_options,
    )  # fmt: skip
    others = set(threading.enumerate())
    rows: Any = iter(tasks.iter_rows())  # a generator
    try:
        for row in rows:
            answer = pickle.loads(row["answer"])  # noqa: S301 our own bytes
            if isinstance(answer, Exception):
                raise answer
            yield answer
    finally:
        rows.close()
        until = time.monotonic() + _JOIN_TIMEOUT_SECONDS
        for thread in set(threading.enumerate()) - others:
            if thread.name.startswith(_THREADS):
                thread.join(max(0.0, until - time.monotonic()))


def _task(batch: Any, work: Callable[[Any], Iterable[Any]]) -> Iterator[dict[str, list[bytes]]]:
    try:
        for answer in work(pickle.loads(batch["item"][0])):  # noqa: S301 our own bytes
            yield {"answer": [pickle.dumps(answer)]}
    except UserError as expected:  # as a value, because Ray Data wraps what a task raises
        yield {"answer": [pickle.dumps(expected)]}
