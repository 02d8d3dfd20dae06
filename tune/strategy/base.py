"""How the next trial is chosen. Plain Python: Ray Tune and the simulator drive the same objects.

A strategy is asked with all rows so far and answers with a proposal or with None, the end. It keeps no
state of its own, so a search that was killed continues by reading its rows.
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
    """Decides trials one at a time."""

    def propose(self, rows: Sequence[TrialRow]) -> Proposal | None:
        """The next trial after ``rows``, or None when there is nothing left to learn."""
        ...

    def remaining(self, rows: Sequence[TrialRow]) -> int:
        """About how many trials are still to come: for the time left, never for a decision."""
        ...


@dataclass(frozen=True)
class Grid:
    """Every candidate once, in order."""

    space: Space

    def propose(self, rows: Sequence[TrialRow]) -> Proposal | None:
        seen = {row.candidate for row in rows}
        return next((Proposal(c, "probe") for c in self.space.candidates() if c not in seen), None)

    def remaining(self, rows: Sequence[TrialRow]) -> int:
        return len(self.space.candidates()) - len({row.candidate for row in rows})


@dataclass(frozen=True)
class Retrying:
    """Repeat each trial whose time was too short for a speed once, with more time, before ``explore`` sees it.

    Otherwise a --trial-time below what a few steps take would end the search after its first trial.
    """

    explore: Strategy

    def propose(self, rows: Sequence[TrialRow]) -> Proposal | None:
        short = self._short(rows)
        return Proposal(short.candidate, short.stage, round=1) if short else self.explore.propose(_last_attempts(rows))

    def remaining(self, rows: Sequence[TrialRow]) -> int:
        return (self._short(rows) is not None) + self.explore.remaining(_last_attempts(rows))

    def _short(self, rows: Sequence[TrialRow]) -> TrialRow | None:
        return next((row for row in _last_attempts(rows) if row.too_short and row.round == 0), None)


def _last_attempts(rows: Sequence[TrialRow]) -> list[TrialRow]:
    """``rows`` without the trials that were repeated."""
    repeated = {(row.candidate, row.stage) for row in rows if row.round}
    return [row for row in rows if row.round or (row.candidate, row.stage) not in repeated]


def enough_seconds(rows: Sequence[TrialRow], trial_time: float) -> float:
    """Most seconds that the next trial's steps may take: ``trial_time``, or more where ``rows`` show it too short.

    Twice what the fewest steps that give a speed took in the trials that had too little time. All candidates of a
    fixed global batch do the same work in a step, so this holds for those that have not run, too; one with a larger
    global batch may have to be repeated in its turn.
    """
    steps = [statistics.median(row.step_seconds[1:] or row.step_seconds) for row in rows if row.too_short]
    return max([trial_time, *(2 * (FEWEST + 2) * step for step in steps)])


@dataclass(frozen=True)
class Confirmed:
    """Explore, then run the best and the control again, interleaved, until the winner is clear.

    There are at most ``rounds`` rounds.
    """

    explore: Strategy
    space: Space
    rounds: int

    def propose(self, rows: Sequence[TrialRow]) -> Proposal | None:
        explored = [row for row in rows if row.stage != "confirm"]
        proposal = self.explore.propose(explored)
        return proposal or next(iter(self._missing(rows)), None)

    def remaining(self, rows: Sequence[TrialRow]) -> int:
        explored = [row for row in rows if row.stage != "confirm"]
        left = self.explore.remaining(explored)
        if self.explore.propose(explored) is None:
            return len(self._missing(rows))
        return left + bool(self.rounds) * min(CONTENDERS + 1, left + len(rank(explored)))

    def _missing(self, rows: Sequence[TrialRow]) -> list[Proposal]:
        """Confirmations of the first unfinished round; even rounds go backwards, so that a steady drift cancels."""
        for number in range(1, self.rounds + 1):
            before = [row for row in rows if row.stage != "confirm" or row.round < number]
            chosen = contenders(before, self.space.control)
            done = {row.candidate for row in rows if row.stage == "confirm" and row.round == number}
            speeds = {s.candidate: s.speed.middle for s in rank(before)}
            missing = [
                Proposal(candidate, "confirm", number, predicted_speed=speeds[candidate])
                for candidate in (chosen if number % 2 else reversed(chosen))
                if candidate not in done
            ]
            if missing or not chosen:
                return missing
        return []
