"""Flags: help by groups, with the common flags first, and mistakes in one sentence."""

import importlib
import re
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import pytest
import tyro
from typing_extensions import Doc

from infra import cli
from infra.errors import UserError
from infra.flags import parsed, sentence
from infra.help import Sections, flags_of, usage
from infra.units import Bytes, BytesOrNone
from pipeline.config import Reading
from train import plan, run
from train.config import GROUPS, TrainConfig
from train.generate import GenerateConfig
from train.model_config import ModelConfig
from train.profile import __main__ as profile
from tune import search
from tune.config import LadderConfig, SearchConfig
from tune.suite.suites import SUITES


@dataclass(frozen=True)
class Options:
    """Options of every kind."""

    sources: Annotated[tuple[str, ...], tyro.conf.Positional] = ("sample",)
    """Where it comes from."""
    count: int = 3
    """How many, at least 1, and whatever else there is to know about a number in a sentence that is long."""
    rate: float | None = None
    """How fast; decided later."""
    how: Literal["slowly", "fast"] = "slowly"
    """How.

    slowly: with care
    fast: without it, and explained in a text that is longer than the line that it begins on
    """
    kinds: tuple[Literal["small-ones", "large-ones"], ...] = ()
    """Which."""
    room: BytesOrNone = None
    """How large at most."""
    piece: Bytes = 2_000_000
    """How large each."""
    quiet: bool = False
    """Say nothing."""
    colour: bool = True
    """Use colours."""
    folder: Path = Path("here and there")
    """Where to."""

    def __post_init__(self) -> None:
        if self.count < 1:
            raise UserError(f"--count {self.count} must be at least 1: [give] a larger one, and read this to its end.")


def read(monkeypatch: pytest.MonkeyPatch, *words: str) -> Options:
    monkeypatch.setattr(sys, "argv", ["command", *words])
    return parsed(Options, "a command")


@pytest.mark.parametrize("columns", ["20", "80", "500"])
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--count", "0"], "--count 0 must be at least 1: [give] a larger one, and read this to its end."),
        (["--count", "many"], "--count 'many' is not a whole number."),
        (["--count", "1.5"], "--count '1.5' is not a whole number."),
        (["--rate", "fast"], "--rate 'fast' is not a number."),
        (["--rate"], "--rate needs a value."),
        (["--how", "well"], "--how well is not known; choose one of slowly, fast."),
        (["--kinds", "small-ones", "none"], "--kinds none is not known; choose one of small-ones, large-ones."),
        (["--room", "40"], "--room '40' is not a size; write for example 40GB (10^9) or 40GiB (2^30)."),
        (["--cuont", "4"], "--cuont is not a flag of this command; did you mean --count?"),
        (["--xyzzy=4"], "--xyzzy is not a flag of this command; 'a command --help-all' lists all."),
    ],
)
def test_a_mistake_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: str, words: list[str], said: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    with pytest.raises(UserError) as mistake:
        read(monkeypatch, *words)
    assert str(mistake.value) == said
    printed = capsys.readouterr()
    assert printed.err == printed.out == ""


def test_a_word_that_belongs_to_no_flag_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["command", "books"])
    with pytest.raises(UserError, match="'books' belongs to no flag: 'a command --help' lists"):
        parsed(Reading, "a command")


@dataclass(frozen=True)
class Required:
    """Options without defaults."""

    place: Annotated[Path, tyro.conf.Positional]
    """Where."""
    source: str
    """From where."""
    amount: int
    """How much."""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["here", "--amount", "3"], "--source TEXT must be given: 'a command --help' explains it."),
        (["--source=there", "--amount", "3"], "PLACE must be given: 'a command --help' explains it."),
        (["here"], "--source TEXT and --amount INT must be given: 'a command --help' explains them."),
    ],
)
def test_what_is_required_is_said(monkeypatch: pytest.MonkeyPatch, words: list[str], said: str) -> None:
    monkeypatch.setattr(sys, "argv", ["command", *words])
    text = usage(Required, "a command", "Does it.", Sections(), None, whole=False, width=80)
    assert text.startswith("usage: a command PLACE --source TEXT --amount INT [FLAGS]\n")
    assert "  --source TEXT           From where. [required]\n" in text
    with pytest.raises(UserError) as mistake:
        parsed(Required, "a command")
    assert str(mistake.value) == said


def test_what_is_right_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read(monkeypatch) == Options()
    words = ["a", "b", "--count", "4", "--rate", "1e-3", "--room", "2GB", "--quiet", "--no-colour"]
    found = read(monkeypatch, *words)
    assert found == Options(("a", "b"), 4, 0.001, room=2 * 10**9, quiet=True, colour=False)
    assert read(monkeypatch, "--rate", "None").rate is None, "which takes back what a file of settings says"


def test_a_file_may_begin_as_a_flag_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("-dash.txt", "--count"):
        Path(name).write_text("It was a book.")
    found = read(monkeypatch, "a.txt", "-dash.txt", "--count", "4")
    assert (found.sources, found.count) == (("a.txt", "./-dash.txt"), 4)


def test_a_message_in_another_form_is_repeated() -> None:
    assert sentence("Something else went wrong") == "Something else went wrong."


def test_the_help_shows_values_and_defaults_as_they_are_written() -> None:
    text = usage(Options, "a command", "Does it.", Sections(), None, whole=False, width=80)
    assert max(map(len, text.splitlines())) <= 80
    assert text.startswith("usage: a command [SOURCES ...] [FLAGS]\n\nDoes it.\n\nFlags:\n  SOURCES ")
    assert "None" not in text
    assert "  --rate NUMBER           How fast; decided later.\n" in text
    assert "  --quiet                 Say nothing.\n" in text
    assert "  --no-colour             Use colours.\n" in text
    assert "  --piece SIZE            How large each. [default: 2MB]\n" in text
    assert "[default: here and there]" in text
    assert "  --kinds NAME ...        Which. One of small-ones, large-ones.\n" in text
    assert (
        "  --how slowly|fast       How. [default: slowly]\n"
        "                            slowly  with care\n"
        "                            fast    without it, and explained in a text that is\n"
        "                                    longer than the line that it begins on\n"
    ) in text
    changed = usage(Options, "x", "", Sections(), Options(rate=0.5), whole=False, width=80)
    assert "How fast; decided later. [default: 0.5]" in changed


@dataclass(frozen=True)
class Narrower(Required):
    """Options that say more about one of those they inherit."""

    amount: int = 3
    """How much, which is little."""
    kind: Annotated[str, Doc("As its type explains.")] = "usual"


def test_a_flag_is_described_by_its_class_the_base_or_its_type() -> None:
    texts = {flag.field: flag.text for flag in flags_of(Narrower)}
    assert texts == {
        "place": "Where.", "source": "From where.", "amount": "How much, which is little.",
        "kind": "As its type explains.",
    }  # fmt: skip


@dataclass(frozen=True)
class Outdated:
    """Options with something to warn of."""

    def __post_init__(self) -> None:
        print("this will change", file=sys.stderr)


def test_a_warning_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["command"])
    assert isinstance(parsed(Outdated, "a command"), Outdated)
    assert "this will change" in capsys.readouterr().err.splitlines()


def test_the_common_flags_come_first_and_the_others_by_their_groups() -> None:
    sections = Sections(("how", "count"), {"speed": ("rate", "how", "of another command"), "nothing": ("gone",)})
    short = usage(Options, "python -m some.module", "", sections, None, whole=False, width=80)
    assert short.index("--how slowly|fast") < short.index("--count INT")
    assert short.endswith("\n  speed         --rate")
    assert "\n  module        SOURCES --kinds" in short
    assert "How fast" not in short
    whole = usage(Options, "python -m some.module", "", sections, None, whole=True, width=80)
    headings = re.findall(r"^(\w+):$", whole, re.MULTILINE)
    assert headings == ["Module", "Speed"]
    assert whole.index("How fast") < whole.index("slowly  with care")


COMMANDS = {
    "train.run": (run.RunOptions, run.COMMON),
    "train.plan": (plan.PlanOptions, plan.COMMON),
    "train.profile": (profile.ProfileOptions, profile.COMMON),
    "tune.search": (SearchConfig, search.COMMON),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_ten_flags_are_common(name: str) -> None:
    options, common = COMMANDS[name]
    assert len(common) == 10
    assert set(common) <= {flag.field for flag in flags_of(options)}


NUMBERS = {int: (*range(10), 2048, 10**6), float: (0.0, 0.5)}
"""Among which the least that a flag allows is looked for."""

BESIDE: dict[type, dict[str, Any]] = {
    TrainConfig: {"model": ModelConfig(context_length=1024), "micro_batch": 1, "global_batch": 2},
    plan.PlanOptions: {"tokens_per_second": 1.0},
    GenerateConfig: {"checkpoint": "first"},
}
"""Values of other flags with which the least of each is possible."""


def test_the_help_names_the_bounds_of_numbers() -> None:
    """Values are tried: where some are refused, the description names the least that is not, and what it is below."""
    named = {2048: "those of one step", 10**6: "1MB"}
    bounded: list[str] = []
    commands = [command.options.split(":") for command in cli.COMMANDS.values()]
    for options in (TrainConfig, *(getattr(importlib.import_module(module), kind) for module, kind in commands)):
        texts = {flag.field: flag.text for flag in flags_of(options)}
        for name, hint in get_type_hints(options).items():
            kind = next((kind for kind in (int, float) if kind in (hint, *get_args(hint))), None)
            if kind is None:
                continue

            def fits(value: float, options: type = options, name: str = name) -> bool:
                try:
                    options(**BESIDE.get(options, {}) | {name: value})
                except ValueError as refused:
                    return f"--{name.replace('_', '-')} " not in str(refused)
                return True

            if not fits(-1):
                bounded.append(name)
                least = next(number for number in NUMBERS[kind] if fits(number))
                said = "(above|between) 0" if least == 0.5 else rf"(?<!\d){named.get(least, f'{least:g}')}(?!\d)"
                assert re.search(said, texts[name]), name
            if kind is float and not fits(1e9):
                assert re.search("(below|and) 1|at most 1", texts[name]), name
    assert len(bounded) > 30, bounded


def test_every_setting_of_a_training_is_in_one_group() -> None:
    grouped = [name for names in GROUPS.values() for name in names]
    assert len(set(grouped)) == len(grouped)
    settings = {setting.name for kind in (TrainConfig, Reading) for setting in fields(kind)} - {"reading"}
    assert settings <= set(grouped)
    assert set(GROUPS) == {"data", "model", "mathematics", "execution", "length", "output"}


@pytest.mark.parametrize("options", [run.RunOptions, LadderConfig, SearchConfig])
def test_every_choice_is_explained(options: type) -> None:
    """But for those whose names say it."""
    for flag in flags_of(options):
        if "|" in flag.value and flag.field != "device":
            explained = re.findall(r"^([\w-]+): ", flag.text, re.MULTILINE)
            assert explained == flag.value.removesuffix(" ...").removeprefix("INT|").split("|"), flag.field


def test_the_ladder_explains_every_suite() -> None:
    (suite,) = (flag for flag in flags_of(LadderConfig) if flag.field == "suite")
    assert re.findall(r"^(\w+): ", suite.text, re.MULTILINE) == list(SUITES)
