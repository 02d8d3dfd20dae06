"""Work that repeats on a thread while a block runs."""

import threading
import time

import pytest

from infra.background import repeated


def test_work_is_repeated_on_a_thread_of_its_own_until_the_block_ends() -> None:
    names, enough = list[str](), threading.Event()

    def work() -> None:
        names.append(threading.current_thread().name)
        if len(names) == 3:
            enough.set()

    with repeated(work, 0.01, "worker"):
        assert enough.wait(30)
    count = len(names)
    assert set(names) == {"worker"}
    time.sleep(0.1)
    assert len(names) == count
    assert "worker" not in {thread.name for thread in threading.enumerate()}


def test_work_that_returns_true_is_not_repeated() -> None:
    calls, called = list[int](), threading.Event()

    def work() -> bool:
        calls.append(1)
        called.set()
        return True

    with repeated(work, 0.01, "worker"):
        assert called.wait(30)
        time.sleep(0.1)
    assert len(calls) == 1


def test_the_block_ends_after_the_last_call_also_when_it_raises() -> None:
    ended, called = list[bool](), threading.Event()

    def work() -> None:
        called.set()
        time.sleep(0.2)
        ended.append(True)

    def fail_during_a_call() -> None:
        with repeated(work, 0.01, "worker"):
            called.wait(30)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_during_a_call()
    assert ended
