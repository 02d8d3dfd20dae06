"""Processing of partitions in local processes without Ray, whose start takes longer than tokenizing a small corpus.

Each one is a plain Python process that receives one partition at a time. Threads would share the GIL, which cleaning
and encoding hold most of the time, and processes of ``multiprocessing`` would run the caller's script again.
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
from infra.ray.cluster import PROJECT_DIR
from infra.storage.directory import StorageDir
from pipeline.job.crash_guard import MAX_CRASHES
from pipeline.job.plan import Partition
from pipeline.shards import PARTITIONS_FOLDER, SPLITS


class _Worker:
    """Process that runs :func:`pipeline.job.worker.serve`."""

    def __init__(self) -> None:
        path = os.pathsep.join(filter(None, [str(PROJECT_DIR), os.environ.get("PYTHONPATH", "")]))
        self.process = subprocess.Popen(
            # With -P, files in the current folder cannot hide the packages of this project.
            [sys.executable, "-P", "-c", "from pipeline.job.worker import serve; serve()"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": path},
            process_group=0,  # Ctrl-C only reaches the command, which ends this process.
        )  # fmt: skip
        assert self.process.stdin
        assert self.process.stdout
        self.requests, self.replies = self.process.stdin, self.process.stdout
        self.partition: Partition | None = None
        """Current partition of the process; None while the process starts."""

    def send(self, partition: Partition, out_dir: StorageDir, run: str) -> None:
        """Send the next partition to the process."""
        self.partition = partition
        with suppress(BrokenPipeError):  # The missing reply shows that the process has crashed.
            pickle.dump((partition, out_dir, run), self.requests)
            self.requests.flush()

    def receive(self) -> Any:
        """Read a reply: True after the start, later the summary of a partition or an exception; None after a crash."""
        with suppress(EOFError, pickle.UnpicklingError):
            return pickle.load(self.replies)  # noqa: S301 pickled by this program

    def kill(self) -> None:
        """Kill the process and close its pipes."""
        self.process.kill()
        with suppress(BrokenPipeError), self.process:
            pass


def run_partitions(
    partitions: Sequence[Partition], out_dir: StorageDir, run: str, *, workers: int
) -> Generator[dict[str, Any], None, None]:
    """Process ``partitions``, up to ``workers`` at a time, and yield the summary of each one when it is finished.

    If a process crashes, a new one repeats its partition; ``run`` is the id of the command for the crash guard. The
    processes end with the iterator. Raises the ``UserError`` of a partition.
    """
    queue, unfinished, failed_starts = deque(partitions), len(partitions), 0
    with ExitStack() as stack, DefaultSelector() as selector:
        stack.callback(out_dir.remove_temporaries, *SPLITS, PARTITIONS_FOLDER)

        def start() -> None:
            worker = _Worker()
            stack.callback(worker.kill)
            selector.register(worker.replies, EVENT_READ, worker)

        def stop(worker: _Worker) -> None:
            selector.unregister(worker.replies)
            worker.kill()

        for _ in range(min(workers, len(partitions))):
            start()
        while unfinished:
            for key, _ in selector.select():
                worker: _Worker = key.data
                partition, reply = worker.partition, worker.receive()
                if isinstance(reply, Exception):
                    raise reply
                if reply is None:
                    if partition:
                        queue.appendleft(partition)
                    elif (failed_starts := failed_starts + 1) == MAX_CRASHES:
                        raise UserError(
                            f"The tokenizer processes exit at startup with code {worker.process.wait()}. Read their "
                            "output above, and check the installation with 'python -m infra.doctor --quick'."
                        )
                    stop(worker)
                    start()
                    continue
                if queue:
                    worker.send(queue.popleft(), out_dir, run)
                else:
                    stop(worker)
                if partition:
                    unfinished -= 1
                    yield reply
