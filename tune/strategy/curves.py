"""Predictions of memory and speed for candidates that have not run: functions of the micro-batch, fitted to the rows.

Memory is nearly affine in the micro-batch for each combination of knobs, so two probes correct the prior. The time per
token is a + b / micro-batch + c / global batch, because each micro-batch and each step also take a fixed time. Between
two probes this formula is accurate; outside them it overestimates speed by a third, so it is never extrapolated. All
accumulations share both curves.
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
"""Function that predicts the peak memory of a candidate's process in bytes before any trial."""

MARGIN = 0.02
"""Fraction of the limit that a prediction must leave free, because the allocator thrashes just below the limit."""
BACK_OFF_FACTOR = 0.8
"""Maximum next micro-batch as a fraction of one that did not fit, until two micro-batches have been measured."""


@dataclass(frozen=True)
class FittedCurves:
    """Predictions of memory and speed for all candidates of ``space``, fitted to ``rows``."""

    space: Space
    """Space of the search."""
    prior: Prior
    """Prediction of memory before any trial."""
    limit: float
    """Memory limit of a process in bytes."""
    rows: Sequence[TrialRow]
    """Rows of the trials to which the predictions are fitted."""

    def measured_rows(self, knobs: KnobValues) -> list[TrialRow]:
        """Return the rows with a speed for these knobs with any accumulation, by ascending micro-batch."""
        return self._rows_by_knobs.get(without_accumulation(knobs), [])

    @cached_property
    def _rows_by_knobs(self) -> dict[KnobValues, list[TrialRow]]:
        rows_by_knobs: dict[KnobValues, list[TrialRow]] = {}
        for row in sorted(rows_with_speed(self.rows), key=lambda row: row.candidate.micro_batch):
            rows_by_knobs.setdefault(without_accumulation(row.candidate.knobs), []).append(row)
        return rows_by_knobs

    def memory(self, candidate: Candidate) -> float:
        """Predict the peak memory of the candidate's process in bytes: the prior, corrected by measurements."""
        probes = [(self.prior(row.candidate), float(row.memory or 0)) for row in self.measured_rows(candidate.knobs)]
        if not probes:
            return self.prior(candidate) + self._offset
        return fit_to_probes(self.prior(candidate), probes)

    @cached_property
    def _offset(self) -> float:
        """Median error of the prior over all trials in bytes, the correction for combinations that have not run."""
        rows = [row for row in self.rows if row.memory and row.outcome in ("ok", "pruned")]
        return statistics.median((row.memory or 0) - self.prior(row.candidate) for row in rows) if rows else 0.0

    def max_micro_batch(self, knobs: KnobValues) -> float:
        """Return the upper bound of micro-batches that may fit, from the trials that did not fit; infinite if all
        trials fit."""
        rows = [row for row in self.rows if without_accumulation(row.candidate.knobs) == without_accumulation(knobs)]
        unfit = min((row.candidate.micro_batch for row in rows if row.outcome in DOES_NOT_FIT), default=math.inf)
        sizes = {row.candidate.micro_batch for row in self.measured_rows(knobs)}
        return unfit - 1 if len(sizes) > 1 else BACK_OFF_FACTOR * unfit

    def fits(self, candidate: Candidate) -> bool:
        """Return whether the candidate is predicted to stay within the limit."""
        if candidate.micro_batch > self.max_micro_batch(candidate.knobs):
            return False
        return self.memory(candidate) <= (1 - MARGIN) * self.limit

    def feasible_sizes(self, knobs: KnobValues) -> list[int]:
        """Return the micro-batches of a combination that fit or are predicted to fit, in ascending order."""
        measured_sizes = {
            row.candidate.micro_batch for row in self.measured_rows(knobs) if row.candidate.knobs == knobs
        }
        return [
            size
            for size in self.space.micro_batches_for(knobs)
            if size in measured_sizes or self.fits(Candidate(size, knobs))
        ]

    def fastest(self, knobs: KnobValues | None = None) -> TrialRow | None:
        """Return the fastest row for ``knobs`` with any accumulation, or of all rows if ``knobs`` is None."""
        rows = chain(*self._rows_by_knobs.values()) if knobs is None else self.measured_rows(knobs)
        return max(rows, key=lambda row: row.tokens_per_second, default=None)

    def speed(self, candidate: Candidate) -> float | None:
        """Predict the speed in tokens/s; None if the rows with its knobs do not determine it.

        The rows must include a smaller and a larger micro-batch, or the same one.
        """
        rows = self.measured_rows(candidate.knobs)
        sizes = {row.candidate.micro_batch for row in rows}
        if len(sizes) < 2 or not min(sizes) <= candidate.micro_batch <= max(sizes):
            return None
        features, *row_features = (
            (1, 1 / point.micro_batch, 1 / self.space.global_batch(point))
            for point in (candidate, *(row.candidate for row in rows))
        )
        seconds_per_token = [1 / row.tokens_per_second for row in rows]
        costs, _, rank, _ = np.linalg.lstsq(np.array(row_features), seconds_per_token)
        if self.space.is_accumulation_searched and np.linalg.matrix_rank([features, *row_features]) > rank:
            return None
        prediction = float(costs @ features)
        return 1 / prediction if prediction > 0 else None
