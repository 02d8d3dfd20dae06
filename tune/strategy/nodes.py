"""Rows of several machines made comparable: each machine's speeds over those of its own control.

Machines that are called equal differ by some percent (cooling, clocks, neighbours), more than what a search tells
apart, so one more machine first runs what the first one ran: its ``control``. What differs between the two scales all
its speeds.
"""

from collections.abc import Sequence
from dataclasses import replace

from train.intervals import Estimate, power_product
from tune.trial.row import Proposal, TrialRow


def first_row(rows: Sequence[TrialRow]) -> TrialRow | None:
    """The row that the other machines' controls repeat: the first with a speed, usually the control itself."""
    return min((row for row in rows if row.speed), key=lambda row: row.number, default=None)


def control_speeds(rows: Sequence[TrialRow]) -> dict[str, Estimate]:
    """Speed of the first row by its machine, and then of the control by each machine that has run it."""
    first = first_row(rows)
    found = {first.node: first.speed} if first and first.speed else {}
    for row in rows:
        if row.stage == "control" and row.speed:
            found.setdefault(row.node, row.speed)
    return found


def times_slower(node: str, rows: Sequence[TrialRow]) -> float:
    """The first machine's speed over that of ``node``, as far as it is known."""
    known = control_speeds(rows)
    return next(iter(known.values())).middle / known[node].middle if node in known else 1.0


def control_of(node: str, rows: Sequence[TrialRow]) -> Proposal | None:
    """The control that the machine ``node`` has to run before anything else there, if it has to run one."""
    first = first_row(rows)
    if first is None or node in control_speeds(rows):
        return None
    return Proposal(first.candidate, "control", node=node)


def scaled_to_first_node(rows: Sequence[TrialRow]) -> list[TrialRow]:
    """``rows`` with all speeds as on the machine of the first one, without the other machines' controls."""
    known = control_speeds(rows)
    first = next(iter(known.values()), None)
    scaled = []
    for row in rows:
        own = known.get(row.node)
        if first and own and own is not first:
            ratio = [(first, 1.0), (own, -1.0)]
            speed = row.speed and power_product([(row.speed, 1.0), *ratio])
            predicted = row.predicted_speed and row.predicted_speed * first.middle / own.middle
            middle, low, high = speed or (None, None, None)
            scaled.append(replace(row, predicted_speed=predicted, tokens_per_second=middle, low=low, high=high))
        else:
            scaled.append(row)
    return [row for row in scaled if row.stage != "control"]
