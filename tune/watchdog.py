"""Notice when Ray itself dies under a search, for which Ray Tune would wait for ever.

In: a connected Ray. Out: a call, from a thread of its own, once the control service or this machine's raylet
no longer takes connections. Asking Ray would not do: calls into a Ray that lost its raylet do not return.
"""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import ray

POLL_SECONDS = 0.5
ANSWER_SECONDS = 5.0
OWN_GRACE = 2.0
"""Seconds without an answer after which a Ray of our own is dead: nothing starts its processes again."""
CLUSTER_GRACE = 45.0
"""The same for a cluster's, whose control service may be restarted; Ray ends its drivers itself after 60."""


@contextmanager
def watching(lost: Callable[[str], None], *, grace: float = OWN_GRACE) -> Iterator[None]:
    """While the block runs, call ``lost`` with the part of Ray that has given no answer for ``grace`` seconds."""
    ended = threading.Event()
    places = parts()

    def watch() -> None:
        heard = dict.fromkeys(places, time.monotonic())
        while not ended.wait(POLL_SECONDS):
            for name, place in places.items():
                if answers(place):
                    heard[name] = time.monotonic()
                elif time.monotonic() - heard[name] > grace and not ended.is_set():
                    return lost(name)

    thread = threading.Thread(target=watch, name="watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def parts() -> dict[str, tuple[str, int]]:
    """Host and port of the parts of Ray that a driver cannot do without."""
    context = ray.get_runtime_context()
    host, _, port = context.gcs_address.rpartition(":")
    own = next(node for node in ray.nodes() if node["NodeID"] == context.get_node_id())
    return {
        "control service (gcs_server)": (host, int(port)),
        "raylet": (own["NodeManagerAddress"], own["NodeManagerPort"]),
    }


def answers(place: tuple[str, int]) -> bool:
    """Whether something takes connections there."""
    try:
        with socket.create_connection(place, timeout=ANSWER_SECONDS):
            return True
    except OSError:
        return False
