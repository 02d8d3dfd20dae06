"""Requests to object storage that end: tried again when they fail, and given up when no answer comes.

In: an action, which makes one or a few requests. Out: its result, or one sentence that says why there is none.
Arrow's clients have no limit of time: a server that accepts a connection and sends nothing, or a byte a second, would
be waited for without end and without a word. So the action runs in a thread, which is left behind when it takes too
long.
"""

import os
import re
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import TypeVar
from urllib.parse import urlsplit

from infra.errors import UserError, first_line

T = TypeVar("T")

ATTEMPTS = 5

FIRST_PAUSE = 0.2
"""Seconds before the second attempt; the pause doubles with each further one."""

SILENT_SECONDS = 10.0
"""How long an action may take before the user is told what is being waited for; longer if it sends a file."""

PATIENCE_SECONDS = 300.0
"""How long an action may take by default, with all attempts. A partition of the network may last a minute."""

SLOWEST_BYTES_PER_SECOND = 1e6
"""For how slow a connection an action that sends a file is given more time."""

_LASTING = re.compile("NO_SUCH_BUCKET|ACCESS_DENIED|INVALID_ACCESS_KEY_ID|SIGNATURE_DOES_NOT_MATCH")
"""S3's errors that do not go away by themselves, as Arrow names them."""

_working: set[threading.Thread] = set()
"""Threads whose action has not ended."""

_told = [float("-inf")]
"""When the user was last told that storage does not answer: once for many requests at a time."""


def with_retries(
    uri: str, action: Callable[[], T], doing: str = "read", *, seconds: float | None = None, size: int = 0
) -> T:
    """The result of ``action()``, which is tried ``ATTEMPTS`` times unless the storage refuses it.

    ``seconds`` is how long it may take (default: ``PATIENCE_SECONDS``), with more time if it sends ``size`` bytes.
    Raises ``FileNotFoundError`` at once and ``UserError``, which ``doing`` describes, after the last attempt or when
    the time is over.
    """
    sending = size / SLOWEST_BYTES_PER_SECOND
    limit = (PATIENCE_SECONDS if seconds is None else seconds) + sending
    quiet = min(SILENT_SECONDS + sending, limit)
    answer: Future[T] = Future()
    given_up = threading.Event()

    def work() -> None:
        try:
            answer.set_result(_attempts(uri, action, doing, given_up))
        except BaseException as failure:  # noqa: BLE001 raised where the action was asked for
            answer.set_exception(failure)
        finally:
            _working.discard(thread)

    thread = threading.Thread(target=work, name="storage", daemon=True)
    _working.add(thread)
    thread.start()
    try:
        if not wait([answer], quiet).done:
            _tell(uri, quiet, limit)
            wait([answer], limit - quiet)
        if not answer.done():
            silence = TimeoutError(f"no complete answer within {limit:.0f} s")
            raise UserError(
                f"{uri} cannot be {doing}: {silence}. Check the address and the network, then run the same command "
                "again to continue from here."
            ) from silence
        return answer.result()
    finally:
        given_up.set()


def _attempts(uri: str, action: Callable[[], T], doing: str, given_up: threading.Event) -> T:
    pause = FIRST_PAUSE
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return action()
        except FileNotFoundError:
            raise
        except _failures(uri) as failure:
            if _LASTING.search(str(failure)):
                raise UserError(
                    f"{uri} cannot be {doing} ({reason(failure)}): check the address and your credentials."
                ) from failure
            if attempt == ATTEMPTS or given_up.wait(pause):
                raise UserError(
                    f"{uri} cannot be {doing}, after {attempt} attempts: {reason(failure)}. Run the same command "
                    "again to continue from here."
                ) from failure
            pause *= 2
    raise AssertionError("the last attempt returns or raises")


def _tell(uri: str, quiet: float, limit: float) -> None:
    """Say it once for as long as a request may take."""
    if time.monotonic() - _told[0] < limit:
        return
    _told[0] = time.monotonic()
    from infra.console import errors  # a tokenizing worker has no use for a terminal otherwise

    errors.print(
        f"Still waiting for {uri} after {quiet:.0f} s, and for up to {limit:.0f} s; Ctrl-C exits.", markup=False
    )


def exit_if_unanswered(code: int) -> None:
    """Exit this process with ``code`` at once if an action has not ended, as the last thing that it does.

    Arrow waits at Python's exit for requests that have not been answered, for as long as that takes.
    """
    if any(thread.is_alive() for thread in tuple(_working)):
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # whose reader has gone, or that is closed
                stream.flush()
        os._exit(code)


def reason(failure: BaseException) -> str:
    """What the storage said, without the names of requests that Arrow's S3 client puts around it."""
    said = re.search(r"AWS Error .*? during \w+ operation: (.+?)(?: \(Request ID|$)", first_line(failure))
    return (said[1] if said else first_line(failure)).rstrip(".")


def _failures(uri: str) -> tuple[type[Exception], ...]:
    """The exceptions of failing storage at ``uri``; the Hugging Face hub's filesystem also raises its client's own."""
    if urlsplit(uri).scheme != "hf":
        return (OSError,)
    from huggingface_hub.errors import HTTPError  # type: ignore[reportPrivateImportUsage] that of its HTTP client

    return (OSError, HTTPError)
