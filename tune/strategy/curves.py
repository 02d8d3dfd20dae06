"""Predictions for candidates that have not run: memory and speed as functions of the micro-batch, fitted to the rows.

Memory is nearly affine in the micro-batch for each combination of knobs, so two probes correct the prior. A token takes
a + b / micro-batch + c / global batch, because each micro-batch and each step also cost a fixed time, so speed
saturates. Between two probes this formula is accurate; beyond them it overestimates speed by a third, so it is never
extrapolated. All accumulations share both curves.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np

from train.estimate.memory import fit_to_probes
from tune.space import Candidate, KnobValues, Space, without_accumulation
from tune.strategy.ranking import DOES_NOT_FIT
from tune.trial.row import TrialRow, rows_with_speed

Prior = Callable[[Candidate], float]
"""Predicted peak memory of a candidate's process, in bytes."""

MARGIN = 0.02
"""Fraction of the limit that a prediction must leave free, because the allocator thrashes just below the limit."""
BACK_OFF_FACTOR = 0.8
"""Maximum next micro-batch as a fraction of one that did not fit, until two others have been measured."""


@dataclass(frozen=True)
class FittedCurves:
    """Memory and speed of all candidates, predicted by the ``prior`` and fitted to the ``rows``; the limit is in
    bytes."""

    space: Space
    prior: Prior
    limit: float
    rows: Sequence[TrialRow]

    def measured(self, knobs: KnobValues) -> list[TrialRow]:
        """Rows with a speed for these knobs with any accumulation, by ascending micro-batch."""
        return self._measured.get(without_accumulation(knobs), [])

    @cached_property
    def _measured(self) -> dict[KnobValues, list[TrialRow]]:
        rows_by_knobs: dict[KnobValues, list[TrialRow]] = {}
        for row in sorted(rows_with_speed(self.rows), key=lambda row: row.candidate.micro_batch):
            rows_by_knobs.setdefault(without_accumulation(row.candidate.knobs), []).append(row)
        return rows_by_knobs

    def memory(self, candidate: Candidate) -> float:
        """Predicted peak bytes of the candidate's process: the prior, corrected by the nearest runs."""
        probes = [(self.prior(row.candidate), float(row.memory or 0)) for row in self.measured(candidate.knobs)]
        if not probes:
            return self.prior(candidate) + self._offset
        return fit_to_probes(self.prior(candidate), probes)

    @cached_property
    def _offset(self) -> float:
        """Median error of the prior over all runs, the correction for combinations that have not run."""
        measured = [row for row in self.rows if row.memory and row.outcome in ("ok", "pruned")]
        return statistics.median((row.memory or 0) - self.prior(row.candidate) for row in measured) if measured else 0.0

    def max_micro_batch(self, knobs: KnobValues) -> float:
        """Largest micro-batch that may fit, considering those that did not; smaller ones are predicted."""
        ran = [row for row in self.rows if without_accumulation(row.candidate.knobs) == without_accumulation(knobs)]
        unfit = min((row.candidate.micro_batch for row in ran if row.outcome in DOES_NOT_FIT), default=math.inf)
        sizes = {row.candidate.micro_batch for row in self.measured(knobs)}
        return unfit - 1 if len(sizes) > 1 else BACK_OFF_FACTOR * unfit

    def fits(self, candidate: Candidate) -> bool:
        """Whether the candidate is predicted to stay within the limit."""
        if candidate.micro_batch > self.max_micro_batch(candidate.knobs):
            return False
        return self.memory(candidate) <= (1 - MARGIN) * self.limit

    def feasible_sizes(self, knobs: KnobValues) -> list[int]:
        """Micro-batches of a combination that stayed within the limit or are predicted to, ascending."""
        ran = {row.candidate.micro_batch for row in self.measured(knobs) if row.candidate.knobs == knobs}
        return [
            size for size in self.space.micro_batches_for(knobs) if size in ran or self.fits(Candidate(size, knobs))
        ]

    def fastest(self, knobs: KnobValues | None = None) -> TrialRow | None:
        """The fastest of the rows that :meth:`measured` returns for ``knobs``, or of all rows with a speed."""
        rows = chain(*self._measured.values()) if knobs is None else self.measured(knobs)
        return max(rows, key=lambda row: row.tokens_per_second, default=None)

    def speed(self, candidate: Candidate) -> float | None:
        """Predicted tokens per second; None if the runs with its knobs do not determine it or do not enclose its
        size."""
        rows = self.measured(candidate.knobs)
        sizes = {row.candidate.micro_batch for row in rows}
        if len(sizes) < 2 or not min(sizes) <= candidate.micro_batch <= max(sizes):
            return None
        features, *row_features = (
            (1, 1 / each.micro_batch, 1 / self.space.global_batch(each))
            for each in (candidate, *(row.candidate for row in rows))
        )
        seconds_per_token = [1 / row.tokens_per_second for row in rows]
        costs, _, rank, _ = np.linalg.lstsq(np.array(row_features), seconds_per_token)
        if self.space.is_accumulation_searched and np.linalg.matrix_rank([features, *row_features]) > rank:
            return None
        prediction = float(costs @ features)
        return 1 / prediction if prediction > 0 else None
