"""Settings of a local Ray that have no documented interface. No other file may use private names of Ray.

Each context manager here replaces one private attribute of Ray while Ray starts. A Ray that no longer has the attribute
shows its default behaviour, but one that other machines could reach is refused.
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
    """Have a Ray that is started in this block listen on 127.0.0.1 only, and its token read by this user only.

    By default it listens on all addresses of the machine. The only switch is meant for macOS and Windows, where Ray
    does not form clusters: an environment variable, which Ray's processes read when they start and this process has
    already read if Ray was imported before.

    Raises ``UserError``, before anything listens, when this Ray would not obey. ``refuse_exposed`` checks a Ray that
    has started.
    """
    with (
        environment_variables({"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}),
        _replaced("ray._private.ray_constants", "ENABLE_RAY_CLUSTER", lambda _: False),
    ):
        refuse_exposed()
        _keep_token_private()
        yield


_SOCKET = "/ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
"""The longest name of a Unix socket below Ray's temporary folder."""


_MAX_FOLDER_BYTES = 107 - len(_SOCKET)
"""Of Ray's temporary folder: the name of a Unix socket has at most 107 bytes."""


def temporary_folder() -> str:
    """Where a Ray of our own keeps its sockets and logs: ``RAY_TMPDIR``, ``TMPDIR``, or else a folder where it can.

    The folder ``ray`` in it may belong to another user of this machine. Raises ``UserError`` when Ray cannot work in
    ``RAY_TMPDIR``, which somebody has chosen for it.
    """
    from infra.storage.files import scratch  # its package imports obstore

    if named := os.environ.get("RAY_TMPDIR"):
        folder = Path(named).absolute()
        if len(os.fsencode(folder)) > _MAX_FOLDER_BYTES:
            raise UserError(
                f"RAY_TMPDIR {named} is too long for the names of Ray's sockets. Set it to a folder whose path has at "
                f"most {_MAX_FOLDER_BYTES} bytes, or unset it."
            )
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
        if not _has_room_for_ray(folder):
            raise UserError(
                f"RAY_TMPDIR {named} cannot be written by Ray. Set it to a folder of your own, or unset it."
            )
        return str(folder)
    usual = Path(tempfile.gettempdir())
    if len(os.fsencode(usual)) <= _MAX_FOLDER_BYTES and _has_room_for_ray(usual):
        return str(usual)
    return str(scratch(within="/tmp"))  # noqa: S108 as short as can be, and checked to be this user's alone


def _has_room_for_ray(folder: Path) -> bool:
    """Whether this user can write to the folder ``ray`` in ``folder``, or make it."""
    ray = folder / "ray"
    return os.access(ray if ray.exists() else folder, os.W_OK | os.X_OK)


def _keep_token_private() -> None:
    """Close the folder of Ray's token to other users of this machine, who could otherwise run code as this one.

    They reach 127.0.0.1, where only the token stops them. Ray makes it on its first start, in a file that all can read.
    Where there is no home, or one that cannot be written, Ray gets one that no file has.
    """
    try:
        folder = Path.home() / ".ray"
        with suppress(OSError):
            folder.mkdir(mode=0o700, exist_ok=True)
            folder.chmod(0o700)
        has_token = os.access(folder / "auth_token", os.R_OK) or os.access(folder, os.W_OK | os.X_OK)
    except RuntimeError:  # this user has no home
        has_token = False
    if not (has_token or os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")):
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def refuse_exposed() -> None:
    """Raise ``UserError`` when the local Ray, started or about to be, has an address that other machines can reach."""
    import ray
    import ray.util

    address = ray.util.get_node_ip_address()
    if not ipaddress.ip_address(address).is_loopback:
        raise UserError(
            f"Ray {ray.__version__} would listen on {address} instead of 127.0.0.1, where other machines reach it: "
            "install a version of Ray that pyproject.toml names, or start Ray yourself with 'ray start --head' and "
            "give its address with --address."
        )


@contextmanager
def same_interpreter() -> Iterator[None]:
    """Have Ray start workers with this process's interpreter in this block, also where ``uv run`` started the process.

    By default Ray would start each worker with the command line of ``uv run``, in a copy of the current folder: uv
    finds no environment there, makes another one or fails, and Ray waits for workers for ever. A user who has set
    Ray's variable has decided otherwise. Ray reads it when it is imported, which may have happened already.
    """
    variable = "RAY_ENABLE_UV_RUN_RUNTIME_ENV"
    with _replaced("ray._private.ray_constants", variable, lambda value: value if variable in os.environ else False):
        yield


@contextmanager
def own_process_group() -> Iterator[None]:
    """Start Ray in process groups of its own in this block, so that signals to ours do not reach it.

    A SIGTERM to our group (by ``timeout``, or a scheduler) would end Ray's object store at once, and a command that is
    saving its state would wait a minute for it and fail. Ray's processes end with ours, even when ours is killed.
    """

    def in_own_session(popen: Any) -> Any:
        return functools.partial(popen, start_new_session=True)

    with _replaced("ray._private.services", "ConsolePopen", in_own_session) as replaced:
        if not replaced:
            logger.warning("This version of Ray stays in our process group: stop the command itself, not its group.")
        yield


@contextmanager
def only_needed_processes() -> Iterator[None]:
    """Start Ray in this block without the processes that serve nobody where one driver has one machine.

    These are the autoscaler's monitor, the log monitor (nobody is shown what workers print), the dashboard's server,
    which starts with ``include_dashboard=False`` too, and the dashboard's agent. They take three seconds of a core, and
    ``ray.init`` waits for two of them. ``ray start`` has options against the first two, ``ray.init`` has none.
    """
    node = "ray._private.node:Node"
    with (
        _replaced(node, "start_monitor", _nothing),
        _replaced(node, "start_log_monitor", _nothing),
        _replaced(node, "start_api_server", _no_server),
        _replaced("ray._private.services", "ConsolePopen", _no_agent),
    ):
        yield


def _nothing(_: Any) -> Any:
    return lambda *_, **__: None


def _no_server(start: Any) -> Any:
    """Instead of starting the dashboard's server, publish an address at which nothing listens.

    Ray Train and Ray Data ask the server about actors and tasks. They do without an answer, but wait for an address.
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


def _no_agent(popen: Any) -> Any:
    """Start the raylet with a program that only waits for its end, in place of the dashboard's agent.

    The raylet ends when its agent does, and waits for the agent's ports: -1 says, as without ``ray[default]``, that
    they are not in use.
    """
    agent = "--dashboard_agent_command="
    wait = "import os, time\nwhile os.getppid() == int(os.environ['RAY_RAYLET_PID']): time.sleep(1)"
    waiting = agent + subprocess.list2cmdline([sys.executable, "-ISc", wait])

    def start(command: list[str], *arguments: Any, **settings: Any) -> Any:
        if any(word.startswith(agent) for word in command):
            with suppress(ImportError, AttributeError, KeyError):
                ray = importlib.import_module("ray._raylet")
                flags = dict(word.split("=", 1) for word in command if "=" in word)
                for port in ("METRICS_AGENT", "METRICS_EXPORT", "DASHBOARD_AGENT_LISTEN"):
                    name = getattr(ray, f"{port}_PORT_NAME")
                    ray.persist_port(flags["--session_dir"], flags["--node_id"], name, -1)
                command = [waiting if word.startswith(agent) else word for word in command]
        return popen(command, *arguments, **settings)

    return start


@contextmanager
def environment_variables(variables: Mapping[str, str]) -> Iterator[None]:
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
    """Replace an attribute of a module, or of a class ("module:class"), by ``change`` of it during the block.

    Yields whether the attribute exists.
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
