"""Sizes and durations with units: ``40GB`` is 40 x 10^9 bytes, ``40GiB`` is 40 x 2^30 bytes, ``5m`` is 300 seconds.

A flag requires the unit, because gigabytes have two definitions.
"""

import math
import re
from collections.abc import Callable
from dataclasses import fields
from fractions import Fraction
from typing import Annotated, Any

from tyro.constructors import PrimitiveConstructorSpec

from infra.errors import UserError

GB = 10**9
"""Bytes per gigabyte, the unit in which memory and storage are printed, as in data sheets (torch prints GiB, 2^30)."""

_BYTES_BY_UNIT = {
    "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_SECONDS_BY_UNIT = {"s": 1, "m": 60, "h": 3600, "d": 86400}

MAX_NUMBER = 2**63
"""Exclusive upper limit of every number in the settings."""

MAX_SECONDS = 36_500 * 86_400
"""Longest duration in the settings, 100 years. Some waits take up to three times a setting, which must not overflow."""


def parse_size(text: str) -> int:
    """Return the bytes in ``40GB``, ``512MiB`` or ``1000B``. Raises ``ValueError``, also for a missing unit."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]+)\s*", text)
    if not match or match[2].lower() not in _BYTES_BY_UNIT:
        raise ValueError(f"{text!r} is not a size with a unit; use for example 40GB (10^9 bytes) or 40GiB (2^30 bytes)")
    size = int(Fraction(match[1]) * _BYTES_BY_UNIT[match[2].lower()])
    if not size:
        raise ValueError(f"{text!r} is less than one byte; use at least 1B")
    if size >= MAX_NUMBER:
        raise ValueError(f"{text!r} is too large; use less than {MAX_NUMBER >> 40:,}TiB")
    return size


def format_size(size: int) -> str:
    """Return ``size`` in the largest unit that divides it, so that :func:`parse_size` returns the same number."""
    for unit in ("TiB", "TB", "GiB", "GB", "MiB", "MB", "KiB", "kB"):
        if size and size % _BYTES_BY_UNIT[unit.lower()] == 0:
            return f"{size // _BYTES_BY_UNIT[unit.lower()]}{unit}"
    return f"{size}B"


def parse_duration(text: str) -> float:
    """Return the seconds in ``90s``, ``5m``, ``1.5h`` or ``1h30m``. Raises ``ValueError``, also for a missing unit."""
    parts = re.findall(r"(\d+(?:\.\d+)?)([smhd])", text.strip().lower())
    if not parts or "".join(n + u for n, u in parts) != text.strip().lower():
        raise ValueError(f"{text!r} is not a duration with a unit; use for example 90s, 5m or 1h30m")
    seconds = float(sum(float(number) * _SECONDS_BY_UNIT[unit] for number, unit in parts))
    if not seconds:
        raise ValueError(f"{text!r} must be longer than 0 s")
    if seconds > MAX_SECONDS:
        raise ValueError(f"{text!r} is longer than 100 years; use at most {MAX_SECONDS // 86400}d")
    return seconds


def check_numbers(settings: Any) -> None:
    """Raise ``UserError`` for a number in the dataclass ``settings`` that is infinite, NaN, or 2^63 or more.

    C libraries do not accept such values.
    """
    for field in fields(settings):
        value = getattr(settings, field.name)
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, int | float) and not -MAX_NUMBER < number < MAX_NUMBER:
                raise UserError(f"--{field.name.replace('_', '-')} {number} must be a finite number below 2^63.")


def format_count(number: int, noun: str) -> str:
    """Return ``number`` with ``noun``, in the plural unless the number is 1: ``1 file``, ``2,000 files``."""
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{plural if number != 1 else ''}"


def format_duration(seconds: float) -> str:
    """Return ``seconds`` as text that :func:`parse_duration` accepts: ``42s``, ``5m``, ``1h30m``."""
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 59.95:
        return f"{seconds:g}s" if seconds == int(seconds) else f"{seconds:.1f}s"
    whole = round(seconds)
    hours, remainder = divmod(whole, 3600)
    minutes, whole_seconds = divmod(remainder, 60)
    parts = [(hours, "h"), (minutes, "m"), (whole_seconds, "s")]
    return "".join(f"{n}{unit}" for n, unit in parts if n)


def single_value_flag(
    metavar: str, kind: type | tuple[type, ...], parse: Callable[[str], Any], write: Callable[[Any], str]
) -> PrimitiveConstructorSpec[Any]:
    """Return tyro's rules for a flag whose value of ``kind`` is one argument.

    ``parse`` reads the value from the argument, and ``write`` formats the default for ``--help``.
    """

    def read(arguments: list[str]) -> Any:
        try:
            return parse(arguments[0])
        except UserError as mistake:
            raise ValueError(str(mistake)) from mistake  # tyro adds the flag to the message of a ValueError.

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=read,
        is_instance=lambda x: isinstance(x, kind),
        str_from_instance=lambda value: [write(value)],
    )


def optional_flag(spec: PrimitiveConstructorSpec[Any]) -> PrimitiveConstructorSpec[Any]:
    """Return ``spec`` for an optional flag; for a union with None, tyro's errors would show the parsers' internals."""
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=spec.metavar,
        instance_from_str=lambda args: None if args == ["None"] else spec.instance_from_str(args),
        is_instance=lambda x: x is None or bool(spec.is_instance(x)),
        str_from_instance=lambda value: ["None"] if value is None else spec.str_from_instance(value),
    )


_SIZE = single_value_flag("SIZE", int, parse_size, format_size)
_DURATION = single_value_flag("DURATION", (int, float), parse_duration, format_duration)

Bytes = Annotated[int, _SIZE]
"""A number of bytes, written with its unit on the command line."""

BytesOrNone = Annotated[int | None, optional_flag(_SIZE)]

Seconds = Annotated[float, _DURATION]
"""A number of seconds, written with its unit on the command line."""

SecondsOrNone = Annotated[float | None, optional_flag(_DURATION)]
