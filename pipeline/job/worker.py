"""A process that does pieces one after another: see :mod:`pipeline.job.processes`, which starts and ends it."""

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
from pipeline.job.task import do_piece


def serve() -> None:
    """Do the pieces that arrive on stdin and answer each on stdout; first of all, answer that everything is imported.

    An answer is a piece's summary, or the exception that it ended with.
    """
    threading.Thread(target=_end_with_sender, daemon=True).start()
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # where a library may print
    answer: Any = True
    with suppress(EOFError, BrokenPipeError):
        while True:
            pickle.dump(answer, answers)
            answers.flush()
            answer = _done(*pickle.load(sys.stdin.buffer))  # noqa: S301 our own bytes


def _done(partition: Partition, out_dir: StorageDir, run: str) -> dict[str, Any] | Exception:
    try:
        return do_piece(partition, out_dir, run)
    except UserError as expected:
        return expected
    except Exception:  # noqa: BLE001 not every exception can be pickled
        return RuntimeError(f"piece {partition.name} failed:\n{traceback.format_exc()}")


def _end_with_sender() -> None:
    """Exit as soon as nobody can send anything more: a killed command must not have its output written to."""
    hung_up = select.poll()
    hung_up.register(sys.stdin, 0)
    hung_up.poll()
    os._exit(1)
