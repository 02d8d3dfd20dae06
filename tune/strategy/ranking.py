"""Ranking of candidates by confirmed speed, with ties; among equally fast ones the one with the least memory wins.

All speeds come from runs in fresh processes. Confirmations are interleaved, so that a drift of the machine affects all
candidates equally.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from train.intervals import Estimate
from tune.space import Candidate
from tune.trial.row import TrialRow

CONTENDERS = 3
"""Maximum number of candidates in a confirmation round, besides the control."""
NEGLIGIBLE_LOSS = 0.005
"""Relative loss of speed that is accepted for less memory, if the difference is not significant."""
BEATEN_LOSS = 0.001
"""Expected relative loss below which a candidate counts as beaten without another run."""
NORMAL = statistics.NormalDist()
Z95 = NORMAL.inv_cdf(0.975)
DOES_NOT_FIT = ("over_limit", "oom", "thrash")
"""Outcomes of trials that did not fit the memory limit."""


@dataclass(frozen=True)
class Ranked:
    """A candidate in the ranking, with its pooled speed and memory."""

    candidate: Candidate
    speed: Estimate
    """Tokens per second."""
    memory: int
    """Peak memory in bytes."""
    runs: int
    confirmed: bool
    is_eligible: bool = False
    """Whether the candidate ran in every confirmation round, so that it can win."""
    tied: bool = False
    """Whether the interval overlaps the fastest candidate's, so that the difference is not significant."""

    def expected_loss_against(self, other: "Ranked") -> float:
        """Expected relative loss of speed of choosing this candidate, if ``other`` is the faster one.

        Both intervals count as 95% intervals of normal distributions of the logarithm.
        """
        lead = math.log(self.speed.middle / other.speed.middle)
        error = math.hypot(*(math.log(s.speed.high / s.speed.low) / 2 / Z95 for s in (self, other)))
        if not error:
            return max(0.0, -lead)
        z = lead / error
        return error * (NORMAL.pdf(z) - z * NORMAL.cdf(-z))


def eligible_rows(rows: Sequence[TrialRow]) -> dict[Candidate, list[TrialRow]]:
    """Rows with a speed by candidate, without candidates of which any run did not fit the memory limit."""
    unfit = {row.candidate for row in rows if row.outcome in DOES_NOT_FIT}
    eligible: dict[Candidate, list[TrialRow]] = {}
    for row in rows:
        if row.outcome == "ok" and row.speed and row.candidate not in unfit:
            eligible.setdefault(row.candidate, []).append(row)
    return eligible


def contenders(rows: Sequence[TrialRow], control: Candidate) -> list[Candidate]:
    """The candidates of the next confirmation round after ``rows``, fastest first; empty if the winner is clear.

    In the first round these are the best three of the exploration, without those that are clearly beaten. In later
    rounds they are the winner so far and the candidates whose expected lead over it is not negligible. The control runs
    in every round if it fits, because the search is compared with it.
    """
    ranked = rank(rows)
    has_confirmations = any(entry.confirmed for entry in ranked)
    final = [entry for entry in ranked if entry.is_eligible]
    if not final:
        return []
    winner, *others = final
    rivals = [
        entry
        for entry in others
        if winner.expected_loss_against(entry) > (NEGLIGIBLE_LOSS if has_confirmations else BEATEN_LOSS)
    ]
    if has_confirmations and not rivals:
        return []
    by_speed = sorted([winner, *rivals], key=lambda entry: -entry.speed.middle)
    candidates = [entry.candidate for entry in by_speed[:CONTENDERS]]
    if control not in candidates and any(entry.candidate == control for entry in final):
        candidates.append(control)
    return candidates if len(candidates) > 1 else []


def rank(rows: Sequence[TrialRow]) -> list[Ranked]:
    """All candidates that fit and have a speed: the winner, then those tied with it, then the others, by speed.

    The fastest of many single measurements is partly luck. Once candidates are confirmed, only those that ran in every
    round can win or tie, by their confirmed speeds.
    """
    entries = [_pooled(runs) for runs in eligible_rows(rows).values()]
    if not entries:
        return []
    rounds = max(entry.runs if entry.confirmed else 0 for entry in entries)
    entries = [
        replace(entry, is_eligible=not rounds or (entry.confirmed and entry.runs == rounds)) for entry in entries
    ]
    final = [entry for entry in entries if entry.is_eligible]
    best = max(final, key=lambda entry: entry.speed.middle)
    tied = [entry for entry in final if entry is best or entry.speed.high >= best.speed.low]
    if len(tied) > 1:
        tied = [replace(entry, tied=True) for entry in tied]
    tied_candidates = {entry.candidate for entry in tied}
    others = [entry for entry in entries if entry.candidate not in tied_candidates]
    # A tie may hide a real difference that noise conceals, so memory decides only where the loss would be small.
    equal = [entry for entry in tied if entry.speed.middle >= (1 - NEGLIGIBLE_LOSS) * best.speed.middle]
    winner = min(equal, key=lambda entry: (entry.memory, -entry.speed.middle))
    by_speed = sorted((entry for entry in tied if entry is not winner), key=lambda entry: -entry.speed.middle)
    others = sorted(others, key=lambda entry: (not entry.confirmed, not entry.is_eligible, -entry.speed.middle))
    return [winner, *by_speed, *others]


def _pooled(runs: list[TrialRow]) -> Ranked:
    """Pool a candidate's runs: their geometric mean, with an interval as wide as their intervals or their range."""
    confirmed = [row for row in runs if row.stage == "confirm"]
    used = confirmed or runs
    squares = sum(math.log(row.speed.high / row.speed.low) ** 2 for row in used if row.speed)
    half_width = math.sqrt(squares) / 2 / len(used)
    speeds = [row.tokens_per_second for row in used]
    factor = math.exp(max(half_width, math.log(max(speeds) / min(speeds)) / 2))
    middle = statistics.geometric_mean(speeds)
    speed = Estimate(middle, middle / factor, middle * factor)
    memory = max(row.memory or 0 for row in runs)
    return Ranked(runs[0].candidate, speed, memory, len(used), bool(confirmed))
