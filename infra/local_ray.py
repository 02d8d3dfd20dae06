"""What a Ray that a command starts for itself needs and Ray has no documented setting for; nothing else may use these.

In: nothing. Out: context managers to start Ray in. Each replaces one private attribute of Ray while Ray starts. A Ray
that no longer has the attribute behaves as it does by itself, but one that would listen beyond this machine is refused.
"""

import functools
import importlib
import ipaddress
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from infra.errors import UserError

logger = logging.getLogger(__name__)


@contextmanager
def on_loopback() -> Iterator[None]:
    """While the block runs, the Ray that is started listens on 127.0.0.1 only.

    By default it listens on all addresses of the machine. Its one switch is meant for macOS and Windows, where Ray
    forms no clusters: an environment variable, which Ray's processes read as they start and this process has read
    already if Ray was imported before.

    Raises ``UserError``, before anything listens, when this Ray would not do so. ``refuse_exposed`` checks a Ray that
    has started.
    """
    with (
        environment_variables({"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}),
        _replaced("ray._private.ray_constants", "ENABLE_RAY_CLUSTER", lambda _: False),
    ):
        refuse_exposed()
        yield


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
def own_process_group() -> Iterator[None]:
    """While the block runs, the Ray that is started gets process groups of its own, without our signals.

    A SIGTERM to our group (by ``timeout``, or a scheduler) would end Ray's object store at once, and a command that is
    saving its state would wait a minute for it and fail. Ray's processes end with ours, also when ours is killed.
    """

    def in_own_session(popen: Any) -> Any:
        return functools.partial(popen, start_new_session=True)

    with _replaced("ray._private.services", "ConsolePopen", in_own_session) as replaced:
        if not replaced:
            logger.warning("This version of Ray stays in our process group: stop the command itself, not its group.")
        yield


@contextmanager
def environment_variables(variables: Mapping[str, str]) -> Iterator[None]:
    """While the block runs, these environment variables are set."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _replaced(module: str, name: str, change: Any) -> Iterator[bool]:
    """While the block runs, an attribute of a module is what ``change`` makes of it; gives whether there is such."""
    try:
        place = importlib.import_module(module)
        original = getattr(place, name)
    except (ImportError, AttributeError):
        yield False
        return
    setattr(place, name, change(original))
    try:
        yield True
    finally:
        setattr(place, name, original)
