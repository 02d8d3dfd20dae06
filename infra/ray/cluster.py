"""Start or join Ray quietly, on loopback, with the settings that all commands need.

A plain ``ray.init()`` would join any cluster that runs on the machine, print many lines, and send usage statistics.
Workers that start in another folder could not import the modules of this project.
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
    check_not_exposed,
    choose_temporary_folder,
    environment_variables,
    on_loopback,
    only_needed_processes,
    own_process_group,
    same_interpreter,
)

PROJECT_DIR = Path(__file__).resolve().parents[2]
"""Folder that contains the packages of this project."""

PACKAGES = ("infra", "pipeline", "train", "tune")
"""Packages of this project, which workers on other machines get from the driver."""

_RAY_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    # Ray Train's controller polls its workers at this interval (default: 2 s), so a run ends up to this much later.
    # Shorter intervals slow training on the CPU (by a tenth of its tokens/s at 0.1 s on two cores).
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    # The watcher is a separate process that warns of the preemption of spot machines, but killed runs resume anyway.
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    # A starting raylet connects to its object store; by default it retries only after a second if that is not ready.
    "RAY_raylet_client_connect_timeout_milliseconds": "20",
    "RAY_raylet_client_num_connect_attempts": "500",
    # Ray repeats the tasks of a machine without power only once its connection is known to be dead, by default after
    # 5 + 2 minutes. Its servers close connections with keepalives more frequent than once a minute, unless they were
    # started with a shorter interval themselves.
    "RAY_grpc_client_keepalive_time_ms": "65000",
    "RAY_grpc_client_keepalive_timeout_ms": "20000",
    # When the driver is killed, Ray Tune loses trials that finished since its last snapshot.
    "TUNE_GLOBAL_CHECKPOINT_S": "1",
}
"""Environment variables of Ray, unless the user has set them."""

CONNECT_TIMEOUT_SECONDS = 10.0
"""Time limit for a cluster to accept a connection."""


RAY_THREAD_NAME = "waits for Ray"
"""Name of a thread that calls Ray and cannot be stopped."""


@contextmanager
def ray_session(
    address: str | None = None,
    *,
    cpus: int | None = None,
    prestart: bool = False,
    code: Sequence[str] = (),
) -> Iterator[None]:
    """Join the Ray cluster at ``address`` or ``RAY_ADDRESS``, or start one on this machine, until the block ends.

    Raises ``UserError`` if no cluster responds at the address.

    Args:
        address: address of a cluster, or ``local`` to start Ray on this machine in any case.
        cpus: number of parallel tasks of a local Ray; by default the cores that this process may use.
        prestart: whether a local Ray starts a worker per core in advance, for work that needs all of them at once.
        code: files or folders of modules that workers import in addition to this project's packages.
    """
    source = "--address" if address else "RAY_ADDRESS"
    address = address or os.environ.get("RAY_ADDRESS")
    for name, value in _RAY_SETTINGS.items():
        os.environ.setdefault(name, value)
    import ray

    if ray.is_initialized():  # Blocks may be nested: the rungs of a ladder use the ladder's Ray.
        if address:
            _check_same_cluster(address, source)
        yield
        return
    folders = [str(Path(module).parent) for module in code]
    search_path = os.pathsep.join(filter(None, [str(PROJECT_DIR), *folders, os.environ.get("PYTHONPATH", "")]))
    variables = {"PYTHONPATH": search_path}
    logging_options = {"log_to_driver": False, "logging_level": logging.ERROR}
    is_local = address in (None, "", "local")
    if address and not is_local:
        with status(f"joining the Ray cluster at {address}"), interrupts.handled():
            _join(address, source, runtime_env=_runtime_env(variables, code), **logging_options)
    else:
        os.environ["RAY_TMPDIR"] = choose_temporary_folder()
        os.environ["RAY_prestart_worker_first_driver"] = str(int(prestart))  # noqa: SIM112 the spelling that Ray reads
        # Interrupts are delayed, because shutting down a Ray whose ray.init was interrupted is a segmentation fault.
        with (
            status("starting Ray"),
            # Workers inherit the variables; for a runtime_env Ray would discard the workers started in advance.
            environment_variables(variables),
            on_loopback(),
            own_process_group(),
            only_needed_processes(),
            same_interpreter(),
            interrupts.delayed(),
            _outside_shadowing_folder(),
        ):
            ray.init(address="local", num_cpus=cpus or cpu_count(), include_dashboard=False, **logging_options)
    try:
        if is_local:
            check_not_exposed()
        yield
    finally:
        if any(thread.name == RAY_THREAD_NAME for thread in threading.enumerate()):
            atexit.register(_exit_without_ray)  # Handlers run in reverse order, so this one runs before Ray's own.
        else:
            ray.shutdown()


def _check_same_cluster(address: str, source: str) -> None:
    """Raise ``UserError`` if this process is connected to a Ray other than the one at ``address``."""
    import ray
    import ray.util

    def parse_endpoint(text: str) -> tuple[str, str]:
        host, _, port = text.rpartition(":")
        with suppress(OSError):
            host = socket.gethostbyname(host.strip("[]"))
        is_this_machine = host in ("127.0.0.1", "::1", ray.util.get_node_ip_address())
        return "local" if is_this_machine else host, port

    connected_address = ray.get_runtime_context().gcs_address
    endpoint = parse_endpoint(connected_address)
    is_same = endpoint[0] == "local" if address == "local" else endpoint == parse_endpoint(address)
    if not is_same and address != "auto":
        raise UserError(
            f"{source} {address}: this process is already connected to the Ray cluster at {connected_address}. Remove "
            f"{source} to use that cluster, or call ray.shutdown() first."
        )


def _outside_shadowing_folder() -> AbstractContextManager[None]:
    """Start Ray in the project's folder if the current folder has a module with the name of a package of this project.

    Workers search the folder in which Ray starts first, so a ``train.py`` there would hide the package ``train``.
    """
    folder = Path.cwd()
    hides_package = folder != PROJECT_DIR and any(
        (folder / f"{name}{suffix}").exists() for name in PACKAGES for suffix in (".py", "/__init__.py")
    )
    return chdir(PROJECT_DIR) if hides_package else nullcontext()


def _exit_without_ray() -> None:
    """Exit this process without shutting down Ray, which did not respond in time after an interrupt.

    A thread still waits for the response. Shutting down Ray then was a segmentation fault in one of two tries on a busy
    machine. Ray's processes end with this process.
    """
    console.end()
    errors.end()
    os._exit(EXIT_INTERRUPTED)


def _runtime_env(variables: Mapping[str, str], code: Sequence[str]) -> dict[str, Any]:
    """Return the runtime environment of workers: ``variables``, this project's packages, and the user's ``code``.

    ``ray job submit`` sends its working directory to all machines, but not packages that are installed elsewhere.
    """
    modules = [*(str(PROJECT_DIR / package) for package in PACKAGES), *code]
    return {"env_vars": dict(variables), "py_modules": modules, "excludes": ["pictures", "__pycache__"]}


def _join(address: str, source: str, **settings: Any) -> None:
    """Join the cluster at ``address``, the value of the flag or variable ``source``.

    Raises ``UserError`` if no cluster responds.
    """
    import ray

    try:
        if address != "auto":  # Ray itself finds the address for "auto".
            _check_connection(address)
        # By default Ray makes twenty attempts of 40 s each.
        with environment_variables({"RAY_gcs_server_port_wait_time_s": "1"}), same_interpreter():
            ray.init(address=address, **settings)
    except (OSError, RuntimeError, ValueError) as failure:
        raise UserError(
            f"Cannot connect to Ray at {source} {address}: {first_line(failure).rstrip('.')}. Start a cluster with "
            f"'ray start --head' (and set RAY_AUTH_MODE=token if it requires a token), or remove {source} to use "
            "this machine."
        ) from failure


def _check_connection(address: str) -> None:
    """Raise ``OSError`` or ``ValueError`` if ``address`` refuses connections; Ray would take 40 seconds to notice."""
    import ray.util

    host, colon, port = address.rpartition(":")
    host = host.strip("[]")
    if not (host and colon):
        raise ValueError(f"{address} is not of the form HOST:PORT")
    if host in ("localhost", "127.0.0.1", "::1"):  # Ray replaces these by the machine's own address, too.
        host = ray.util.get_node_ip_address()
    socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_SECONDS).close()


@contextmanager
def temporary_ray_dir(folder: Path) -> Iterator[Path]:
    """Yield a directory in ``folder`` for the files of Ray Train or Tune, and remove it when the block ends.

    Directories of killed drivers are removed, too, because runs and searches resume from this project's own files.
    """
    for leftover in folder.glob("ray-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    directory = folder / f"ray-{os.getpid()}"
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
