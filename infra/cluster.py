"""One place to start or join Ray: quiet, on loopback, with the settings that every command relies on.

In: an address, or none for a Ray of our own that ends with the command. Out: an initialised Ray.
Why not plain ``ray.init()``: it joins whatever cluster happens to run on the machine, prints a page,
phones home, and leaves ``-m`` modules unimportable in workers started from another folder.
"""

import functools
import logging
import os
import shutil
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from infra.command import UserError, first_line, heed_termination, uninterrupted

PROJECT = Path(__file__).resolve().parent.parent

_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    # Ray Train's controller polls its workers at this interval, 2 s by default: so late is a run's end seen. Each
    # poll takes time from the training of a CPU (a tenth of its tokens/s at 0.1 s on two cores).
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    # An actor, which is a process, that warns of spot machines about to go; a killed run continues anyway.
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    # A raylet that starts asks its own store for a connection, and where that is not up yet, again after a second.
    "RAY_raylet_client_connect_timeout_milliseconds": "20",
    "RAY_raylet_client_num_connect_attempts": "500",
    # Ray Tune forgets trials that finished since its last snapshot when the driver is killed.
    "TUNE_GLOBAL_CHECKPOINT_S": "1",
}

ANSWER_SECONDS = 10.0
"""How long a cluster's machine may take to answer."""


@contextmanager
def connected(
    address: str | None = None,
    *,
    cpus: int | None = None,
    prestart: bool = True,
    environment: Mapping[str, str] | None = None,
) -> Iterator[None]:
    """Join the Ray cluster at ``address`` or ``RAY_ADDRESS``, or start one on this machine, for the block's length.

    ``cpus`` is the number of parallel tasks a local Ray may run (default: the machine's cores), and
    ``prestart`` starts a worker for each at once: two seconds of a core each, in vain for Ray Train, whose
    processes have a runtime_env and are therefore started anew. ``environment`` is what all workers are started
    with. Raises ``UserError`` when nothing answers at ``address``.
    """
    named = "--address" if address else "RAY_ADDRESS"
    address = address or os.environ.get("RAY_ADDRESS")
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    import ray

    if ray.is_initialized():  # inside another block: the Ray of a ladder is also the Ray of its rungs
        yield
        return
    search_path = os.pathsep.join(filter(None, [str(PROJECT), os.environ.get("PYTHONPATH", "")]))
    variables = {"PYTHONPATH": search_path} | dict(environment or {})
    leaving = ExitStack()
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        if address:
            with _impatient(address):
                ray.init(address=address, runtime_env={"env_vars": variables}, **quiet)
        else:
            leaving.enter_context(_loopback())
            # Inherited, and not a runtime_env, for which Ray would throw away the workers it starts in advance.
            os.environ.update(variables)
            os.environ["RAY_prestart_worker_first_driver"] = str(int(prestart))  # noqa: SIM112 spelled as Ray reads it
            # What an interrupted ray.init leaves behind cannot be shut down: the command ended in a segmentation fault.
            with _unattended(), _apart(), uninterrupted():
                ray.init(address="local", num_cpus=cpus, include_dashboard=False, **quiet)
    except (OSError, RuntimeError, ValueError) as failure:
        leaving.close()
        if not address:
            raise
        raise UserError(
            f"no Ray cluster answers at {named} {address}: {first_line(failure).rstrip('.')}. Start one with "
            f"'ray start --head' (where it asks for a token, 'export RAY_AUTH_MODE=token'), or leave {named} out "
            "to use this machine."
        ) from failure
    heed_termination()
    try:
        yield
    finally:
        ray.shutdown()
        leaving.close()


@contextmanager
def _impatient(address: str) -> Iterator[None]:
    """While the block runs, Ray tries once to join the cluster at ``address``, and by itself for a quarter of an hour.

    Raises ``OSError`` or ``ValueError`` where nothing listens at ``address``, which one try of Ray's takes 40 seconds
    to find.
    """
    from ray._private import ray_constants, services

    place = services.canonicalize_bootstrap_address(address)
    if place:
        host, _, port = place.rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_SECONDS).close()
    with replaced(ray_constants, {"NUM_REDIS_GET_RETRIES": 1}):
        yield


@contextmanager
def _loopback() -> Iterator[None]:
    """While the block runs, the Ray that is started listens on 127.0.0.1 alone.

    By itself it listens on all of the machine's addresses, and this is its only way not to: it is meant for systems
    on which it forms no clusters, and read by its processes and, where Ray is imported already, by us.
    """
    from ray._private import ray_constants

    name = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR
    os.environ[name] = "0"
    try:
        with replaced(ray_constants, {"ENABLE_RAY_CLUSTER": False}):
            yield
    finally:
        del os.environ[name]


@contextmanager
def _unattended() -> Iterator[None]:
    """While the block runs, the Ray that is started has no processes that nobody asks for anything.

    They serve a dashboard that is left out, let clusters grow, and copy logs to a driver that wants none. Ray waits
    for the first of them as it starts, and for all as it ends: 1.7 of 4.5 seconds. What remains for a dashboard, an
    agent on the machine, starts as where Ray is installed without one.
    """
    from ray._private import utils
    from ray._private.node import Node

    nothing = {name: lambda node, **_: None for name in ("start_api_server", "start_monitor", "start_log_monitor")}
    absent = ImportError("no dashboard is wanted")
    with replaced(Node, nothing), replaced(utils, {"get_dashboard_dependency_error": lambda: absent}):
        yield


@contextmanager
def _apart() -> Iterator[None]:
    """While the block runs, the Ray that is started leaves our process group, for whose signals it is not meant.

    A SIGTERM to the group (of ``timeout``, or of a scheduler) ended Ray's own store at once, and a command that was
    saving its state waited a minute for it and failed. Ray's processes end with ours, also when ours is killed.
    """
    from ray._private import services

    started = functools.partial(services.ConsolePopen, start_new_session=True)
    with replaced(services, {"ConsolePopen": started}):
        yield


@contextmanager
def replaced(place: object, attributes: Mapping[str, Any]) -> Iterator[None]:
    """While the block runs, these ``attributes`` of a module or class of Ray's are ours, where it has no setting."""
    kept = {name: getattr(place, name) for name in attributes}
    for name, ours in attributes.items():
        setattr(place, name, ours)
    try:
        yield
    finally:
        for name, theirs in kept.items():
            setattr(place, name, theirs)


@contextmanager
def ray_files(folder: Path) -> Iterator[Path]:
    """A place in ``folder`` for what Ray Train or Tune write themselves, removed when the block ends.

    Those of drivers that were killed are removed too: what a run or search goes on from is ours.
    """
    for leftover in folder.glob("ray-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    place = folder / f"ray-{os.getpid()}"
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)
