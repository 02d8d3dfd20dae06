"""What a command is doing is shown in one live line on a terminal, and seldom in a pipe."""

import io
import os
import pty
import re
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from infra.cli import progress
from infra.cli.console import _Console
from infra.cli.progress import Status, status

ROOT = Path(__file__).resolve().parents[3]

SCRIPT = """
import time
from infra.cli import progress
from infra.cli.console import console, errors
from infra.cli.progress import status
progress.REFRESH_HZ = 50.0  # a busy machine may not come to one of two per second
with status("starting Ray") as shown:
    time.sleep(0.7)
    console.print("a line")
    errors.print("a warning")
    with status("looking around"):
        time.sleep(0.6)
    shown.update("training", "step 1 of 2 | " + "x" * 100)
    time.sleep(0.6)
console.print("the end")
"""


def test_a_terminal_has_one_line_that_goes_away() -> None:
    parent, child = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "60", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SCRIPT]
    with subprocess.Popen(command, stdin=child, stdout=child, stderr=child, env=environment) as process:
        os.close(child)
        shown = b""
        with suppress(OSError):  # the end of a terminal
            while part := os.read(parent, 4096):
                shown += part
    assert process.returncode == 0
    text = re.sub(r"\x1b\[\d*m", "", shown.decode())
    assert "\x1b[?25l" not in text, "a hidden cursor would stay so where a command exits at once"
    assert "starting Ray (0s)" in text
    assert "\x1b[2Ka line\r\n" in text
    assert "\x1b[2Ka warning\r\n" in text, "which does not end up behind the live line"
    assert "looking around (0s)" in text
    assert re.search(r"training: step 1 of 2 \| x+…", text)
    assert max(len(line) for line in re.split(r"[\r\n]|\x1b\[\??\d*[A-Za-z]", text)) <= 60
    assert "\x1b[1A\x1b[2Kthe end" in text, "in the place of the live line"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which stands still: it tells a pipe's thread, which looks at it 20 times a second, what is due."""
    now = [1000.0]
    monkeypatch.setattr(progress, "FIRST_SECONDS", 0.2)
    monkeypatch.setattr(progress, "_last", [float("-inf")])
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_a_pipe_gets_a_line_after_seconds_and_then_seldom(
    clock: list[float], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = io.StringIO()
    monkeypatch.setattr(progress, "errors", _Console(file=printed))

    def after(seconds: float, lines: int) -> list[str]:
        """What has been printed when ``seconds`` have passed, which should be as many ``lines``, and no more."""
        clock[0] += seconds
        while printed.getvalue().count("\n") < lines:
            time.sleep(0.01)
        time.sleep(0.2)
        return printed.getvalue().splitlines()

    with status("starting Ray") as shown:
        assert after(0.1, 0) == []
        assert after(0.2, 1) == ["... starting Ray (0s)"]
        shown.update("training", "step 1 of 9")
        assert len(after(progress.PIPE_INTERVAL_SECONDS - 1, 1)) == 1
        assert after(2, 2)[1:] == ["... training: step 1 of 9"]
    assert capsys.readouterr().out == "", "which may be a file for the text of a model"


def test_a_pipe_is_not_told_of_what_has_only_begun(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    """However long this machine takes."""
    with status("starting Ray"):
        time.sleep(0.3)
        assert capsys.readouterr().err == ""
        clock[0] += 3600
        while progress._last[0] < clock[0]:
            time.sleep(0.01)
    assert capsys.readouterr().err == "... starting Ray (1h)\n"


def test_the_seconds_are_those_of_what_is_done_now() -> None:
    task = Status("training")
    task._since -= 3600
    task.update("training", "step 1 of 2")
    assert task.seconds >= 3600
    task.update("saving")
    assert task.seconds < 3600
