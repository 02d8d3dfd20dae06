"""Checks that the parts of a config share. Each names the flag of the setting that fails."""

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from infra.cli.units import check_numbers
from infra.errors import UserError


def format_flag(name: str, value: Any) -> str:
    """A setting as its flag: ``--mask-books``, or ``--precision fp16`` with its value."""
    flag = f"--{name.replace('_', '-')}"
    return flag if value is True else f"{flag} {value}"


@cache
def choices(part: type) -> dict[str, tuple[str, ...]]:
    """The valid values of the settings of ``part`` that have a name for each."""
    hints = get_type_hints(part)
    return {name: get_args(hint) for name, hint in hints.items() if get_origin(hint) is Literal}


def check_part(part: Any, **minimums: int) -> None:
    """Raise ``UserError`` for an unknown choice, a number that is not finite, or a value below its minimum."""
    for name, values in choices(type(part)).items():
        if getattr(part, name) not in values:
            flag = format_flag(name, getattr(part, name))
            raise UserError(f"{flag} is not known; choose one of {', '.join(values)}.")
    for name, minimum in minimums.items():
        if not getattr(part, name) >= minimum:  # This also rejects NaN.
            required = "must be at least 1" if minimum == 1 else "must not be negative"
            raise UserError(f"{format_flag(name, getattr(part, name))} {required}.")
    check_numbers(part)


Conflict = tuple[tuple[str, bool], tuple[str, bool], str]
"""Two settings, each with whether its value is affected, that cannot be combined, and the reason."""


def check_combinations(settings: Mapping[str, Any], conflicts: Iterable[Conflict]) -> None:
    """Raise ``UserError`` if both settings of one of the ``conflicts`` are affected."""
    for (first, has_first), (second, has_second), reason in conflicts:
        if has_first and has_second:
            first_flag, second_flag = format_flag(first, settings[first]), format_flag(second, settings[second])
            raise UserError(f"{first_flag} and {second_flag} cannot be combined: {reason}.")
