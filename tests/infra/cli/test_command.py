"""Every command ends with the code its outcome has, and a mistake gets one sentence."""

import fcntl
import io
import os
import re
import resource
import subprocess
import sys
import termios
import time
from array import array
from pathlib import Path

import pytest

from infra.cli.console import _Console

HARD_LIMIT = resource.getrlimit(resource.RLIMIT_FSIZE)[1]

SCRIPT = """
import signal, subprocess, sys
from dataclasses import dataclass
from pathlib import Path
from rich.markdown import Markdown
from rich.progress import Progress
from rich.table import Table
from rich.text import Text
from infra.cli import command, console

@dataclass(frozen=True)
class Options:
    '''Options of the test.'''
    do: str = "work"
    file: str = ""

    def __post_init__(self):
        if self.do == "contradict":
            raise command.UserError("--do contradict disagrees with itself.")

def main(options):
    if options.do == "mistake":
        raise command.UserError("books[1].txt is missing: run something else.")
    if options.do == "long":
        Path("x" * 300).stat()
    if options.do == "gone":
        Path("gone").stat()
    if options.do == "bug":
        raise RuntimeError("our bug")
    if options.do == "print":
        console.console.print("one")
        console.errors.print("two")
        return 3
    if options.do == "print on":
        for number in range(2000):
            console.console.print(f"{number} " + "x" * 100)
        console.console.print("the end")
    if options.do == "print before and after":
        console.console.print("lost on a full disk")
        console.errors.print("full")
        sys.stdin.readline()
        console.console.print("there is room again")
    if options.do == "descriptors":
        opened = Path("/dev/zero").open()
        kept = [str(Path(f"/proc/self/fd/{number}").readlink()) for number in range(3)]
        child = subprocess.run(["sh", "-c", "echo child >&2"], check=True)
        print("where tyro prints", file=sys.stderr)
        Path(sys.argv[-1]).write_text(" ".join(kept))
    if options.do == "name":
        name = "books/\\x1b]0;renamed\\x07\\x1b[2J\\x9b2J\\x1f\\x7ftext"
        console.console.print(name + "\\n", markup=False)
        table = Table("book", title=name)
        table.add_row(name)
        with Progress(console=console.console) as bar:
            bar.add_task(name)
            for shown in (Markdown(f"`{name}`"), table, Text(name)):
                console.console.print(shown)
    if options.do == "foreign":
        for shown in ("\\u8001 \\u2026 The shop", Markdown("- The shop: \\u8001"), Table("\\u8001", title="\\u8001")):
            console.console.print(shown)
    if options.do == "interrupt":
        raise KeyboardInterrupt
    if options.do == "interrupt without result":
        raise KeyboardInterrupt("Nothing is saved.")
    if options.do in ("hang up", "left alone"):
        signal.raise_signal(signal.SIGHUP)
    if options.do == "terminate":
        signal.raise_signal(signal.SIGTERM)
    return 0

if "left alone" not in sys.argv:  # as nohup has it, under which the tests may run
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
command.run(main, Options, module="test")
"""


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", SCRIPT, *flags], capture_output=True, text=True, cwd=Path.cwd())


@pytest.mark.parametrize(
    ("what", "code"),
    [
        ("work", 0), ("mistake", 2), ("contradict", 2), ("bug", 1), ("interrupt", 130), ("hang up", 130),
        ("terminate", 130), ("gone", 1),
    ],
)  # fmt: skip
def test_exit_codes(what: str, code: int) -> None:
    assert run("--do", what).returncode == code


def test_an_interrupt_says_what_is_kept() -> None:
    assert "run the same command again" in run("--do", "interrupt").stderr
    without = run("--do", "interrupt without result")
    assert without.returncode == 130
    assert "Nothing is saved." in without.stderr
    assert "run the same command again" not in without.stderr


def test_nohup_is_left_alone() -> None:
    ignored = subprocess.run(["nohup", sys.executable, "-c", SCRIPT, "--do", "left alone"], capture_output=True)
    assert ignored.returncode == 0


@pytest.mark.parametrize(("flags", "code"), [(["--do", "print"], 3), (["--help"], 0)])
def test_a_closed_pipe_does_not_end_the_work(flags: list[str], code: int) -> None:
    """``| tee log`` ends by the same Ctrl-C as we, and before us; ``--help | head`` once it has enough."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer) as left:
        done = subprocess.run([sys.executable, "-c", SCRIPT, *flags], stdout=left, stderr=left, timeout=60)
    assert done.returncode == code


def test_a_log_on_a_full_disk_does_not_end_the_work() -> None:
    with Path("/dev/full").open("wb") as disk:
        done = subprocess.run([sys.executable, "-c", SCRIPT, "--do", "print"], stdout=disk, stderr=disk, timeout=60)
    assert done.returncode == 3


def test_what_is_printed_once_a_full_disk_has_room_is_in_the_log(tmp_path: Path) -> None:
    """The limit on a file's size stands for the disk's: it is raised while the command runs."""
    log = tmp_path / "log"
    with log.open("wb") as stdout:
        process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, "--do", "print before and after"], stdin=subprocess.PIPE, stdout=stdout,
            stderr=subprocess.PIPE, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, HARD_LIMIT)),
        )  # fmt: skip
        assert process.stdin
        assert process.stderr
        assert process.stderr.readline() == b"full\n"
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (HARD_LIMIT, HARD_LIMIT))
        process.communicate(b"\n", timeout=60)
    assert process.returncode == 0
    assert "there is room again" in log.read_text()


def test_a_slow_reader_of_a_stream_that_does_not_wait_gets_everything() -> None:
    """As where another program has made the terminal or pipe that both have non-blocking."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, "--do", "print on"], stdout=writer)
    os.close(writer)
    deadline, held = time.monotonic() + 60, array("i", [0])
    while held[0] < 60_000 and time.monotonic() < deadline:  # of the 65,536 bytes that fit
        time.sleep(0.01)
        fcntl.ioctl(reader, termios.FIONREAD, held)
    time.sleep(0.2)
    with os.fdopen(reader, "rb") as stream:
        lines = stream.read().decode().splitlines()
    assert process.wait(60) == 0
    assert [line.split()[0] for line in lines] == [*map(str, range(2000)), "the"]


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_standard_stream_that_is_closed_is_nobody_elses(closed: str, tmp_path: Path) -> None:
    """Neither a file that is opened next nor, for what is started, none at all."""
    told = tmp_path / "told"
    words = [sys.executable, "-c", SCRIPT, "--do", "descriptors", "--file", str(told)]
    done = subprocess.run(["sh", "-c", f'exec "$@" {closed}', "sh", *words], stdin=subprocess.DEVNULL, timeout=60)
    assert done.returncode == 0
    assert "/dev/zero" not in told.read_text()


@pytest.mark.parametrize("closed", ["2>&-", ">&-"])
@pytest.mark.parametrize(("flags", "code"), [(["--help"], 0), (["--do", "mistake"], 2), (["--dot"], 2)])
def test_a_command_without_its_output_has_its_exit_code(closed: str, flags: list[str], code: int) -> None:
    words = [sys.executable, "-c", SCRIPT, *flags]
    assert subprocess.run(["sh", "-c", f'exec "$@" {closed}', "sh", *words], timeout=60).returncode == code


@pytest.mark.parametrize("encoding", [{"LC_ALL": "C", "PYTHONUTF8": "0"}, {"PYTHONIOENCODING": "latin-1"}])
def test_what_the_locale_cannot_print_does_not_end_the_work(encoding: dict[str, str]) -> None:
    command = [sys.executable, "-c", SCRIPT, "--do", "foreign"]
    done = subprocess.run(command, env=os.environ | encoding, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"The shop" in done.stdout
    assert b"?" in done.stdout


def test_a_name_cannot_control_the_terminal() -> None:
    printed = subprocess.run([sys.executable, "-c", SCRIPT, "--do", "name"], capture_output=True, cwd=Path.cwd()).stdout
    shown = printed.decode()
    assert shown.startswith("books/␛]0;renamed␇␛[2J\ufffd2J␟␡text\n\n")
    assert shown.count("␛]0;renamed") == 6, "as a line, a bar, Markdown, a table's title and cell, and text"
    assert not set(shown) & {chr(code) for code in (*range(32), *range(0x7F, 0xA0)) if chr(code) != "\n"}


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--do", "mistake"], ["books[1].txt", "run something else"]),
        (["--do", "long"], ["x" * 60 + "...", "too long", "shorter"]),
        (["--do", b"caf\xe9".decode("utf-8", "surrogateescape")], ["caf\\udce9", "UTF-8", "Rename it"]),
        (["--do", "http://me:canary@host/books"], ["password", "MLFLOW_TRACKING_PASSWORD"]),
        (["--do=pg://host/db?password=canary"], ["password", "PGPASSWORD"]),
        (["--do", "contradict"], ["--do contradict"]),
        (["--do"], ["--do"]),
        (["--no-such-flag"], ["--no-such-flag"]),
    ],
)
def test_a_mistake_is_one_line_that_names_it_and_code_two(words: list[str], named: list[str]) -> None:
    """A secret on the command line is not repeated."""
    refused = run(*words)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith("error: ")
    assert refused.stderr.count("\n") == 1
    assert all(word in refused.stderr for word in named)
    assert "canary" not in refused.stderr


def test_help_describes_the_command_and_its_flags() -> None:
    shown = run("--help")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert {"Options of the test.", "--do"} <= set(re.findall("Options of the test.|--do", shown.stdout))


def test_no_control_character_reaches_the_terminal() -> None:
    file = io.StringIO()
    controls = [*range(0x20), *range(0x7F, 0xA0)]
    _Console(file=file, width=200, highlight=False).print("".join(map(chr, controls)), markup=False)
    assert not set(file.getvalue()) & set(map(chr, controls)) - {"\t", "\n"}


@pytest.mark.parametrize(("terminal", "widest"), [(False, 7 * 30 - 1), (True, 7 * 5 - 1)])
def test_a_paragraph_is_wrapped_on_a_terminal_and_one_line_in_a_pipe(terminal: bool, widest: int) -> None:
    file = io.StringIO()
    _Console(file=file, force_terminal=terminal, width=40, highlight=False).print_paragraph(" ".join(["[word]"] * 30))
    assert max(len(line.rstrip()) for line in file.getvalue().splitlines()) == widest
