"""Rows of several machines made comparable: each machine's speeds over those of its own control.

Machines that are called equal differ by some percent (cooling, clocks, neighbours), more than what a search tells
apart, so one more machine first runs what the first one ran: its ``control``. What differs between the two scales all
its speeds.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tune.trial.row import Proposal, TrialRow


@dataclass(frozen=True)
class Scale:
    """How speeds of one machine become those of the first."""

    factor: float = 1.0
    error: float = 0.0
    """Half-width of the factor's 95% interval, as a logarithm."""


def first_row(rows: Sequence[TrialRow]) -> TrialRow | None:
    """The row that the other machines' controls repeat: the first with a speed, usually the control itself."""
    return min((row for row in rows if row.tokens_per_second), key=lambda row: row.number, default=None)


def scales(rows: Sequence[TrialRow]) -> dict[str, Scale]:
    """The scale of each machine that has run its control."""
    first = first_row(rows)
    if first is None:
        return {}
    found = {first.node: Scale()}
    for row in rows:
        if row.stage == "control" and row.tokens_per_second and first.tokens_per_second:
            error = math.hypot(_half_width(row), _half_width(first))
            found.setdefault(row.node, Scale(first.tokens_per_second / row.tokens_per_second, error))
    return found


def control_of(node: str, rows: Sequence[TrialRow]) -> Proposal | None:
    """The control that the machine ``node`` has to run before anything else there, if it has to run one."""
    first = first_row(rows)
    if first is None or node in scales(rows):
        return None
    return Proposal(first.candidate, "control", node=node)


def scaled_to_first_node(rows: Sequence[TrialRow]) -> list[TrialRow]:
    """``rows`` with all speeds as on the machine of the first one, without the other machines' controls."""
    known = scales(rows)
    return [_scaled(row, known.get(row.node, Scale())) for row in rows if row.stage != "control"]


def _scaled(row: TrialRow, scale: Scale) -> TrialRow:
    if scale.factor == 1.0 and not scale.error:
        return row
    speed, width = row.tokens_per_second, math.hypot(_half_width(row), scale.error)
    return replace(
        row,
        predicted_speed=row.predicted_speed and row.predicted_speed * scale.factor,
        tokens_per_second=speed and speed * scale.factor,
        low=speed and row.low and speed * scale.factor / math.exp(width),
        high=speed and row.high and speed * scale.factor * math.exp(width),
    )


def _half_width(row: TrialRow) -> float:
    """Half the width of the 95% interval of a row's speed, as a logarithm."""
    return math.log(row.high / row.low) / 2 if row.low and row.high else 0.0
