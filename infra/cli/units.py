"""Sizes and durations as people write them: ``40GB`` is 40 x 10^9 bytes, ``40GiB`` 40 x 2^30, ``5m`` 300 seconds.

There are two kinds of gigabytes, so a flag always names the unit.
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
"""Memory and storage are shown in it throughout, as limits and data sheets name them (torch prints GiB, 2^30)."""

_SIZES = {
    "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}

MAX_NUMBER = 2**63
"""All settings are below it."""

MAX_SECONDS = 36_500 * 86_400
"""The longest duration of a setting; a wait takes no more than three times as long."""


def parse_size(text: str) -> int:
    """Bytes in ``40GB``, ``512MiB`` or ``1000B``. Raises ``ValueError`` for a bare number, whose unit is a guess."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]+)\s*", text)
    if not match or match[2].lower() not in _SIZES:
        raise ValueError(f"{text!r} is not a size; write for example 40GB (10^9) or 40GiB (2^30)")
    size = int(Fraction(match[1]) * _SIZES[match[2].lower()])
    if not size:
        raise ValueError(f"{text!r} is less than one byte; give more than 0")
    if size >= MAX_NUMBER:
        raise ValueError(f"{text!r} is more than any machine has; give less than {MAX_NUMBER >> 40:,}TiB")
    return size


def format_size(size: int) -> str:
    """``size`` in the largest unit that divides it, so that :func:`parse_size` returns the same number."""
    for unit in ("TiB", "TB", "GiB", "GB", "MiB", "MB", "KiB", "kB"):
        if size and size % _SIZES[unit.lower()] == 0:
            return f"{size // _SIZES[unit.lower()]}{unit}"
    return f"{size}B"


def parse_duration(text: str) -> float:
    """Seconds in ``90s``, ``5m``, ``1.5h``, ``1h30m``. Raises ``ValueError`` for a bare number."""
    parts = re.findall(r"(\d+(?:\.\d+)?)([smhd])", text.strip().lower())
    if not parts or "".join(n + u for n, u in parts) != text.strip().lower():
        raise ValueError(f"{text!r} is not a duration; write for example 90s, 5m or 1h30m")
    seconds = float(sum(float(number) * _SECONDS[unit] for number, unit in parts))
    if not seconds:
        raise ValueError(f"{text!r} is zero; give more than 0")
    if seconds > MAX_SECONDS:
        raise ValueError(f"{text!r} is longer than 100 years; give at most {MAX_SECONDS // 86400}d")
    return seconds


def check_numbers(settings: Any) -> None:
    """Raise ``UserError`` for a number in the dataclass ``settings`` that is infinite, not a number, or 2^63 or more.

    Nothing that counts or measures has such values, and C libraries do not take them.
    """
    for field in fields(settings):
        value = getattr(settings, field.name)
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, int | float) and not -MAX_NUMBER < number < MAX_NUMBER:
                raise UserError(f"--{field.name.replace('_', '-')} {number} must be a finite number below 2^63.")


def format_count(number: int, noun: str) -> str:
    """``number`` with ``noun``, which gets an s unless the number is 1: ``1 file``, ``2,000 files``."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def format_duration(seconds: float) -> str:
    """``seconds`` for a person and for :func:`parse_duration`: ``42s``, ``5m``, ``1h30m``."""
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 59.95:
        return f"{seconds:g}s" if seconds == int(seconds) else f"{seconds:.1f}s"
    whole = round(seconds)
    hours, remainder = divmod(whole, 3600)
    minutes, left = divmod(remainder, 60)
    parts = [(hours, "h"), (minutes, "m"), (left, "s")]
    return "".join(f"{n}{unit}" for n, unit in parts if n)


def single_value_flag(
    metavar: str, kind: type | tuple[type, ...], parse: Callable[[str], Any], write: Callable[[Any], str]
) -> PrimitiveConstructorSpec[Any]:
    """How a flag's value of ``kind`` is read from one word of the command line, and shown as its default in --help."""

    def read(words: list[str]) -> Any:
        try:
            return parse(words[0])
        except UserError as mistake:
            raise ValueError(str(mistake)) from mistake  # to which tyro adds the flag, where the sentence has none

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=read,
        is_instance=lambda x: isinstance(x, kind),
        str_from_instance=lambda value: [write(value)],
    )


def optional_flag(spec: PrimitiveConstructorSpec[Any]) -> PrimitiveConstructorSpec[Any]:
    """``spec`` for a flag that may be left out; with a union, tyro's error would show the parsers' internals."""
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
