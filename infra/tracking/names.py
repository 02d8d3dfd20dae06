"""Names of metrics and params, chosen so that a run's page in MLflow begins with the most important ones.

Each kind of run has at most :data:`MAX_TOP_LEVEL_METRICS` metrics at the top level. All others are under ``detail/``,
which MLflow shows as a collapsible section of charts. Settings that differ from their default are params
``changed.NAME``.
"""

from collections.abc import Collection, Mapping
from typing import Any, TypeVar

MAX_TOP_LEVEL_METRICS = 12
"""Maximum number of metrics of a run outside ``detail/`` and ``system/``."""

Value = TypeVar("Value")


def group_under_detail(values: Mapping[str, Value], top_level: Collection[str]) -> dict[str, Value]:
    """Return ``values`` by metric: first the names in ``top_level``, in that order, then all others under ``detail/``.

    MLflow's page lists metrics in the order in which a run first logs them.
    """
    ordered = {name: values[name] for name in top_level if name in values}
    return ordered | {f"detail/{name}": value for name, value in values.items() if name not in top_level}


def non_default_params(settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return params ``changed.NAME`` or, if nested, ``changed.PART.NAME`` of settings that are not the default."""
    values, default_values = _flatten(settings), _flatten(defaults)
    return {
        f"changed.{name}": value
        for name, value in values.items()
        if name not in default_values or default_values[name] != value
    }


def _flatten(settings: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= {f"{name}.{part}": v for part, v in value.items()} if isinstance(value, Mapping) else {name: value}
    return flat
