"""Flags from the command line into a config: tyro parses them, and a mistake becomes one sentence."""

import difflib
import io
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from typing import Any, TypeVar

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from infra.errors import UserError
from infra.help import HELP, HELP_ALL, VALUES, Flag, flags_of
from infra.local_ray import environment_variables
from infra.units import one_word, or_none

Config = TypeVar("Config")

MISSING = "Missing from"
"""How tyro's message about flags that are required and were not given begins."""


def parsed(config: type[Config], program: str, default: Config | None = None) -> Config:
    """``config`` from the command line. Raises ``UserError``, a sentence, for a mistake in it."""
    given: Any = {} if default is None else {"default": default}
    known = {flag.name for flag in flags_of(config, default)}
    # A file may have the name of a flag that does not exist, and a shell writes it for '*.txt'.
    words = [f"./{w}" if w[:1] == "-" and w not in known and os.path.lexists(w) else w for w in sys.argv[1:]]
    said = io.StringIO()
    try:
        with redirect_stderr(said), environment_variables({"COLUMNS": "10000"}), _numbers():
            made, unknown = tyro.cli(config, prog=program, args=words, return_unknown_args=True, **given)
    except SystemExit as leaving:
        if not leaving.code:
            raise
        text = sentence(said.getvalue())
        raise UserError(_missing(flags_of(config, default), program) if text.startswith(MISSING) else text) from None
    if warnings := said.getvalue():
        sys.stderr.write(warnings)
    if unknown:
        raise UserError(_unknown(unknown[0].partition("=")[0], flags_of(config, default), program))
    return made


def _missing(flags: Sequence[Flag], program: str) -> str:
    """What to say when some of the required ``flags`` were left out."""
    given = {word.partition("=")[0] for word in sys.argv[1:]}
    required = [flag for flag in flags if flag.required and flag.name not in given]
    lacking = [flag.written for flag in required if not flag.positional] or [flag.written for flag in required]
    explained = "it" if len(lacking) == 1 else "them"
    return f"{' and '.join(lacking)} must be given: '{program} {HELP}' explains {explained}."


def _unknown(word: str, flags: Sequence[Flag], program: str) -> str:
    if not word.startswith("-"):
        return f"{word!r} belongs to no flag: '{program} {HELP}' lists them."
    close = difflib.get_close_matches(word, [flag.name for flag in flags], n=2, cutoff=0.6)
    hint = f"did you mean {' or '.join(close)}?" if close else f"'{program} {HELP_ALL}' lists all."
    return f"{word} is not a flag of this command; {hint}"


def sentence(message: str) -> str:
    """What a message of tyro's says, in one sentence, without its frame, its title, and the help that it repeats."""
    lines = [line.strip(" │╭╮╰╯") for line in message.splitlines()]
    rules = [number for number, line in enumerate(lines) if line.startswith(("─", "--- ", "----"))]
    body = lines[rules[0] + 1 : rules[1]] if len(rules) > 1 else lines
    text = " ".join(" ".join(body).split())
    for pattern, said in _SENTENCES.items():
        if found := re.fullmatch(pattern, text):
            text = said(*found.groups())
            break
    return text if text.endswith((".", "?")) else f"{text}."


_SENTENCES: dict[str, Callable[..., str]] = {
    r"Error parsing --\S+: (--.*)": str,
    r"Error parsing (--\S+): (.*)": "{} {}".format,
    r"Error parsing \w+: (.*)": str,
    r"Missing value for argument '(--\S+)'.*": "{} needs a value.".format,
    r"invalid choice '(.*)' for argument '(--\S+)'\. Expected one of \((.*)\)\.": lambda value, flag, choices: (
        f"{flag} {value} is not known; choose one of {choices.replace(chr(39), '')}."
    ),
}
"""tyro's messages, and how they are said here. Any other is repeated as it is."""


def _numbers() -> ConstructorRegistry:
    """tyro's rules for numbers, so that one that cannot be read is named without Python's words for it."""
    rules = ConstructorRegistry()

    @rules.primitive_rule
    def number(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
        for kind, spec in _NUMBERS.items():
            if info.type is kind:
                return spec
            if info.type == kind | None:
                return or_none(spec)
        return None

    return rules


def _number(kind: type[int] | type[float], name: str) -> PrimitiveConstructorSpec[Any]:
    def read(text: str) -> float:
        try:
            return kind(text)
        except ValueError:
            raise ValueError(f"{text!r} is not {name}") from None

    return one_word(VALUES[kind], (int, float) if kind is float else int, read, str)


_NUMBERS = {int: _number(int, "a whole number"), float: _number(float, "a number")}
