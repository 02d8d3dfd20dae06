"""What ``--help`` prints: the flags of a command by their groups, the common ones first.

In: a config dataclass, whose fields have docstrings. Out: a text. tyro, which parses the flags, would print them in one
list, with ``None`` for every default that is decided later.
"""

import inspect
import re
import textwrap
from ast import AnnAssign, ClassDef, Constant, Expr, Name, parse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import tyro
from typing_extensions import Doc
from tyro.constructors import PrimitiveConstructorSpec

HELP, HELP_ALL = "--help", "--help-all"

INDENT = 26
"""Columns before the description of a flag."""

NO_BREAK = "\N{NO-BREAK SPACE}"

VALUES = {int: "INT", float: "NUMBER", str: "TEXT", Path: "PATH"}
"""What stands for the value of a flag of this type."""


@dataclass(frozen=True)
class Sections:
    """How a command presents its flags, by the names of their fields."""

    common: tuple[str, ...] = ()
    """Those that ``--help`` describes, while it only names the others; without any it describes all."""
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Named groups. Flags in none of them form the first one, which has the command's name."""


@dataclass(frozen=True)
class Flag:
    """A flag as it is shown."""

    field: str
    value: str
    """What follows it, such as ``INT``; its choices separated by ``|``."""
    default: str
    """As it is written on the command line; empty where there is none."""
    text: str
    """The field's docstring: a paragraph and, after an empty line, a line ``name: meaning`` for each value."""
    positional: bool = False
    switch: bool = False
    required: bool = False

    @property
    def name(self) -> str:
        """``--micro-batch``, or the name of a positional argument."""
        return self.field.upper() if self.positional else f"--{self.field.replace('_', '-')}"

    @property
    def in_usage(self) -> str:
        """How it is written in the first line of the help text."""
        text = f"{self.written} ..." if self.positional and self.value.endswith("...") else self.written
        return text if self.required else f"[{text}]"

    def lines(self, width: int) -> Iterator[str]:
        """The flag with its description beside it, and a line for each of its values."""
        paragraph, _, listed = self.text.partition("\n\n")
        meanings = [line.partition(": ") for line in re.split(r"\n(?=[\w-]+: )", listed) if line]
        said, written = " ".join(paragraph.split()), self.written
        if len(written) > INDENT - 4 and "|" in self.value:
            written = f"{self.name} {'NAME ...' if self.value.endswith('...') else 'NAME'}"
            if not meanings:
                said += f" One of {self.value.removesuffix(' ...').replace('|', ', ')}."
        if self.required:
            said += " [required]"
        if self.default and not self.switch:
            said += f" [default:{NO_BREAK}{self.default.replace(' ', NO_BREAK)}]"
        text = _wrapped(said, width - INDENT)
        longest = max((len(value) for value, _, _ in meanings), default=0)
        for value, _, meaning in meanings:
            text += _wrapped(" ".join(meaning.split()), width - INDENT, f"  {value:{longest}}  ")
        if len(written) > INDENT - 4:
            yield f"  {written}"
            written = ""
        for line in text:
            yield f"  {written:{INDENT - 2}}{line}"
            written = ""

    @property
    def written(self) -> str:
        """The name with what follows it; a switch that is on is shown as it is turned off."""
        if self.switch:
            return self.name.replace("--", "--no-", 1) if self.default == "True" else self.name
        return self.name if self.positional else f"{self.name} {self.value}"


def flags_of(config: type[Any], default: Any = None) -> list[Flag]:
    """The flags of ``config``, in the order of its fields; ``default`` is an instance with other defaults."""
    texts, hints = dict(_docstrings(config)), get_type_hints(config, include_extras=True)
    found: list[Flag] = []
    for setting in fields(config):
        hint = hints[setting.name]
        kind, *notes = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        value = setting.default if default is None else getattr(default, setting.name)
        if value is MISSING and setting.default_factory is not MISSING:
            value = setting.default_factory()
        spec = next((note for note in notes if isinstance(note, PrimitiveConstructorSpec)), None)
        if is_dataclass(kind) and spec is None:
            found += flags_of(type(value), value)
            continue
        found.append(
            Flag(
                setting.name,
                _value(kind, spec),
                _default(value, spec),
                inspect.cleandoc(texts.get(setting.name) or _described_by(notes)),
                positional=tyro.conf.Positional in notes,
                switch=kind is bool,
                required=value is MISSING,
            )
        )
    return found


def _described_by(notes: Sequence[Any]) -> str:
    """The description that an annotated type brings along."""
    return next((note.documentation for note in notes if isinstance(note, Doc)), "")


def _docstrings(config: type[Any]) -> Iterator[tuple[str, str]]:
    """The fields of ``config`` and of its bases, with their docstrings, which Python does not keep."""
    for base in reversed(config.__mro__):
        if not is_dataclass(base):
            continue
        try:
            (definition,) = parse(textwrap.dedent(inspect.getsource(base))).body
        except OSError:  # of a class that is in no file
            continue
        assert isinstance(definition, ClassDef)
        for statement in pairwise(definition.body):
            match statement:
                case AnnAssign(target=Name(id=name)), Expr(value=Constant(value=str(text))):
                    yield name, text
                case _:
                    pass


def _value(kind: Any, spec: PrimitiveConstructorSpec[Any] | None) -> str:
    if spec is not None:
        return spec.metavar.removeprefix("{None}|")
    if get_origin(kind) is tuple:
        return f"{_value(get_args(kind)[0], None)} ..."
    if get_origin(kind) in (Union, UnionType):
        return _value(next(part for part in get_args(kind) if part is not NoneType), None)
    if get_origin(kind) is Literal:
        return "|".join(get_args(kind))
    return VALUES.get(kind, "")


def _default(value: Any, spec: PrimitiveConstructorSpec[Any] | None) -> str:
    if value is None or value is MISSING:
        return ""
    if spec is not None:
        return " ".join(spec.str_from_instance(value))
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def usage(
    config: type[Any], program: str, description: str, sections: Sections, default: Any, *, whole: bool, width: int
) -> str:
    """The help text in lines of at most ``width``; with ``whole`` every flag is described."""
    known = {flag.field: flag for flag in flags_of(config, default)}
    places = [flag.in_usage for flag in known.values() if flag.positional or flag.required]
    lines = [" ".join(["usage:", program, *places, "[FLAGS]"]), "", *_wrapped(" ".join(description.split()), width)]
    if sections.common and not whole:
        lines += ["", "Common flags:", *_described(sections.common, known, width)]
        lines += ["", f"Further flags, which {HELP_ALL} describes:"]
        for title, names in _groups(sections, known, program):
            rest = " ".join(known[name].name for name in names if name not in sections.common)
            lines += _wrapped(rest, width, f"  {title:13} ") if rest else []
    else:
        for title, names in _groups(sections, known, program):
            heading = f"{title[0].upper()}{title[1:]}:" if sections.groups else "Flags:"
            lines += ["", heading, *_described(names, known, width)]
    return "\n".join(lines)


def _groups(sections: Sections, known: Mapping[str, Flag], program: str) -> Iterator[tuple[str, Sequence[str]]]:
    """The groups that have flags here, with these."""
    grouped = {name for names in sections.groups.values() for name in names}
    own = re.split(r"[ .]", program)[-1]
    others = sorted((name for name in known if name not in grouped), key=lambda name: not known[name].positional)
    for title, names in {own: others, **sections.groups}.items():
        if here := [name for name in names if name in known]:
            yield title, here


def _described(names: Iterable[str], known: Mapping[str, Flag], width: int) -> Iterator[str]:
    for name in names:
        yield from known[name].lines(width)


def _wrapped(text: str, width: int, first: str = "") -> list[str]:
    """Lines of at most ``width`` columns, the first after ``first`` and the others below its end."""
    lines = textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=" " * len(first), break_on_hyphens=False,
        break_long_words=False,
    )  # fmt: skip
    return [line.replace(NO_BREAK, " ") for line in lines]
