"""Ranking of candidates by confirmed speed, with ties. Among equally fast candidates, less memory wins.

All speeds come from runs in fresh processes. Confirmations are interleaved, so that a drift of the machine affects all
candidates equally.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from train.intervals import Difference, Estimate, Scatter, pool
from tune.space import Candidate
from tune.trial.row import TrialRow

CONTENDERS = 3
"""Maximum number of candidates in a confirmation round, besides the control."""
NEGLIGIBLE_LOSS = 0.005
"""Relative loss of speed that is accepted for less memory, if the difference is not significant."""
BEATEN_LOSS = 0.001
"""Expected relative loss below which a candidate counts as beaten without another run."""
NORMAL = statistics.NormalDist()
"""The standard normal distribution."""
Z95 = NORMAL.inv_cdf(0.975)
"""Half-width of a 95% interval of the standard normal distribution."""
DOES_NOT_FIT = ("over_limit", "oom", "thrash")
"""Outcomes of trials that did not fit the memory limit."""


@dataclass(frozen=True)
class Ranked:
    """A candidate in the ranking, with its pooled speed and memory."""

    candidate: Candidate
    """Candidate with this rank."""
    speed: Estimate
    """Speed in tokens/s, pooled by :func:`train.intervals.pool`."""
    memory: int
    """Peak memory in bytes."""
    runs: int
    """Number of runs on which the speed is based."""
    confirmed: bool
    """Whether the candidate ran in a confirmation round."""
    is_eligible: bool = False
    """Whether the candidate ran in every confirmation round, so that it can win."""
    tied: bool = False
    """Whether the difference from the fastest candidate is not significant."""

    def expected_loss_against(self, other: "Ranked") -> float:
        """Return the expected relative loss of speed from choosing this candidate although ``other`` may be faster.

        Both intervals are treated as 95% intervals of normal distributions of the logarithm.
        """
        lead = math.log(self.speed.middle / other.speed.middle)
        error = math.hypot(*(math.log(s.speed.high / s.speed.low) / 2 / Z95 for s in (self, other)))
        if not error:
            return max(0.0, -lead)
        z = lead / error
        return error * (NORMAL.pdf(z) - z * NORMAL.cdf(-z))


def eligible_rows(rows: Sequence[TrialRow]) -> dict[Candidate, list[TrialRow]]:
    """Return the rows with a speed by candidate, without candidates with a run that did not fit the memory limit."""
    unfit = {row.candidate for row in rows if row.outcome in DOES_NOT_FIT}
    eligible: dict[Candidate, list[TrialRow]] = {}
    for row in rows:
        if row.outcome == "ok" and row.speed and row.candidate not in unfit:
            eligible.setdefault(row.candidate, []).append(row)
    return eligible


def contenders(rows: Sequence[TrialRow], control: Candidate) -> list[Candidate]:
    """Return the candidates of the next confirmation round after ``rows``, fastest first; empty if the winner is clear.

    In the first round they are the best three of the exploration that are not clearly beaten. In later rounds they are
    the winner so far and the candidates whose expected lead over it is not negligible. The control also runs in every
    round if it fits, because the winner is compared with it.
    """
    ranked = rank(rows)
    has_confirmations = any(entry.confirmed for entry in ranked)
    eligible = [entry for entry in ranked if entry.is_eligible]
    if not eligible:
        return []
    winner = eligible[0]
    rivals = [
        entry
        for entry in eligible[1:]
        if winner.expected_loss_against(entry) > (NEGLIGIBLE_LOSS if has_confirmations else BEATEN_LOSS)
    ]
    if has_confirmations and not rivals:
        return []
    by_speed = sorted([winner, *rivals], key=lambda entry: -entry.speed.middle)
    candidates = [entry.candidate for entry in by_speed[:CONTENDERS]]
    if control not in candidates and any(entry.candidate == control for entry in eligible):
        candidates.append(control)
    return candidates if len(candidates) > 1 else []


def rank(rows: Sequence[TrialRow]) -> list[Ranked]:
    """Rank all candidates that fit and have a speed: the winner, then ties with it, then all others, by speed.

    The fastest of many single measurements is partly luck. Once candidates are confirmed, only those that ran in every
    round can win or tie, by their confirmed speeds.
    """
    runs_by_candidate = eligible_rows(rows)
    if not runs_by_candidate:
        return []
    scatter = Scatter.of([row.tokens_per_second for row in runs] for runs in runs_by_candidate.values())
    entries = [_pooled(runs, scatter) for runs in runs_by_candidate.values()]
    rounds = max(entry.runs if entry.confirmed else 0 for entry in entries)
    entries = [
        replace(entry, is_eligible=not rounds or (entry.confirmed and entry.runs == rounds)) for entry in entries
    ]
    eligible = [entry for entry in entries if entry.is_eligible]
    best = max(eligible, key=lambda entry: entry.speed.middle)
    tied = [entry for entry in eligible if not Difference.between(best.speed, entry.speed).is_significant]
    if len(tied) > 1:
        tied = [replace(entry, tied=True) for entry in tied]
    tied_candidates = {entry.candidate for entry in tied}
    beaten = [entry for entry in entries if entry.candidate not in tied_candidates]
    # Noise may hide a real difference between ties, so memory only decides where the possible loss of speed is small.
    equal = [entry for entry in tied if entry.speed.middle >= (1 - NEGLIGIBLE_LOSS) * best.speed.middle]
    winner = min(equal, key=lambda entry: (entry.memory, -entry.speed.middle))
    by_speed = sorted((entry for entry in tied if entry is not winner), key=lambda entry: -entry.speed.middle)
    beaten = sorted(beaten, key=lambda entry: (not entry.confirmed, not entry.is_eligible, -entry.speed.middle))
    return [winner, *by_speed, *beaten]


def candidate_speeds(rows: Sequence[TrialRow]) -> dict[Candidate, Estimate]:
    """Return the speed of each candidate that fits: as in the ranking or, if all its trials were pruned, of the last
    one."""
    pruned = {row.candidate: row.speed for row in rows if row.outcome == "pruned" and row.speed}
    return pruned | {entry.candidate: entry.speed for entry in rank(rows)}


def _pooled(runs: list[TrialRow], scatter: Scatter | None) -> Ranked:
    """Pool a candidate's runs: its confirmations, if there are any, because an exploration may have been lucky."""
    confirmations = [row for row in runs if row.stage == "confirm"]
    speeds = [row.speed for row in confirmations or runs if row.speed]
    memory = max(row.memory or 0 for row in runs)
    return Ranked(runs[0].candidate, pool(speeds, scatter), memory, len(speeds), bool(confirmations))
