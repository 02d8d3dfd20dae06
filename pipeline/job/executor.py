"""Ray Data's executor, made to end when the code that iterates over its results does."""

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

_THREADS = ("StreamingExecutor-", "ray-data-metadata-prefetch", "iter_threaded")
"""How the names of an executor's threads that ask Ray for something begin."""
_PATIENCE = 10.0
"""Seconds for which they are waited for, out of the 28 in which a command leaves: the longest question is for a block,
and its task is cancelled by then."""


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
        until = time.monotonic() + _PATIENCE
        for thread in set(threading.enumerate()) - others:
            if thread.name.startswith(_THREADS):
                thread.join(max(0.0, until - time.monotonic()))
