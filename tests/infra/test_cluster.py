"""Joining a Ray cluster that is not there."""

import socket

import pytest

from infra.cluster import connected
from infra.command import UserError


@pytest.mark.parametrize("address", ["127.0.0.1", "[::1]", "nowhere.invalid"])
def test_an_address_at_which_nothing_listens_is_refused_at_once(address: str) -> None:
    """Ray by itself tries for a quarter of an hour."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and not listened at
        place = f"{address}:{taken.getsockname()[1]}"
        with pytest.raises(UserError, match=r"no Ray cluster answers at --address .*[^.]\. Start one with 'ray start"):
            connected(place).__enter__()


@pytest.mark.parametrize("address", ["elsewhere", "127.0.0.1:port", "ray://127.0.0.1:9"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(UserError, match=f"no Ray cluster answers at --address {address}: "):
        connected(address).__enter__()
