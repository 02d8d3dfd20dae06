"""How metrics and params are named, so that a run's page in MLflow begins with the few that people look for.

The metrics of a kind of run that it names itself, at most :data:`MAX_TOP_LEVEL_METRICS`, come first; all others go
under ``detail/``, which MLflow shows as a section of charts that can be folded. Settings that differ from their default
are params ``changed.NAME``.
"""

from collections.abc import Collection, Mapping
from typing import Any, TypeVar

MAX_TOP_LEVEL_METRICS = 12
"""Metrics of a run outside ``detail/`` and ``system/``."""

Value = TypeVar("Value")


def group_under_detail(values: Mapping[str, Value], first: Collection[str]) -> dict[str, Value]:
    """``values``: those among the ``first``, in that order, then the others under ``detail/``.

    MLflow's page lists metrics in the order in which a run has begun to log them.
    """
    named = {name: values[name] for name in first if name in values}
    return named | {f"detail/{name}": value for name, value in values.items() if name not in first}


def non_default_params(settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Params ``changed.NAME`` of ``settings`` that are not the default; ``changed.PART.NAME`` of nested ones."""
    now, usual = _flat(settings), _flat(defaults)
    return {f"changed.{name}": value for name, value in now.items() if name not in usual or usual[name] != value}


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= {f"{name}.{part}": v for part, v in value.items()} if isinstance(value, Mapping) else {name: value}
    return flat
