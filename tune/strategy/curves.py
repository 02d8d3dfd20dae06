"""What the rows say of candidates that have not run: memory and speed as functions of the micro-batch.

In: rows, and a prior for memory. Out: for any candidate its expected memory, whether that fits, and its
expected speed. Memory is nearly affine in the micro-batch for each combination of knobs, so two real
probes correct the prior. A step takes a + b / micro-batch (each micro-batch costs a fixed time besides
its tokens), so speed saturates; between two probes the form holds well, beyond them it overshoots by a
third, hence nothing is ever extrapolated upwards.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from train.estimate.memory import correct
from tune.space import Candidate, Combination, Space
from tune.strategy.ranking import UNFIT
from tune.trial.row import TrialRow, feasible

Prior = Callable[[Candidate], float]
"""Predicted peak memory of a candidate's process, in bytes."""

MARGIN = 0.02
"""Share of the limit that a prediction must leave free: just below the limit the allocator thrashes."""
BACK_OFF = 0.8
"""After a size that did not fit, the next is at most this fraction of it, whatever the prediction says."""


@dataclass(frozen=True)
class Curves:
    """Memory and speed over the space, from ``prior`` and ``rows``; the limit in bytes."""

    space: Space
    prior: Prior
    limit: float
    rows: Sequence[TrialRow]

    def measured(self, knobs: Combination) -> list[TrialRow]:
        """Rows of a combination that ran within the limit and have a speed, by size."""
        return self._measured.get(knobs, [])

    @cached_property
    def _measured(self) -> dict[Combination, list[TrialRow]]:
        found: dict[Combination, list[TrialRow]] = {}
        for row in sorted(feasible(self.rows), key=lambda row: row.candidate.micro_batch):
            found.setdefault(row.candidate.knobs, []).append(row)
        return found

    def memory(self, candidate: Candidate) -> float:
        """Expected peak of the candidate's process, in bytes: the prior, corrected by the runs nearest to it."""
        probes = [(self.prior(row.candidate), float(row.memory or 0)) for row in self.measured(candidate.knobs)]
        if not probes:
            return self.prior(candidate) + self._offset
        return correct(self.prior(candidate), probes)

    @cached_property
    def _offset(self) -> float:
        """How far runs of any combination were from the prior: what is known of those that have not run."""
        known = [row for row in self.rows if row.memory and row.outcome in ("ok", "stopped")]
        return statistics.median((row.memory or 0) - self.prior(row.candidate) for row in known) if known else 0.0

    def ceiling(self, knobs: Combination) -> float:
        """Sizes above this are too large, by what did not fit."""
        unfit = [r.candidate.micro_batch for r in self.rows if r.candidate.knobs == knobs and r.outcome in UNFIT]
        return BACK_OFF * min(unfit) if unfit else float("inf")

    def fits(self, candidate: Candidate) -> bool:
        """Whether the candidate is expected to run within the limit."""
        if candidate.micro_batch > self.ceiling(candidate.knobs):
            return False
        return self.memory(candidate) <= (1 - MARGIN) * self.limit

    def feasible_sizes(self, knobs: Combination) -> list[int]:
        """Sizes of a combination that ran within the limit or are expected to, ascending."""
        ran = {row.candidate.micro_batch for row in self.measured(knobs)}
        return [size for size in self.space.sizes_of(knobs) if size in ran or self.fits(Candidate(size, knobs))]

    def speed(self, candidate: Candidate) -> float | None:
        """Expected tokens per second; None before two sizes of the combination have run, and outside of them."""
        rows = self.measured(candidate.knobs)
        points = [(1 / row.candidate.micro_batch, 1 / (row.tokens_per_second or 1)) for row in rows]
        x = 1 / candidate.micro_batch
        places = [place for place, _ in points]
        if len(set(places)) < 2 or not min(places) <= x <= max(places):
            return None
        slope, intercept = statistics.linear_regression(places, [seconds for _, seconds in points])
        expected = intercept + slope * x
        return 1 / expected if expected > 0 else None
