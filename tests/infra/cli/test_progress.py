"""What a command is doing is shown in one live line on a terminal, and seldom in a pipe."""

import os
import pty
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from infra.cli.progress import FIRST_LINE_SECONDS, PIPE_INTERVAL_SECONDS, PipeLines, Status

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


def test_a_pipe_gets_a_line_after_seconds_and_then_seldom() -> None:
    now = [1000.0]
    lines, task = PipeLines(lambda: now[0]), Status("starting Ray", lambda: now[0])

    def after(seconds: float) -> str:
        now[0] += seconds
        return lines.take_line(task)

    assert [after(FIRST_LINE_SECONDS - 1), after(1), after(1)] == ["", "... starting Ray (2s)", ""]
    task.update("training", "step 1 of 9")
    assert [after(PIPE_INTERVAL_SECONDS - 2), after(1)] == ["", "... training: step 1 of 9"]


def test_a_pipe_is_told_while_the_work_goes_on() -> None:
    """By a line on stderr: the output may be a file for the text of a model."""
    program = "import time; from infra.cli.progress import status\nwith status('starting Ray'): time.sleep(4)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("", "... starting Ray (2s)\n")


def test_the_seconds_are_those_of_what_is_done_now() -> None:
    task = Status("training")
    task._started_at -= 3600
    task.update("training", "step 1 of 2")
    assert task.seconds >= 3600
    task.update("saving")
    assert task.seconds < 3600
