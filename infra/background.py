"""Work that repeats on a thread of its own while a block runs."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def repeated(work: Callable[[], object], seconds: float, name: str) -> Iterator[None]:
    """Call ``work`` every ``seconds`` on a thread called ``name`` until the block has ended, or ``work`` returns True.

    The block ends after the last call. ``work`` must not raise.
    """
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(seconds) and work() is not True:
            pass

    thread = threading.Thread(target=repeat, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
