"""Settings of a local Ray that have no documented interface. No other file may use private names of Ray.

The context managers replace private attributes of Ray while Ray starts. A version of Ray without such an attribute has
its default behavior, but a Ray that other machines could reach is rejected.
"""

import functools
import importlib
import ipaddress
import logging
import os
import pkgutil
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from infra.errors import UserError

logger = logging.getLogger(__name__)


@contextmanager
def on_loopback() -> Iterator[None]:
    """Start Ray in this block on 127.0.0.1 only, with a token that only this user can read.

    By default Ray listens on all addresses of the machine. It has one setting against this, meant for macOS and
    Windows, where Ray does not form clusters. It is an environment variable, which Ray's processes read when they
    start, and which this process reads when it imports Ray.

    Raises ``UserError`` before Ray starts if this version of Ray ignores the setting. :func:`check_not_exposed` checks
    a Ray that has started.
    """
    with (
        environment_variables({"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}),
        _replaced("ray._private.ray_constants", "ENABLE_RAY_CLUSTER", lambda _: False),
    ):
        check_not_exposed()
        _make_token_private()
        yield


_LONGEST_SOCKET_NAME = "/ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
"""Longest name of a Unix socket below Ray's temporary folder."""


_MAX_FOLDER_BYTES = 107 - len(_LONGEST_SOCKET_NAME)
"""Maximum length of the path of Ray's temporary folder; the path of a Unix socket has at most 107 bytes."""


def choose_temporary_folder() -> str:
    """Choose the folder for the sockets and logs of a local Ray: RAY_TMPDIR, TMPDIR, or else a writable folder.

    Ray uses the folder ``ray`` in it, which may belong to another user of this machine. Raises ``UserError`` if Ray
    cannot work in RAY_TMPDIR.
    """
    from infra.storage.files import scratch  # The import of this package is slow, because it imports obstore.

    if ray_tmpdir := os.environ.get("RAY_TMPDIR"):
        folder = Path(ray_tmpdir).absolute()
        if len(os.fsencode(folder)) > _MAX_FOLDER_BYTES:
            raise UserError(
                f"RAY_TMPDIR {ray_tmpdir} is too long for the names of Ray's sockets. Set it to a folder whose path "
                f"has at most {_MAX_FOLDER_BYTES} bytes, or unset it."
            )
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
        if not _is_writable_for_ray(folder):
            raise UserError(f"Ray cannot write to RAY_TMPDIR {ray_tmpdir}. Set it to your own folder, or unset it.")
        return str(folder)
    tmpdir = Path(tempfile.gettempdir())
    if len(os.fsencode(tmpdir)) <= _MAX_FOLDER_BYTES and _is_writable_for_ray(tmpdir):
        return str(tmpdir)
    return str(scratch(within="/tmp"))  # noqa: S108 a short path, which is checked to be private to this user


def _is_writable_for_ray(folder: Path) -> bool:
    """Return whether this user can write to the folder ``ray`` in ``folder``, or create it."""
    ray = folder / "ray"
    return os.access(ray if ray.exists() else folder, os.W_OK | os.X_OK)


def _make_token_private() -> None:
    """Deny other users of this machine access to the folder of Ray's token.

    They can connect to 127.0.0.1, and with the token they could run code as this user. Ray creates the token on its
    first start, in a file that all users can read. If this user has no writable home, a token is set that is not stored
    in a file.
    """
    try:
        folder = Path.home() / ".ray"
        with suppress(OSError):
            folder.mkdir(mode=0o700, exist_ok=True)
            folder.chmod(0o700)
        has_token = os.access(folder / "auth_token", os.R_OK) or os.access(folder, os.W_OK | os.X_OK)
    except RuntimeError:  # This user has no home folder.
        has_token = False
    if not (has_token or os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")):
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def check_not_exposed() -> None:
    """Raise ``UserError`` if other machines can reach the address of the local Ray, before or after its start."""
    import ray
    import ray.util

    address = ray.util.get_node_ip_address()
    if not ipaddress.ip_address(address).is_loopback:
        raise UserError(
            f"Ray {ray.__version__} would listen on {address}, which other machines can reach, instead of 127.0.0.1. "
            "Install a version of Ray that pyproject.toml allows, or start Ray yourself with 'ray start --head' and "
            "use --address."
        )


@contextmanager
def same_interpreter() -> Iterator[None]:
    """Make Ray start workers with this process's interpreter in this block, even if ``uv run`` started the process.

    By default Ray starts each worker with the command line of ``uv run`` in a copy of the current folder. That folder
    has no environment, so uv creates another one or fails, and Ray waits for workers forever. If the user has set Ray's
    environment variable, its value is kept. Ray reads it when it is imported, which may have happened already.
    """
    variable = "RAY_ENABLE_UV_RUN_RUNTIME_ENV"
    with _replaced("ray._private.ray_constants", variable, lambda value: value if variable in os.environ else False):
        yield


@contextmanager
def own_process_group() -> Iterator[None]:
    """Start Ray in this block in separate process groups, so that signals to this command's group do not reach it.

    A SIGTERM to the group, by ``timeout`` or a scheduler, would end Ray's object store at once. A command that saves
    its state would then wait for the store for a minute and fail. Ray's processes end with this process, even if it is
    killed.
    """

    def in_own_session(popen: Any) -> Any:
        return functools.partial(popen, start_new_session=True)

    with _replaced("ray._private.services", "ConsolePopen", in_own_session) as is_replaced:
        if not is_replaced:
            logger.warning(
                "This version of Ray runs in the command's process group. To stop the command, send the signal to its "
                "process and not to the group."
            )
        yield


@contextmanager
def only_needed_processes() -> Iterator[None]:
    """Start Ray in this block without processes that one driver on one machine does not need.

    These are the autoscaler's monitor, the log monitor (the output of workers is not shown), the dashboard's server,
    which starts even with ``include_dashboard=False``, and the dashboard's agent. They take three seconds of a core,
    and ``ray.init`` waits for two of them. ``ray start`` can disable the first two; ``ray.init`` cannot.
    """
    node = "ray._private.node:Node"
    with (
        _replaced(node, "start_monitor", _replace_by_no_op),
        _replaced(node, "start_log_monitor", _replace_by_no_op),
        _replaced(node, "start_api_server", _without_dashboard_server),
        _replaced("ray._private.services", "ConsolePopen", _without_dashboard_agent),
    ):
        yield


def _replace_by_no_op(_: Any) -> Any:
    return lambda *_, **__: None


def _without_dashboard_server(start: Any) -> Any:
    """Replace the start of the dashboard's server by publishing an address without a server.

    Ray Train and Ray Data query the server about actors and tasks. They work without a response, but wait until an
    address is published.
    """

    def publish(node: Any, *arguments: Any, **settings: Any) -> Any:
        try:
            constants = importlib.import_module("ray._private.ray_constants")
            key, namespace = constants.DASHBOARD_ADDRESS, constants.KV_NAMESPACE_DASHBOARD
            put = node.get_gcs_client().internal_kv_put
        except (ImportError, AttributeError):
            return start(node, *arguments, **settings)
        put(key.encode(), b"127.0.0.1:1", True, namespace)
        return None

    return publish


def _without_dashboard_agent(popen: Any) -> Any:
    """Replace the dashboard's agent by a program that only waits for the end of the raylet.

    The raylet ends when its agent ends, and it waits for the agent's ports. The port -1 means that a port is not used,
    as without ``ray[default]``.
    """
    agent_flag = "--dashboard_agent_command="
    wait_program = "import os, time\nwhile os.getppid() == int(os.environ['RAY_RAYLET_PID']): time.sleep(1)"
    replacement = agent_flag + subprocess.list2cmdline([sys.executable, "-ISc", wait_program])

    def start(command: list[str], *arguments: Any, **settings: Any) -> Any:
        if any(argument.startswith(agent_flag) for argument in command):
            with suppress(ImportError, AttributeError, KeyError):
                ray = importlib.import_module("ray._raylet")
                flags = dict(argument.split("=", 1) for argument in command if "=" in argument)
                for port in ("METRICS_AGENT", "METRICS_EXPORT", "DASHBOARD_AGENT_LISTEN"):
                    name = getattr(ray, f"{port}_PORT_NAME")
                    ray.persist_port(flags["--session_dir"], flags["--node_id"], name, -1)
                command = [replacement if argument.startswith(agent_flag) else argument for argument in command]
        return popen(command, *arguments, **settings)

    return start


@contextmanager
def environment_variables(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables of this process during the block, and restore the previous values after it."""
    previous_values = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in previous_values.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _replaced(owner_name: str, name: str, change: Any) -> Iterator[bool]:
    """Replace an attribute of a module or class ("module:class") by the result of ``change`` during the block.

    ``change`` gets the original attribute. Yields whether the attribute exists.
    """
    try:
        owner = pkgutil.resolve_name(owner_name)
        original = getattr(owner, name)
    except (ImportError, AttributeError):
        yield False
        return
    setattr(owner, name, change(original))
    try:
        yield True
    finally:
        setattr(owner, name, original)
