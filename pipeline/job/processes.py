"""Do the pieces in processes of this machine, without Ray, which takes longer to start than a small corpus.

Each is a plain Python process that is sent one piece at a time. Threads would share Python's lock, which cleaning and
encoding hold most of the time, and processes of ``multiprocessing`` would run the script of the caller again.
"""

import os
import pickle
import subprocess
import sys
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import ExitStack, suppress
from selectors import EVENT_READ, DefaultSelector
from typing import Any

from infra.errors import UserError
from infra.ray.cluster import PROJECT
from infra.storage.directory import StorageDir
from pipeline.job.crash_guard import MAX_CRASHES
from pipeline.job.plan import Partition
from pipeline.shards import PARTITIONS, SPLITS


class _Worker:
    """A process that runs :func:`pipeline.job.worker.serve`."""

    def __init__(self) -> None:
        path = os.pathsep.join(filter(None, [str(PROJECT), os.environ.get("PYTHONPATH", "")]))
        self.process = subprocess.Popen(
            # -P, because a file of the current folder may have the name of one of our packages.
            [sys.executable, "-P", "-c", "from pipeline.job.worker import serve; serve()"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": path},
            process_group=0,  # Ctrl-C is for the command alone, which then ends it
        )  # fmt: skip
        assert self.process.stdin
        assert self.process.stdout
        self.partitions, self.answers = self.process.stdin, self.process.stdout
        self.partition: Partition | None = None
        """What it does; None while it starts."""

    def begin(self, partition: Partition, out_dir: StorageDir, run: str) -> None:
        self.partition = partition
        with suppress(BrokenPipeError):  # it has died, as its answer will tell
            pickle.dump((partition, out_dir, run), self.partitions)
            self.partitions.flush()

    def answer(self) -> Any:
        """What it answers: true once it has started, then a piece's summary or an exception; None if it has died."""
        with suppress(EOFError, pickle.UnpicklingError):
            return pickle.load(self.answers)  # noqa: S301 our own bytes

    def end(self) -> None:
        self.process.kill()
        with suppress(BrokenPipeError), self.process:
            pass


def run_partitions(
    partitions: Sequence[Partition], out_dir: StorageDir, run: str, *, workers: int
) -> Generator[dict[str, Any], None, None]:
    """Do ``partitions``, up to ``workers`` at a time, and yield each one's summary when it is done.

    ``run`` names the running command, for the crash guard: a piece whose process dies is done again by a new one. The
    processes end with the iterator. Raises ``UserError`` as a piece raised it.
    """
    waiting, left, failed = deque(partitions), len(partitions), 0
    with ExitStack() as ending, DefaultSelector() as answering:
        ending.callback(out_dir.remove_temporaries, *SPLITS, PARTITIONS)

        def start() -> None:
            worker = _Worker()
            ending.callback(worker.end)
            answering.register(worker.answers, EVENT_READ, worker)

        def stop(worker: _Worker) -> None:
            answering.unregister(worker.answers)
            worker.end()

        for _ in range(min(workers, len(partitions))):
            start()
        while left:
            for key, _ in answering.select():
                worker: _Worker = key.data
                partition, answer = worker.partition, worker.answer()
                if isinstance(answer, Exception):
                    raise answer
                if answer is None:
                    if partition:
                        waiting.appendleft(partition)
                    elif (failed := failed + 1) == MAX_CRASHES:
                        raise UserError(
                            f"the processes that make the pieces end as they start, with code {worker.process.wait()}: "
                            "see what they printed, and check the installation with 'python -m infra.doctor --quick'."
                        )
                    stop(worker)
                    start()
                    continue
                if waiting:
                    worker.begin(waiting.popleft(), out_dir, run)
                else:
                    stop(worker)
                if partition:
                    left -= 1
                    yield answer
