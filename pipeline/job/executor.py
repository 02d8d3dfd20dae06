"""Ray Data tasks on the connected Ray, which end when the caller stops iterating over their results."""

import logging
import pickle
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from infra.errors import UserError

Item = TypeVar("Item")
Result = TypeVar("Result")

_RAY_THREAD_PREFIXES = ("StreamingExecutor-", "ray-data-metadata-prefetch", "iter_threaded")
"""Prefixes of the names of Ray Data's threads that send requests to Ray."""
_JOIN_TIMEOUT_SECONDS = 10.0
"""Time limit of the wait for Ray Data's threads, of the 28 s in which a command must exit."""


def run_tasks(
    work: Callable[[Item], Iterable[Result]], items: Sequence[Item], *, keeps_order: bool, **map_options: Any
) -> Generator[Result, None, None]:
    """Yield the results of ``work(item)`` for each of ``items``; each item is a task with one CPU core.

    Once the generator is closed or has raised, all its tasks and threads have ended. Otherwise Ray Data would continue
    while any object, such as a traceback, refers to it. If Ray were shut down meanwhile, the next request of such a
    thread would end the process silently with exit code 1.

    Args:
        work: function of a task; may raise ``UserError``.
        items: arguments of the tasks.
        ordered: whether the results are in the order of the items.
        map_options: further arguments of Ray Data's ``map_batches``.
    """
    import ray.data

    logging.getLogger("ray.data").setLevel(logging.ERROR)
    context = ray.data.DataContext.get_current()
    context.execution_options.preserve_order = keeps_order
    context.op_resource_reservation_enabled = False  # The reservation needs more resources than two CPUs have.
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    pickled_items = [{"item": pickle.dumps(item)} for item in items]
    tasks = ray.data.from_items(pickled_items, override_num_blocks=len(pickled_items)).map_batches(
        _task,  # type: ignore[arg-type] Ray's type has no further arguments
        fn_args=(work,), batch_size=1, num_cpus=1, **map_options,
    )  # fmt: skip
    earlier_threads = set(threading.enumerate())
    rows: Any = iter(tasks.iter_rows())
    try:
        for row in rows:
            result = pickle.loads(row["result"])  # noqa: S301 pickled by this program
            if isinstance(result, Exception):
                raise result
            yield result
    finally:
        rows.close()
        deadline = time.monotonic() + _JOIN_TIMEOUT_SECONDS
        for thread in set(threading.enumerate()) - earlier_threads:
            if thread.name.startswith(_RAY_THREAD_PREFIXES):
                thread.join(max(0.0, deadline - time.monotonic()))


def _task(batch: Any, work: Callable[[Any], Iterable[Any]]) -> Iterator[dict[str, list[bytes]]]:
    try:
        for result in work(pickle.loads(batch["item"][0])):  # noqa: S301 pickled by this program
            yield {"result": [pickle.dumps(result)]}
    except UserError as error:  # Returned as a value, because Ray Data wraps the exceptions of tasks.
        yield {"result": [pickle.dumps(error)]}
