"""The next command that each command prints: a new user copies it, and it works on this machine.

Only its length is changed here: a time budget of minutes to seconds, and a number of steps to one more.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from infra.cli.units import format_duration, parse_duration

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

SECONDS = 2.0
"""Time budget of a run here."""

LEARNING_STEPS = 600
"""Steps in which the small model learns the text below well enough to write, at any micro-batch that a search finds."""

TEXT = """It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness,
it was the epoch of belief, it was the epoch of incredulity, it was the season of Light, it was the season of Darkness,
it was the spring of hope, it was the winter of despair, we had everything before us, we had nothing before us, we were
all going direct to Heaven, we were all going direct the other way."""


def run(command: str, folder: Path) -> str:
    """Execute a command line, and return the next command that it prints."""
    return find_next(execute(command, folder))


def execute(command: str, folder: Path) -> str:
    """Execute a command line in ``folder`` without a GPU, and return what it prints."""
    python, *arguments = shlex.split(command)
    assert python == "python"
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def find_next(printed: str) -> str:
    """Return the next command, which follows the time to expect."""
    next_line = re.search(r"^Next  +(.*)$", printed, re.MULTILINE)
    assert next_line, printed
    explanation, _, next_command = next_line[1].partition("python ")
    assert re.search(r"about \d+ (s|min): $", explanation)
    return f"python {next_command}"


def shorten(command: str, added: float = SECONDS) -> str:
    """Return ``command`` with a shorter training: a resumed run trains for ``added`` seconds, or for one step."""
    match = re.search(r"--time-budget (\S+)", command)
    seconds = parse_duration(match[1]) % 120 if match else 0.0
    short = re.sub(r"--time-budget \S+", f"--time-budget {format_duration(seconds + added)}", command)
    return re.sub(r"--steps \d+", "--steps 9", short)


def test_a_new_user_follows_the_next_commands_from_the_doctor_to_a_model(tmp_path: Path) -> None:
    tokenize = run("python -m infra.doctor --quick", tmp_path)
    assert "pipeline.tokenize" in tokenize
    first_run = run(tokenize, tmp_path)
    assert "--time-budget 2m" in first_run
    inspect = run("python -m infra.doctor --quick", tmp_path)
    for other in (inspect, "python -m train.plan --model tiny"):
        assert run(other, tmp_path) == first_run
    longer = run(f"{shorten(first_run)} --name first", tmp_path)
    assert longer.startswith("python -m train.run --resume first --time-budget")
    before = json.loads((tmp_path / "runs/first/result.json").read_text())
    run(shorten(longer, 2 * SECONDS), tmp_path)  # On a busy machine the first step alone took its time.
    after = json.loads((tmp_path / "runs/first/result.json").read_text())
    assert after["steps"] > before["steps"]
    assert after["sample"] is None
    assert after["no_sample_reason"]


def test_the_winner_of_a_search_and_of_a_ladder_is_trained_and_writes(tmp_path: Path) -> None:
    """On a book of one sentence, which a model learns in seconds, and without validation, because it is alone."""
    (tmp_path / "book.txt").write_text(f"{TEXT}\n\n" * 500, encoding="utf-8")
    encode = run("python -m pipeline.vocabulary book.txt --size 270 --out mine.json", tmp_path)
    assert run(encode, tmp_path).startswith("python -m train.run --data data/tokens-270 --model tiny")
    flags = "--data data/tokens-270 --model tiny,context_length=32 --device cpu"
    search = f"python -m tune.search {flags} --learning-rate 1e-2 --global-batch 4 --memory-limit 4GB"
    winner = run(f"{search} --trial-steps 7 --confirm-rounds 1 --name found", tmp_path)
    assert winner.startswith("python -m train.run --config")
    generate = run(f"{winner} --name best --steps {LEARNING_STEPS}", tmp_path)
    assert generate.startswith("python -m train.generate --checkpoint best")
    assert " was" in execute(generate, tmp_path)
    ladder = f"python -m tune.ladder --suite loop --rungs 'gradients set to none' {flags} --steps 8 --cycle 8+0"
    assert run(f"{ladder} --name climbed", tmp_path).startswith("python -m train.run --config")
