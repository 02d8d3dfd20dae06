"""Flags: what is right is read, and a mistake is one sentence that names the flag."""

import importlib
import io
import re
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import tyro

from infra.cli import main
from infra.cli.flags import parse_flags, parse_only, summarize_tyro_error
from infra.cli.units import Bytes, BytesOrNone
from infra.errors import UserError

CommandLine = Callable[..., AbstractContextManager[None]]


@dataclass(frozen=True)
class Options:
    """Options of every kind."""

    sources: Annotated[tuple[str, ...], tyro.conf.Positional] = ("sample",)
    count: int = 3
    rate: float | None = None
    how: Literal["slowly", "fast"] = "slowly"
    room: BytesOrNone = None
    piece: Bytes = 2_000_000
    quiet: bool = False
    color: bool = True
    folder: Path = Path("here and there")

    def __post_init__(self) -> None:
        if self.count < 1:
            raise UserError(f"--count {self.count} must be at least 1: [give] a larger one, and read this to its end.")
        if self.color and self.quiet:
            print("colors are not seen", file=sys.stderr)


@pytest.fixture
def read(command_line: CommandLine) -> Callable[..., Options]:
    """``read(*words)``: the options of a command that is started with these words."""

    def read(*words: str) -> Options:
        with command_line(*words):
            return parse_flags(Options, "a command")

    return read


def test_what_is_right_is_read(read: Callable[..., Options], capsys: pytest.CaptureFixture[str]) -> None:
    assert read() == Options()
    words = ["a", "b", "--count", "4", "--rate", "1e-3", "--room", "2GB", "--quiet", "--no-color"]
    found = read(*words)
    assert found == Options(("a", "b"), 4, 0.001, room=2 * 10**9, quiet=True, color=False)
    assert read("--rate", "None").rate is None, "which takes back what a file of settings says"
    assert "not seen" not in capsys.readouterr().err
    assert read("--quiet").quiet
    assert "not seen" in capsys.readouterr().err, "a warning is printed"


def test_a_file_may_begin_with_a_dash(
    read: Callable[..., Options], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("-dash.txt", "--count"):
        Path(name).write_text("It was a book.")
    found = read("a.txt", "-dash.txt", "--count", "4")
    assert (found.sources, found.count) == (("a.txt", "./-dash.txt"), 4)


def test_some_flags_are_read_before_the_defaults_of_others_are_known(command_line: CommandLine) -> None:
    with command_line("--steps", "3", "--how=fast", "--count", "0", "a.txt", "--help"):
        some = parse_only(Options, "how", "rate")
    assert vars(some) == {"how": "fast", "rate": None}


COUNT = "--count 0 must be at least 1: [give] a larger one, and read this to its end."


@pytest.mark.parametrize("columns", ["20", "80", "500"])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_the_width_and_the_encoding_of_the_terminal_make_no_difference(
    read: Callable[..., Options], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: str,
    encoding: str,
) -> None:  # fmt: skip
    monkeypatch.setenv("COLUMNS", columns)
    for words, said in ((["--count", "0"], COUNT), (["--room", "40"], "Error parsing --room: '40' is not a size ")):
        with redirect_stdout(io.TextIOWrapper(io.BytesIO(), encoding)), pytest.raises(UserError) as mistake:
            read(*words)
        assert str(mistake.value).startswith(said)
        assert "\n" not in str(mistake.value)
    assert capsys.readouterr().err == ""


MISTAKES = {
    "tokenize": [
        (["--shard-size", "3"], "--shard-size"), (["--val-fraction", "1"], "--val-fraction"), (["--out="], "--out"),
        (["--languages", "english"], "--languages"), (["--encoder", "bpe"], "--encoder gigatoken tiktoken"),
        (["--no-such"], "--no-such"), ([""], "source is empty"),
    ],
    "vocabulary": [(["--size", "256"], "--size 256"), (["--sample", "9B"], "--sample"), (["--languages", "x"], "x")],
    "inspect": [
        (["--passages", "-1"], "--passages"), (["--passage-tokens", "x"], "--passage-tokens"), (["one", "two"], "two"),
    ],
    "run": [
        (["--sede", "4"], "--sede --seed"), (["--seed"], "--seed"), (["--seed", "x"], "--seed x"),
        (["--steps", "x"], "--steps x"), (["--time-budget", "5"], "--time-budget 5m"), (["books"], "books"),
        (["--compile", "well"], "--compile well max-autotune"),
        (["--ablate", "async-loss", "x"], "--ablate x prefetch"),
        (["--micro-batch", "0"], "--micro-batch 0"), (["--micro-batch", "7"], "--micro-batch 7 480"),
        (["--cycle", "3x"], "--cycle 3x"), (["--languages", "en"], "--languages --stream"),
        (["--model", "huge"], "--model huge gpt2-124m"), (["--steps", "3", "--tokens", "70000000"], "--steps --tokens"),
        (["--stream", "books", "--steps", "3", "--doc-separator", ""], "--doc-separator"),
        (["--config", "none.json"], "--config none.json"), (["--config="], "--config"), (["--config"], "--config"),
        (["--resume", "gone"], "--resume gone"), (["--resume", ""], "--resume"),
        (["--resume", "one", "--name", "two"], "--name two"),
        (["--resume", "one", "--config", "a"], "--config --resume"),
    ],
    "ladder": [
        (["--steps", "3"], "--steps 3"), (["--seeds", "0"], "--seeds 0"),
        (["--steps", "9", "--time-budget", "1m"], "--steps --time-budget"),
        (["--resume", "gone"], "--resume gone"), (["--resume="], "--resume"),
    ],
    "plan": [
        (["--price-per-hour", "1"], "--price-per-hour --tokens-per-second"), (["--memory-limit", "40"],
        "--memory-limit 40GB"),
    ],
    "profile": [(["--config", "none.json"], "--config none.json"), (["--beta1", "1"], "--beta1 1")],
    "generate": [([], "--checkpoint"), (["--checkpoint", "first", "--top-k", "-1"], "--top-k -1")],
    "export": [([], "--checkpoint --to"), (["--checkpoint", "first"], "--to")],
    "search": [
        (["--knobs", "magic"], "magic"), (["--trial-steps", "2"], "--trial-steps 2"),
        (["--max-concurrent-trials", "0"], "--max-concurrent-trials"),
        (["--searcher", "x"], "--searcher x optuna"), (["--config="], "--config"), (["--resume="], "--resume"),
        (["--stream", "books", "--steps", "9"], "--stream"), (["--global-batch", "0"], "--global-batch 0"),
    ],
    "doctor": [(["--workers", "0"], "--workers 0"), (["--workers"], "--workers"), (["now"], "now")],
}  # fmt: skip
"""For each command: words of a command line, and what the sentence about them contains."""


@pytest.mark.parametrize(
    ("name", "words", "said"), [(name, *row) for name, rows in MISTAKES.items() for row in rows], ids=str
)
def test_a_mistake_is_one_sentence_that_names_the_flag(
    command_line: CommandLine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, words: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(main.COMMANDS[name][0])
    default: Any = getattr(module, "defaults", None)
    with command_line(*words), pytest.raises(UserError) as mistake:
        parse_flags(getattr(module, main.COMMANDS[name][1]), "a command", default and default())
    sentence = str(mistake.value)
    assert all(word in sentence for word in said.split()), sentence
    assert sentence.endswith((".", "?"))
    assert not re.search("[│─╭\n]|helptext", sentence)


def test_every_command_has_its_mistakes() -> None:
    assert set(MISTAKES) == set(main.COMMANDS)


def test_a_message_in_another_form_is_repeated() -> None:
    assert (
        summarize_tyro_error("╭─ Title ─╮\n│ Something else went wrong │\n╰─────────╯") == "Something else went wrong."
    )


@pytest.mark.parametrize("name", list(MISTAKES))
def test_help_shows_the_main_flags_first_and_every_other_one_under_a_heading(
    command_line: CommandLine, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    module, kind = main.COMMANDS[name]
    printed = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setenv("COLUMNS", "120")
    with command_line("--help"), redirect_stdout(printed), pytest.raises(SystemExit):
        parse_flags(getattr(importlib.import_module(module), kind), "a command")
    printed.seek(0)
    text = printed.read()
    _, *boxes = re.split(r"(?m)^ ([a-zA-Z ]+?) *\n -+ *\n", text)
    groups = dict(zip(boxes[::2], boxes[1::2], strict=True))
    flags = [flag for box in groups.values() for flag in re.findall(r"(?m)^ (?:-h, )?(--[a-z0-9-]+)", box)]
    assert len(flags) == len(set(flags)), "each flag once"
    assert len(re.findall(r"(?m)^ --", groups["options"])) <= 12
    assert "other options" not in groups, "every flag has a heading"
    assert not {"--no-dry-run", "--no-overwrite", "--no-quick"} & set(re.findall("--[a-z-]+", text))
    assert not re.search(r"\{None\}|default: None|default: \)|STR\b|default: False", text)


def test_settings_in_groups_are_read_like_others(command_line: CommandLine) -> None:
    """Of the command and of the settings nested in it, with the defaults of an instance."""
    from train.config import TrainConfig
    from tune.config import SearchConfig

    default = SearchConfig(name="one", training=TrainConfig.of(steps=3, beta1=0.8))
    with command_line("--seed", "4", "--trial-steps", "9", "--no-fp8", "--knobs", "loss=plain"):
        found = parse_flags(SearchConfig, "a command", default)
    assert (found.name, found.trial_steps, found.knobs) == ("one", 9, ("loss=plain",))
    assert found.training == TrainConfig.of(steps=3, beta1=0.8, seed=4)
