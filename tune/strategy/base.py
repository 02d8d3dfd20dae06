"""Strategies, which choose the next trial. They do not import Ray, so that a simulator can use the same objects.

A strategy gets all rows so far and returns a proposal, or None at the end. It has no state of its own, so a search that
was killed is resumed from its rows.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tune.config import FEWEST
from tune.space import Space
from tune.strategy.ranking import CONTENDERS, contenders, rank
from tune.trial.row import Proposal, TrialRow


class Strategy(Protocol):
    """Chooses trials one at a time."""

    def propose(self, rows: Sequence[TrialRow]) -> Proposal | None:
        """The next trial after ``rows``, or None if no trial is left."""
        ...

    def remaining(self, rows: Sequence[TrialRow]) -> int:
        """The approximate number of trials that are left, to estimate the remaining time only."""
        ...


@dataclass(frozen=True)
class GridStrategy:
    """Tries every candidate once, in order."""

    space: Space

    def propose(self, rows: Sequence[TrialRow]) -> Proposal | None:
        tried = {row.candidate for row in rows}
        return next((Proposal(c, "probe") for c in self.space.candidates() if c not in tried), None)

    def remaining(self, rows: Sequence[TrialRow]) -> int:
        return len(self.space.candidates()) - len({row.candidate for row in rows})


@dataclass(frozen=True)
class RetryShortTrials:
    """Retries each trial once, with more time, if its time was too short for a speed; ``explorer`` sees only the retry.

    Otherwise a --trial-time that is shorter than a few steps would end the search after its first trial.
    """

    explorer: Strategy

    def propose(self, rows: Sequence[TrialRow]) -> Proposal | None:
        short = self._short(rows)
        return Proposal(short.candidate, short.stage, round=1) if short else self.explorer.propose(_last_attempts(rows))

    def remaining(self, rows: Sequence[TrialRow]) -> int:
        return (self._short(rows) is not None) + self.explorer.remaining(_last_attempts(rows))

    def _short(self, rows: Sequence[TrialRow]) -> TrialRow | None:
        return next((row for row in _last_attempts(rows) if row.ended_too_early and row.round == 0), None)


def _last_attempts(rows: Sequence[TrialRow]) -> list[TrialRow]:
    """``rows`` without the trials that were retried."""
    repeated = {(row.candidate, row.stage) for row in rows if row.round}
    return [row for row in rows if row.round or (row.candidate, row.stage) not in repeated]


def trial_time_limit(rows: Sequence[TrialRow], trial_time: float) -> float:
    """Time limit of the next trial's steps in seconds: ``trial_time``, or more if ``rows`` show that it is too short.

    It is twice the time that the minimum number of steps took in the trials with too little time. All candidates of a
    fixed global batch do the same work in a step, so the limit holds for candidates that have not run, too. A candidate
    with a larger global batch may have to be retried, too.
    """
    steps = [statistics.median(row.step_seconds[1:] or row.step_seconds) for row in rows if row.ended_too_early]
    return max([trial_time, *(2 * (FEWEST + 2) * step for step in steps)])


@dataclass(frozen=True)
class ConfirmBest:
    """Explores, then runs the best candidates and the control again, interleaved, until the winner is clear.

    There are at most ``rounds`` confirmation rounds.
    """

    explorer: Strategy
    space: Space
    rounds: int

    def propose(self, rows: Sequence[TrialRow]) -> Proposal | None:
        explored = [row for row in rows if row.stage != "confirm"]
        proposal = self.explorer.propose(explored)
        return proposal or next(iter(self._missing(rows)), None)

    def remaining(self, rows: Sequence[TrialRow]) -> int:
        explored = [row for row in rows if row.stage != "confirm"]
        left = self.explorer.remaining(explored)
        if self.explorer.propose(explored) is None:
            return len(self._missing(rows))
        return left + bool(self.rounds) * min(CONTENDERS + 1, left + len(rank(explored)))

    def _missing(self, rows: Sequence[TrialRow]) -> list[Proposal]:
        """Confirmations that the first unfinished round still needs. Even rounds are reversed to cancel a steady
        drift."""
        for number in range(1, self.rounds + 1):
            previous_rows = [row for row in rows if row.stage != "confirm" or row.round < number]
            candidates = contenders(previous_rows, self.space.control)
            confirmed = {row.candidate for row in rows if row.stage == "confirm" and row.round == number}
            speeds = {ranked.candidate: ranked.speed.middle for ranked in rank(previous_rows)}
            missing = [
                Proposal(candidate, "confirm", number, predicted_speed=speeds[candidate])
                for candidate in (candidates if number % 2 else reversed(candidates))
                if candidate not in confirmed
            ]
            if missing or not candidates:
                return missing
        return []
