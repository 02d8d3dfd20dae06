"""Joining a Ray cluster that is not there, and leaving one that is only starting."""

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ray._common.utils import get_default_ray_temp_dir

from infra.cluster import PROJECT, connected
from infra.command import UserError


@pytest.mark.parametrize("address", ["127.0.0.1", "[::1]", "nowhere.invalid"])
def test_an_address_at_which_nothing_listens_is_refused_at_once(address: str) -> None:
    """Ray by itself tries for a quarter of an hour."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and not listened at
        place = f"{address}:{taken.getsockname()[1]}"
        with pytest.raises(UserError, match=r"no Ray cluster answers at --address .*[^.]\. Start one with 'ray start"):
            connected(place).__enter__()


def test_a_cluster_named_by_the_environment_is_called_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    with pytest.raises(UserError, match=r"at RAY_ADDRESS 127.0.0.1:9: .*, or leave RAY_ADDRESS out to use this"):
        connected().__enter__()


@pytest.mark.parametrize("address", ["elsewhere", "127.0.0.1:port", "ray://127.0.0.1:9"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(UserError, match=f"no Ray cluster answers at --address {address}: "):
        connected(address).__enter__()


def test_an_interrupt_as_ray_starts_is_an_interrupt() -> None:
    """Half a Ray cannot be shut down: the command ended in a segmentation fault."""
    program = """
import sys
from infra.cluster import connected
try:
    with connected():
        print("joined")
except KeyboardInterrupt:
    sys.exit(130)
"""
    starting = subprocess.Popen([sys.executable, "-c", program], cwd=PROJECT, stdout=subprocess.PIPE, text=True)
    log = f"session_*/logs/python-core-driver-*_{starting.pid}.log"  # the first thing that Ray's own part makes
    while starting.poll() is None and not any(Path(get_default_ray_temp_dir()).glob(log)):
        time.sleep(0.005)
    starting.send_signal(signal.SIGINT)
    assert starting.communicate(timeout=60)[0] == ""
    assert starting.returncode == 130
