"""Main function of a process that tokenizes one partition after another, started by :mod:`pipeline.job.processes`."""

import os
import pickle
import select
import sys
import threading
import traceback
from contextlib import suppress
from typing import Any

from infra.errors import UserError
from infra.storage.directory import StorageDir
from pipeline.job.plan import Partition
from pipeline.job.task import run_partition


def serve() -> None:
    """Process the partitions that arrive on stdin, and write a reply to each on stdout.

    The first reply confirms the imports. The others are the summary of a partition, or the exception that it raised.
    """
    threading.Thread(target=_exit_with_driver, daemon=True).start()
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # Output of libraries must not mix with the replies.
    reply: Any = True
    with suppress(EOFError, BrokenPipeError):
        while True:
            pickle.dump(reply, replies)
            replies.flush()
            reply = _process(*pickle.load(sys.stdin.buffer))  # noqa: S301 pickled by this program


def _process(partition: Partition, out_dir: StorageDir, run: str) -> dict[str, Any] | Exception:
    try:
        return run_partition(partition, out_dir, run)
    except UserError as error:
        return error
    except Exception:  # noqa: BLE001 not every exception can be pickled
        return RuntimeError(f"Partition {partition.name} failed:\n{traceback.format_exc()}")


def _exit_with_driver() -> None:
    """Exit once the driver closes the pipe, because this process must not write to the output of a killed driver."""
    poll = select.poll()
    poll.register(sys.stdin, 0)  # Without events, poll only waits for the hang-up.
    poll.poll()
    os._exit(1)
