"""Start or join Ray: quietly, on loopback, with the settings that every command relies on.

A plain ``ray.init()`` would join whatever cluster happens to run on the machine, print a page, send usage
statistics, and leave ``-m`` modules unimportable in workers that are started from another folder.
"""

import atexit
import logging
import os
import shutil
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, chdir, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from infra.cli.console import console, errors
from infra.cli.interrupts import EXIT_INTERRUPTED, interrupts
from infra.cli.progress import status
from infra.device.host import cpu_count
from infra.errors import UserError, first_line
from infra.ray.local_ray import (
    environment_variables,
    on_loopback,
    only_needed_processes,
    own_process_group,
    refuse_exposed,
    same_interpreter,
    temporary_folder,
)

PROJECT = Path(__file__).resolve().parents[2]

PACKAGES = ("infra", "pipeline", "train", "tune")

_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    # Ray Train's controller polls its workers at this interval, 2 s by default, and notices the end of a run that late.
    # Each poll takes time from a training on the CPU (a tenth of its tokens/s at 0.1 s on two cores).
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    # A process of its own that warns of spot machines about to be preempted; a killed run continues anyway.
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    # A raylet connects to its own store as it starts and, where that is not up yet, tries again after a second.
    "RAY_raylet_client_connect_timeout_milliseconds": "20",
    "RAY_raylet_client_num_connect_attempts": "500",
    # A call to a machine that has lost its power is given up when the connection is found dead: by default after 5 + 2
    # minutes, in which a task that ran there was not repeated. Ray's servers break connections that ask more often than
    # once a minute, unless they were started with a shorter time themselves.
    "RAY_grpc_client_keepalive_time_ms": "65000",
    "RAY_grpc_client_keepalive_timeout_ms": "20000",
    # Ray Tune forgets trials that finished since its last snapshot when the driver is killed.
    "TUNE_GLOBAL_CHECKPOINT_S": "1",
}

CONNECT_TIMEOUT_SECONDS = 10.0
"""How long a cluster may take to accept a connection."""


RAY_THREAD_NAME = "waits for Ray"
"""Name of a thread that calls Ray and cannot be told to stop."""


@contextmanager
def ray_session(
    address: str | None = None,
    *,
    cpus: int | None = None,
    prestart: bool = False,
    code: Sequence[str] = (),
) -> Iterator[None]:
    """Join the Ray cluster at ``address`` or ``RAY_ADDRESS``, or start one on this machine, for the block's duration.

    ``cpus`` is the number of parallel tasks that a local Ray may run (default: the cores that this process may use),
    and ``prestart`` starts a worker for each in advance, for work that needs them all at once. ``code`` are files or
    folders of modules that workers import besides ours. Raises ``UserError`` when nothing answers at ``address``.
    """
    source = "--address" if address else "RAY_ADDRESS"
    address = address or os.environ.get("RAY_ADDRESS")
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    import ray

    if ray.is_initialized():  # inside another block: the Ray of a ladder is also the Ray of its rungs
        if address:
            _check_joined(address, source)
        yield
        return
    folders = [str(Path(module).parent) for module in code]
    search_path = os.pathsep.join(filter(None, [str(PROJECT), *folders, os.environ.get("PYTHONPATH", "")]))
    variables = {"PYTHONPATH": search_path}
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    local = address in (None, "", "local")
    if address and not local:
        with status(f"joining the Ray cluster at {address}"), interrupts.handled():
            _join(address, source, runtime_env=_runtime_env(variables, code), **quiet)
    else:
        os.environ["RAY_TMPDIR"] = temporary_folder()
        os.environ["RAY_prestart_worker_first_driver"] = str(int(prestart))  # noqa: SIM112 spelled as Ray reads it
        # A Ray whose ray.init was interrupted cannot be shut down: the command ended in a segmentation fault.
        with (
            status("starting Ray"),
            # Inherited rather than a runtime_env, for which Ray would discard the workers that it starts in advance.
            environment_variables(variables),
            on_loopback(),
            own_process_group(),
            only_needed_processes(),
            same_interpreter(),
            interrupts.delayed(),
            _unshadowed(),
        ):
            ray.init(address="local", num_cpus=cpus or cpu_count(), include_dashboard=False, **quiet)
    try:
        if local:
            refuse_exposed()
        yield
    finally:
        if any(thread.name == RAY_THREAD_NAME for thread in threading.enumerate()):
            atexit.register(_leave)  # before Ray's own handler, which was registered first
        else:
            ray.shutdown()


def _check_joined(address: str, source: str) -> None:
    """Raise ``UserError`` when this process is connected to another Ray than that at ``address``."""
    import ray
    import ray.util

    def machine_and_port(of: str) -> tuple[str, str]:
        host, _, port = of.rpartition(":")
        with suppress(OSError):
            host = socket.gethostbyname(host.strip("[]"))
        is_here = host in ("127.0.0.1", "::1", ray.util.get_node_ip_address())
        return "here" if is_here else host, port

    joined = ray.get_runtime_context().gcs_address
    endpoint = machine_and_port(joined)
    same = endpoint[0] == "here" if address == "local" else endpoint == machine_and_port(address)
    if not same and address != "auto":
        raise UserError(
            f"{source} {address}: this process is connected to the Ray at {joined} already. Leave {source} out to use "
            "that one, or call ray.shutdown() first."
        )


def _unshadowed() -> AbstractContextManager[None]:
    """Start Ray elsewhere when the current folder has a module or package with the name of one of ours.

    Ray puts the folder in which it starts first on its workers' search path, where a ``train.py`` would hide ours.
    """
    here = Path.cwd()
    hides = here != PROJECT and any(
        (here / f"{name}{end}").exists() for name in PACKAGES for end in (".py", "/__init__.py")
    )
    return chdir(PROJECT) if hides else nullcontext()


def _leave() -> None:
    """End this process as it is, after an interrupt that Ray did not answer in time.

    A thread waits for that answer still, and where Ray is shut down under it, the command ends in a segmentation fault
    (once in two tries on a busy machine). Ray's processes end with ours.
    """
    console.end()
    errors.end()
    os._exit(EXIT_INTERRUPTED)


def _runtime_env(variables: Mapping[str, str], code: Sequence[str]) -> dict[str, Any]:
    """The runtime environment of workers on other machines: ``variables``, and code that only this machine has: ours
    and the user's.

    ``ray job submit`` has sent its working directory to all machines, but code that is installed would be missing.
    """
    modules = [*(str(PROJECT / package) for package in PACKAGES), *code]
    return {"env_vars": dict(variables), "py_modules": modules, "excludes": ["pictures", "__pycache__"]}


def _join(address: str, source: str, **settings: Any) -> None:
    """Join the cluster at ``address``, which the flag or variable ``source`` gave. Raises ``UserError`` without one."""
    import ray

    try:
        if address != "auto":  # which Ray looks up
            _connect(address)
        # Each of Ray's attempts takes 40 seconds, and by default it makes twenty.
        with environment_variables({"RAY_gcs_server_port_wait_time_s": "1"}), same_interpreter():
            ray.init(address=address, **settings)
    except (OSError, RuntimeError, ValueError) as failure:
        raise UserError(
            f"{source} {address}: no Ray cluster responds: {first_line(failure).rstrip('.')}. Start one with "
            f"'ray start --head' (and set RAY_AUTH_MODE=token if it requires a token), or remove {source} to "
            "use this machine."
        ) from failure


def _connect(address: str) -> None:
    """Raise ``OSError`` or ``ValueError`` when nothing listens at ``address``; Ray would take 40 seconds to notice."""
    import ray.util

    host, colon, port = address.rpartition(":")
    host = host.strip("[]")
    if not (host and colon):
        raise ValueError(f"{address} is not of the form HOST:PORT")
    if host in ("localhost", "127.0.0.1", "::1"):  # Ray takes these for this address
        host = ray.util.get_node_ip_address()
    socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_SECONDS).close()


@contextmanager
def temporary_ray_dir(folder: Path) -> Iterator[Path]:
    """A place in ``folder`` for the files that Ray Train or Tune write, removed when the block ends.

    Those of drivers that were killed are removed too: a run or search is continued from our own files.
    """
    for leftover in folder.glob("ray-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    directory = folder / f"ray-{os.getpid()}"
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
