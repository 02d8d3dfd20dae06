"""A process that tokenizes one partition after another; :mod:`pipeline.job.processes` starts and ends it."""

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
    """Process the partitions that arrive on stdin; reply to each on stdout. The first reply confirms the imports.

    A reply is the summary of a partition, or the exception that it raised.
    """
    threading.Thread(target=_exit_with_driver, daemon=True).start()
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries may print to stdout
    reply: Any = True
    with suppress(EOFError, BrokenPipeError):
        while True:
            pickle.dump(reply, replies)
            replies.flush()
            reply = _process(*pickle.load(sys.stdin.buffer))  # noqa: S301 our own bytes


def _process(partition: Partition, out_dir: StorageDir, run: str) -> dict[str, Any] | Exception:
    try:
        return run_partition(partition, out_dir, run)
    except UserError as expected:
        return expected
    except Exception:  # noqa: BLE001 not every exception can be pickled
        return RuntimeError(f"Partition {partition.name} failed:\n{traceback.format_exc()}")


def _exit_with_driver() -> None:
    """Exit once the driver closes the pipe: after a kill, nothing may write to its output any more."""
    poll = select.poll()
    poll.register(sys.stdin, 0)  # without events, it only waits for the hang-up
    poll.poll()
    os._exit(1)
