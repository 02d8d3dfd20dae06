"""Checks that the sections of a config share. Each error message has the flag of the invalid setting."""

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from infra.cli.units import check_numbers
from infra.errors import UserError


def format_flag(name: str, value: Any) -> str:
    """Format a setting as a flag: ``--mask-books``, or ``--precision fp16`` with its value."""
    flag = f"--{name.replace('_', '-')}"
    return flag if value is True else f"{flag} {value}"


@cache
def choices(part: type) -> dict[str, tuple[str, ...]]:
    """Return the valid values of each setting of ``part`` whose type is a ``Literal``, by the setting's name."""
    hints = get_type_hints(part)
    return {name: get_args(hint) for name, hint in hints.items() if get_origin(hint) is Literal}


def check_part(part: Any, **minimums: int) -> None:
    """Raise ``UserError`` for an invalid choice, a number that is not finite, or a value below its minimum."""
    for name, values in choices(type(part)).items():
        if getattr(part, name) not in values:
            flag = format_flag(name, getattr(part, name))
            raise UserError(f"{flag} is not a valid value. Choose from {', '.join(values)}.")
    for name, minimum in minimums.items():
        if not getattr(part, name) >= minimum:  # This also rejects NaN.
            required = "must be at least 1" if minimum == 1 else "must not be negative"
            raise UserError(f"{format_flag(name, getattr(part, name))} {required}.")
    check_numbers(part)


Conflict = tuple[tuple[str, bool], tuple[str, bool], str]
"""(setting, whether its value conflicts), the same of a second setting, and the reason for the conflict."""


def check_combinations(settings: Mapping[str, Any], conflicts: Iterable[Conflict]) -> None:
    """Raise ``UserError`` if the values of both settings of one of the ``conflicts`` conflict."""
    for (setting, is_affected), (other_setting, is_other_affected), reason in conflicts:
        if is_affected and is_other_affected:
            flags = [format_flag(name, settings[name]) for name in (setting, other_setting)]
            raise UserError(f"{flags[0]} and {flags[1]} cannot be combined: {reason}.")
