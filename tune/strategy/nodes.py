"""Normalization of speeds from several machines: each machine's speeds are relative to its control.

Machines of the same type differ by some percent (cooling, clocks, other users), which is more than a search measures.
So each additional machine first repeats the first trial as its ``control``. The ratio of both speeds scales all speeds
of the machine.
"""

from collections.abc import Sequence
from dataclasses import replace

from train.intervals import Estimate, power_product
from tune.trial.row import Proposal, TrialRow


def reference_row(rows: Sequence[TrialRow]) -> TrialRow | None:
    """Return the row that the controls of other machines repeat: the first row with a speed, usually the search's
    control."""
    return min((row for row in rows if row.speed), key=lambda row: row.number, default=None)


def control_speeds(rows: Sequence[TrialRow]) -> dict[str, Estimate]:
    """Return the speed of the control by machine, with the reference machine first."""
    reference = reference_row(rows)
    speeds = {reference.node: reference.speed} if reference and reference.speed else {}
    for row in rows:
        if row.stage == "control" and row.speed:
            speeds.setdefault(row.node, row.speed)
    return speeds


def slowdown_factor(node: str, rows: Sequence[TrialRow]) -> float:
    """Return the ratio of the reference machine's speed to the speed of the machine ``node``; 1 if it is unknown."""
    speeds = control_speeds(rows)
    return next(iter(speeds.values())).middle / speeds[node].middle if node in speeds else 1.0


def pending_control(node: str, rows: Sequence[TrialRow]) -> Proposal | None:
    """Return the control that the machine ``node`` must run before its first trial; None if it needs none."""
    reference = reference_row(rows)
    if reference is None or node in control_speeds(rows):
        return None
    return Proposal(reference.candidate, "control", node=node)


def normalize_speeds(rows: Sequence[TrialRow]) -> list[TrialRow]:
    """Return ``rows`` with all speeds scaled to the reference machine, without the controls of other machines."""
    speeds = control_speeds(rows)
    reference = next(iter(speeds.values()), None)
    scaled_rows = []
    for row in rows:
        control = speeds.get(row.node)
        if reference and control and control is not reference:
            predicted_speed = row.predicted_speed and row.predicted_speed * reference.middle / control.middle
            scaled_row = replace(row, predicted_speed=predicted_speed)
            if row.speed:
                scaled_row = scaled_row.with_speed(power_product([(row.speed, 1.0), (reference, 1.0), (control, -1.0)]))
            scaled_rows.append(scaled_row)
        else:
            scaled_rows.append(row)
    return [row for row in scaled_rows if row.stage != "control"]
