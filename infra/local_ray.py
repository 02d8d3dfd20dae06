"""Settings of a local Ray that have no documented interface. No other file may use private names of Ray.

In: nothing. Out: context managers to start Ray in. Each replaces one private attribute of Ray while Ray starts. A Ray
that no longer has the attribute shows its default behaviour, but one that other machines could reach is refused.
"""

import functools
import importlib
import ipaddress
import logging
import os
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


def _keep_token_private() -> None:
    """Close the folder of Ray's token to other users of this machine, who could otherwise run code as this one.

    They reach 127.0.0.1, where only the token stops them. Ray makes it on its first start, in a file that all can read.
    """
    with suppress(OSError, RuntimeError):  # there is no home, or one that cannot be written
        folder = Path.home() / ".ray"
        folder.mkdir(mode=0o700, exist_ok=True)
        folder.chmod(0o700)


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
def environment_variables(variables: Mapping[str, str]) -> Iterator[None]:
    """Set these environment variables during the block."""
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
    """Replace an attribute of a module by ``change`` of it during the block; yields whether the attribute exists."""
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
