"""Strategies, which choose the next trial. They do not import Ray, so that a simulator can use the same objects.

A strategy gets the rows of all finished trials, and returns a proposal, or None at the end. It has no state, so a
search that was killed is resumed from its rows.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tune.config import MIN_MEASURED_STEPS
from tune.space import Space
from tune.strategy.ranking import CONTENDERS, contenders, rank
from tune.trial.row import Proposal, TrialRow


class Strategy(Protocol):
    """Chooses trials one at a time."""

    def propose(self, rows: Sequence[TrialRow]) -> Proposal | None:
        """Choose the next trial after ``rows``; None if the search is complete."""
        ...

    def remaining(self, rows: Sequence[TrialRow]) -> int:
        """Estimate the number of further trials, only for the remaining time."""
        ...


@dataclass(frozen=True)
class GridStrategy:
    """Tries every candidate once, in order."""

    space: Space

    def propose(self, rows: Sequence[TrialRow]) -> Proposal | None:
        tried_candidates = {row.candidate for row in rows}
        return next((Proposal(c, "probe") for c in self.space.candidates() if c not in tried_candidates), None)

    def remaining(self, rows: Sequence[TrialRow]) -> int:
        return len(self.space.candidates()) - len({row.candidate for row in rows})


@dataclass(frozen=True)
class RetryShortTrials:
    """Retries a trial once, with more time, if its time was too short to measure a speed.

    The ``explorer`` only gets the row of the retry. Without retries, a --trial-time that is shorter than a few steps
    would end the search after its first trial.
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
    """Return ``rows`` without the first attempts of trials that were retried."""
    retries = {(row.candidate, row.stage) for row in rows if row.round}
    return [row for row in rows if row.round or (row.candidate, row.stage) not in retries]


def trial_time_limit(rows: Sequence[TrialRow], trial_time: float) -> float:
    """Compute the time limit of the next trial's steps in seconds: ``trial_time``, or more if it was too short before.

    The limit is then twice the time of the minimum number of steps in the trials that ended too early. All candidates
    of a fixed global batch do the same work in a step, so the limit is also valid for candidates that have not run. A
    candidate with a larger global batch may still need a retry.
    """
    step_times = [statistics.median(row.step_seconds[1:] or row.step_seconds) for row in rows if row.ended_too_early]
    return max([trial_time, *(2 * (MIN_MEASURED_STEPS + 2) * seconds for seconds in step_times)])


@dataclass(frozen=True)
class ConfirmBest:
    """Explores, then runs the best candidates and the control again, interleaved, until the winner is clear.

    The number of confirmation rounds is at most ``rounds``.
    """

    explorer: Strategy
    space: Space
    rounds: int

    def propose(self, rows: Sequence[TrialRow]) -> Proposal | None:
        explored = [row for row in rows if row.stage != "confirm"]
        proposal = self.explorer.propose(explored)
        return proposal or next(iter(self._pending_confirmations(rows)), None)

    def remaining(self, rows: Sequence[TrialRow]) -> int:
        explored = [row for row in rows if row.stage != "confirm"]
        if self.explorer.propose(explored) is None:
            return len(self._pending_confirmations(rows))
        count = self.explorer.remaining(explored)
        return count + bool(self.rounds) * min(CONTENDERS + 1, count + len(rank(explored)))

    def _pending_confirmations(self, rows: Sequence[TrialRow]) -> list[Proposal]:
        """Return the trials that the first unfinished round still needs. Even rounds are reversed to cancel a steady
        drift."""
        for number in range(1, self.rounds + 1):
            previous_rows = [row for row in rows if row.stage != "confirm" or row.round < number]
            candidates = contenders(previous_rows, self.space.control)
            confirmed = {row.candidate for row in rows if row.stage == "confirm" and row.round == number}
            speeds = {ranked.candidate: ranked.speed.middle for ranked in rank(previous_rows)}
            proposals = [
                Proposal(candidate, "confirm", number, predicted_speed=speeds[candidate])
                for candidate in (candidates if number % 2 else reversed(candidates))
                if candidate not in confirmed
            ]
            if proposals or not candidates:
                return proposals
        return []
