"""Normalization of speeds from several machines: each machine's speeds are relative to its own control.

Machines of the same type differ by some percent (cooling, clocks, other users), more than the differences that a search
measures. So each additional machine first runs the first trial again, as its ``control``; the ratio of both speeds
scales all speeds of the machine.
"""

from collections.abc import Sequence
from dataclasses import replace

from train.intervals import Estimate, power_product
from tune.trial.row import Proposal, TrialRow


def reference_row(rows: Sequence[TrialRow]) -> TrialRow | None:
    """The row that the other machines' controls repeat: the first row with a speed, usually the search's control."""
    return min((row for row in rows if row.speed), key=lambda row: row.number, default=None)


def control_speeds(rows: Sequence[TrialRow]) -> dict[str, Estimate]:
    """Speed of the control by machine, the reference machine first."""
    first = reference_row(rows)
    speeds = {first.node: first.speed} if first and first.speed else {}
    for row in rows:
        if row.stage == "control" and row.speed:
            speeds.setdefault(row.node, row.speed)
    return speeds


def slowdown_factor(node: str, rows: Sequence[TrialRow]) -> float:
    """The reference machine's speed relative to the speed of ``node``; 1 if it is unknown."""
    speeds = control_speeds(rows)
    return next(iter(speeds.values())).middle / speeds[node].middle if node in speeds else 1.0


def pending_control(node: str, rows: Sequence[TrialRow]) -> Proposal | None:
    """The control that the machine ``node`` must run before its first trial; None if it needs none."""
    first = reference_row(rows)
    if first is None or node in control_speeds(rows):
        return None
    return Proposal(first.candidate, "control", node=node)


def normalize_speeds(rows: Sequence[TrialRow]) -> list[TrialRow]:
    """``rows`` with all speeds scaled to the reference machine, without the other machines' controls."""
    speeds = control_speeds(rows)
    first = next(iter(speeds.values()), None)
    scaled = []
    for row in rows:
        control = speeds.get(row.node)
        if first and control and control is not first:
            predicted = row.predicted_speed and row.predicted_speed * first.middle / control.middle
            scaled_row = replace(row, predicted_speed=predicted)
            if row.speed:
                scaled_row = scaled_row.with_speed(power_product([(row.speed, 1.0), (first, 1.0), (control, -1.0)]))
            scaled.append(scaled_row)
        else:
            scaled.append(row)
    return [row for row in scaled if row.stage != "control"]
