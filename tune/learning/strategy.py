"""What a search for the lowest loss tries next, from the rows so far.

1. The control learns first. Its gradient noise scale shows the global batch near which the search begins.
2. Candidates near the best one learn for an eighth of the final run's time, until none near the best is left: hill
   climbing, because the loss changes smoothly with numbers. Each optimizer, and each combination of other settings that
   are not numbers, has a climb of its own, because its best learning rate and batch may be far from those of the best
   one. Ray Tune's ASHA stops the slower learners.
3. The best ones and the control, the finalists, learn on up to half of the time.
4. The best finalists and the control learn with several seeds, in turn.

A trial that measures the speed precedes the first candidate of each speed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from train.intervals import Estimate
from tune.learning.results import LearningResults, learning_results
from tune.learning.space import LearningSpace
from tune.space import Candidate, KnobValues
from tune.trial.row import Proposal, TrialRow

FIRST_FRACTION = 1 / 16
"""Fraction of the final run's time at the first rung. Each rung is twice as long as the one before."""
EXPLORED_FRACTION = 1 / 8
"""Fraction of the final run's time at the last rung of the exploration."""
LAST_FRACTION = 1 / 2
"""Fraction of the final run's time at the last rung of the finals."""
FINALISTS = 3
"""Maximum number of candidates of the exploration, besides the control, that continue to the last rung."""
REPEATED_FINALISTS = 2
"""Maximum number of them that are repeated: the best one, and another one that may be as good."""
SEEDS = 3
"""Number of seeds of the repeated finalists and of the control."""
EXPLORED_SEARCH_FRACTION = 0.5
"""Fraction of --search-time after which no further candidate is explored, so that the finalists have the rest."""


@dataclass(frozen=True)
class LearningStrategy:
    """The strategy of a search for the lowest loss."""

    space: LearningSpace
    """Candidates of the search."""
    train_time: float
    """Time of the final run in seconds."""
    target_loss: float | None = None
    """Loss to reach soonest; None for the lowest loss after ``train_time``."""
    search_time: float | None = None
    """Time of the search in seconds; None if it has no limit."""
    known_speeds: Mapping[KnobValues, Estimate] = field(default_factory=dict)
    """Speeds in tokens/s that an earlier search measured, by the knobs on which the speed depends."""

    def propose(self, rows: Sequence[TrialRow]) -> Proposal | None:
        """Choose the next trial after ``rows``, which include running trials; None if the search is complete."""
        candidate = self._next_to_explore(rows)
        if candidate is None:
            return next(iter(self.pending_finals(rows)), None)
        if self.speed(candidate, rows) is None:  # A trial that was too short for a speed is repeated with more time.
            return Proposal(candidate, "speed", round=len(self._speed_rows(candidate, rows)))
        return Proposal(candidate, "learn")

    def speed(self, candidate: Candidate, rows: Sequence[TrialRow]) -> Estimate | None:
        """Return the speed of ``candidate``, which trials of candidates with the same speed measure."""
        if known := self.known_speeds.get(self.space.speed_key(candidate)):
            return known
        return next((row.speed for row in self._speed_rows(candidate, rows) if row.speed), None)

    def _speed_rows(self, candidate: Candidate, rows: Sequence[TrialRow]) -> list[TrialRow]:
        key = self.space.speed_key(candidate)
        return [row for row in rows if row.stage == "speed" and self.space.speed_key(row.candidate) == key]

    def _has_no_speed(self, candidate: Candidate, rows: Sequence[TrialRow]) -> bool:
        """Return whether ``candidate`` and those of the same speed cannot be trained."""
        measured = self._speed_rows(candidate, rows)
        is_short = bool(measured) and measured[-1].ended_too_early and measured[-1].round == 0
        return bool(measured) and not is_short and self.speed(candidate, rows) is None

    def rung_seconds(self, stage: str, seed: int = 0) -> list[float]:
        """Return the times of the rungs of a trial in this stage, in seconds of the final run."""
        first = LAST_FRACTION / 4 if stage == "final" and seed else FIRST_FRACTION
        last = EXPLORED_FRACTION if stage == "learn" else LAST_FRACTION
        count = round(math.log2(last / first)) + 1
        return [self.train_time * first * 2**number for number in range(count)]

    def _next_to_explore(self, rows: Sequence[TrialRow]) -> Candidate | None:
        if any(row.stage == "final" for row in rows) or self._is_exploration_over(rows):
            return None
        explored = {row.candidate for row in rows if row.stage == "learn"}
        control = self.space.control
        if control not in explored and not self._has_no_speed(control, rows):
            return control
        at_noise_scale = [self._at_noise_scale(rows)] if len(explored) == 1 else []
        for candidate in [*at_noise_scale, *self._nearby(rows)]:
            if candidate and candidate not in explored and not self._has_no_speed(candidate, rows):
                return candidate
        return None

    def _nearby(self, rows: Sequence[TrialRow]) -> list[Candidate]:
        """Return the candidates near the best one of each climb, and the first ones of other climbs."""
        choices, best = self.space.choices, dict[KnobValues, Candidate]()
        for result in self.results(rows).candidates:
            if not result.is_failed:
                best.setdefault(choices(result.candidate), result.candidate)
        return [
            candidate
            for center in list(best.values()) or [self.space.control]
            for candidate in self.space.neighbors(center)
            if choices(candidate) == choices(center) or choices(candidate) not in best
        ]

    def _is_exploration_over(self, rows: Sequence[TrialRow]) -> bool:
        seconds = sum(row.seconds for row in rows)
        return self.search_time is not None and seconds > EXPLORED_SEARCH_FRACTION * self.search_time

    def _at_noise_scale(self, rows: Sequence[TrialRow]) -> Candidate | None:
        """Return the candidate that has the global batch nearest to the gradient noise scale of the control."""
        scale = next((row.noise_scale for row in rows if row.noise_scale), None)
        if scale is None:
            return None
        others = _without_batch(self.space.control)
        similar = [candidate for candidate in self.space.candidates if _without_batch(candidate) == others]
        return min(similar, key=lambda c: abs(math.log(self.space.config(c).batch.global_batch / scale.middle)))

    def finalists(self, rows: Sequence[TrialRow]) -> list[Candidate]:
        """Return the best candidates of the exploration and the control, which train up to the last rung."""
        results = self._results([row for row in rows if row.stage != "final"])
        best = [result for result in results.candidates if not result.is_failed][:FINALISTS]
        return self._with_control([result.candidate for result in best], results)

    def repeated_finalists(self, rows: Sequence[TrialRow]) -> list[Candidate]:
        """Return the best finalist of the first seed, others that may be as good, and the control."""
        results = self._results([row for row in rows if row.stage != "final" or row.round == 0])
        best, others = results.finalists[:1], results.finalists[1:]
        best += [result for result in others if results.is_tied(result)][: REPEATED_FINALISTS - 1]
        return self._with_control([result.candidate for result in best], results)

    def _with_control(self, candidates: list[Candidate], results: LearningResults) -> list[Candidate]:
        has_learned = results.control is not None and not results.control.is_failed
        return [*candidates, *[self.space.control] * (has_learned and self.space.control not in candidates)]

    def results(self, rows: Sequence[TrialRow]) -> LearningResults:
        """Collect what ``rows`` show so far, with the best candidate first.

        The trials with another seed than the first count once all repeated finalists have one.
        """
        finals = [row for row in rows if row.stage == "final" and row.round]
        repeated = set(self.repeated_finalists(rows)) if finals else set[Candidate]()
        failed = {row.candidate for row in finals if row.outcome != "ok"}
        unfinished = {
            seed
            for seed in {row.round for row in finals}
            if repeated - failed - {row.candidate for row in finals if row.round == seed}
        }
        return self._results([row for row in rows if row.stage != "final" or row.round not in unfinished])

    def _results(self, rows: Sequence[TrialRow]) -> LearningResults:
        return learning_results(
            rows, self.space.control, lambda candidate: self.speed(candidate, rows), self.train_time, self.target_loss
        )

    def best(self, rows: Sequence[TrialRow]) -> Candidate | None:
        """Return the best candidate so far; None before any has learned."""
        winner = self.results(rows).winner
        return winner and winner.candidate

    def pending_finals(self, rows: Sequence[TrialRow]) -> list[Proposal]:
        """Return the trials that the finals still need: a round per seed, of which every second one is reversed.

        The first round decides which candidates the others have.
        """
        rounds = [(0, self.finalists(rows))]
        done = {(row.candidate, row.round) for row in rows if row.stage == "final"}
        if all((candidate, 0) in done for candidate in rounds[0][1]):
            repeated = self.repeated_finalists(rows)
            rounds += [(seed, repeated[::-1] if seed % 2 else repeated) for seed in range(1, SEEDS)]
        failed = {row.candidate for row in rows if row.stage == "final" and row.outcome != "ok"}
        return [
            Proposal(candidate, "final", seed)
            for seed, candidates in rounds
            for candidate in candidates
            if (candidate, seed) not in done and candidate not in failed
        ]

    def remaining_finals(self, rows: Sequence[TrialRow]) -> list[int]:
        """Estimate the seeds of the trials that the finals still need."""
        pending = [proposal.round for proposal in self.pending_finals(rows)]
        planned = final_seeds(len(self.space.candidates))
        return [*pending, *filter(None, planned)] if 0 in pending else pending or planned

    def remaining(self, rows: Sequence[TrialRow]) -> int:
        """Estimate the number of further trials."""
        count = len(self.remaining_finals(rows))
        if self._next_to_explore(rows) is not None:
            explored = {row.candidate for row in rows if row.stage == "learn"}
            count += len(set(self._nearby(rows)) - explored)
        return count


def final_seeds(candidates: int) -> list[int]:
    """Return the seeds of the finals of a search with this number of ``candidates``, at most."""
    first, repeated = (min(count + 1, candidates) for count in (FINALISTS, REPEATED_FINALISTS))
    return [0] * first + [seed for seed in range(1, SEEDS) for _ in range(repeated)]


def _without_batch(candidate: Candidate) -> KnobValues:
    return tuple(knob for knob in candidate.knobs if knob[0] != "global_batch")
