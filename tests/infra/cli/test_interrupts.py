"""Ctrl-C, SIGTERM and SIGHUP: the first one stops the work where that is safe, and no later than its deadline."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from infra.cli.interrupts import SIGNALS, Interrupts
from infra.ray.cluster import PROJECT_DIR

PROGRAM = """
import importlib, os, signal, sys, threading, time, weakref
from contextlib import suppress
from dataclasses import dataclass
from infra.cli import command
from infra.cli.interrupts import interrupts

@dataclass(frozen=True)
class Options:
    '''Options of the test.'''

def main(options):
"""


def run(work: str, stderr: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    """Run a command whose function has the lines ``work``."""
    program = PROGRAM + textwrap.indent(textwrap.dedent(work), "    ") + "\ncommand.run(main, Options, module='test')\n"
    return subprocess.run([sys.executable, "-c", program], stderr=stderr, text=True, timeout=60, cwd=PROJECT_DIR)


def handlers() -> list[object]:
    return list(map(signal.getsignal, SIGNALS))


def test_an_interrupt_in_a_finalizer_is_not_lost() -> None:
    done = run("""
        options_of_before = Options()
        reference = weakref.ref(options_of_before, lambda _: signal.raise_signal(signal.SIGINT))
        del options_of_before
        time.sleep(10)
    """)
    assert done.returncode == 130
    assert done.stderr.splitlines() == ["Interrupted. Finished work is saved; run the same command again to continue."]


def test_an_interrupted_import_does_not_block_those_of_other_threads() -> None:
    done = run("""
        interrupts.import_timeout_seconds = 0  # so that they are interrupted

        def import_for_ever(*names, imported):
            while True:
                for name in names:
                    sys.modules.pop(name, None)
                    importlib.import_module(name)
                imported.append(time.monotonic())

        others = []
        there = {"imported": others}
        threading.Thread(target=import_for_ever, args=("nturl2path", "csv"), kwargs=there, daemon=True).start()
        for _ in range(25):
            with suppress(KeyboardInterrupt):
                threading.Timer(0.01, signal.pthread_kill, (threading.get_ident(), signal.SIGINT)).start()
                import_for_ever("colorsys", "sched", imported=[])
            interrupted = time.monotonic()
            while not others or others[-1] < interrupted:
                assert time.monotonic() < interrupted + 10
                time.sleep(0.001)
    """)
    assert done.returncode == 0


@pytest.mark.parametrize("seconds", [0.5, 60])
def test_an_import_is_not_interrupted_halfway_unless_it_takes_long(tmp_path: Path, seconds: float) -> None:
    """What ends after an interrupt, such as torch's settings that are restored, may import the same package."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "part.py").write_text("")
    (package / "__init__.py").write_text(f"import package.part, time\ntime.sleep({seconds})\npackage.part\n")
    done = run(f"""
        sys.path.append({str(tmp_path)!r})
        interrupts.import_timeout_seconds = 3
        threading.Timer(0.1, signal.pthread_kill, (threading.get_ident(), signal.SIGINT)).start()
        try:
            import package
            time.sleep(10)
        finally:
            if {seconds} < 1:
                import package
    """)
    assert done.returncode == 130
    assert done.stderr.splitlines() == ["Interrupted. Finished work is saved; run the same command again to continue."]


def test_a_command_that_is_stuck_still_ends() -> None:
    before = time.monotonic()
    done = run("""
        interrupts.exit_timeout_seconds = 0.5
        signal.signal(signal.SIGINT, lambda *_: None)  # as a call that does not return has it
        signal.raise_signal(signal.SIGINT)
        time.sleep(60)
    """)
    assert done.returncode == 130
    assert time.monotonic() - before < 30
    assert "not stopped within" in done.stderr


def test_the_first_signal_requests_a_stop_and_the_second_exits_also_after_the_work() -> None:
    reader, writer = os.pipe()
    os.close(reader)  # as of `2>&1 | tee log`, which ends by the same Ctrl-C
    for block in ("with", "with interrupts.stop_requests('Stopping'):\n    pass\nwith"):
        for stderr in (subprocess.PIPE, writer):
            done = run(
                f"""
{block} interrupts.stop_requests("Stopping"):
    assert not interrupts.stop_requested
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.1)
    assert interrupts.stop_requested
assert not interrupts.stop_requested
os.kill(os.getpid(), signal.SIGINT)
time.sleep(10)
""",
                stderr,
            )
            assert done.returncode == 130
            assert "Traceback" not in (done.stderr or "")
    os.close(writer)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_program_continues_after_its_work_was_stopped(number: int) -> None:
    """A second signal does not end its process, and the next one is its own."""
    owner, before = Interrupts(), handlers()
    with owner.handled():
        with owner.stop_requests("Stopping"):
            signal.raise_signal(number)
            assert owner.stop_requested
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(number)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert handlers() == before


def test_work_that_does_not_stop_in_time_is_interrupted(capfd: pytest.CaptureFixture[str]) -> None:
    owner = Interrupts()
    owner.stop_timeout_seconds = 1.0
    started = time.monotonic()
    with owner.stop_requests("Stopping"):
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            time.sleep(30)
    assert 1.0 <= time.monotonic() - started < 10
    assert "within 1 s" in capfd.readouterr().err


def test_a_first_interrupt_waits_for_what_must_be_whole_and_a_second_does_not() -> None:
    done: list[int] = []
    owner, before = Interrupts(), handlers()

    @owner.delayed()
    def work(count: int) -> None:
        with owner.delayed():
            for _ in range(count):
                signal.raise_signal(signal.SIGINT)
        done.append(count)

    for count in (0, 1, 2):
        with pytest.raises(KeyboardInterrupt) if count else nullcontext():
            work(count)
        assert handlers() == before
    assert done == [0, 1]


def test_a_request_to_stop_waits_for_what_must_be_whole() -> None:
    owner = Interrupts()
    with owner.stop_requests("Stopping"):
        with owner.delayed():
            signal.raise_signal(signal.SIGTERM)
            assert not owner.stop_requested
        assert owner.stop_requested


def test_other_threads_leave_signals_alone() -> None:
    owner, before, seen = Interrupts(), handlers(), list[object]()

    def work() -> None:
        with owner.in_command(), owner.handled(), owner.delayed(), owner.stop_requests("Stopping"):
            seen.append(handlers())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]
