"""What the rows say of candidates that have not run: memory and speed as functions of the micro-batch.

Memory is nearly affine in the micro-batch for each combination of knobs, so two real probes correct the prior. A token
takes a + b / micro-batch + c / global batch (each micro-batch costs a fixed time besides its tokens, and so does each
step), so speed saturates; between two probes the form holds well, beyond them it overshoots by a third, hence no size
is ever extrapolated. All accumulations share both curves.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np

from train.estimate.memory import correct
from tune.space import Candidate, Combination, Space, settings
from tune.strategy.ranking import UNFIT
from tune.trial.row import TrialRow, feasible

Prior = Callable[[Candidate], float]
"""Predicted peak memory of a candidate's process, in bytes."""

MARGIN = 0.02
"""Share of the limit that a prediction must leave free: just below the limit the allocator thrashes."""
BACK_OFF = 0.8
"""After a size that did not fit, the next is at most this fraction of it, unless two others have been measured."""


@dataclass(frozen=True)
class Curves:
    """Memory and speed over the space, from ``prior`` and ``rows``; the limit in bytes."""

    space: Space
    prior: Prior
    limit: float
    rows: Sequence[TrialRow]

    def measured(self, knobs: Combination) -> list[TrialRow]:
        """Rows of these settings, at any accumulation, that ran within the limit and have a speed, by size."""
        return self._measured.get(settings(knobs), [])

    @cached_property
    def _measured(self) -> dict[Combination, list[TrialRow]]:
        found: dict[Combination, list[TrialRow]] = {}
        for row in sorted(feasible(self.rows), key=lambda row: row.candidate.micro_batch):
            found.setdefault(settings(row.candidate.knobs), []).append(row)
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
        """Sizes above this are too large, by what did not fit; any below it may fit once two sizes show the line."""
        ran = [row for row in self.rows if settings(row.candidate.knobs) == settings(knobs)]
        unfit = min((row.candidate.micro_batch for row in ran if row.outcome in UNFIT), default=math.inf)
        sizes = {row.candidate.micro_batch for row in self.measured(knobs)}
        return unfit - 1 if len(sizes) > 1 else BACK_OFF * unfit

    def fits(self, candidate: Candidate) -> bool:
        """Whether the candidate is expected to run within the limit."""
        if candidate.micro_batch > self.ceiling(candidate.knobs):
            return False
        return self.memory(candidate) <= (1 - MARGIN) * self.limit

    def feasible_sizes(self, knobs: Combination) -> list[int]:
        """Sizes of a combination that ran within the limit or are expected to, ascending."""
        ran = {row.candidate.micro_batch for row in self.measured(knobs) if row.candidate.knobs == knobs}
        return [size for size in self.space.sizes_of(knobs) if size in ran or self.fits(Candidate(size, knobs))]

    def fastest(self, knobs: Combination | None = None) -> TrialRow | None:
        """The fastest of the rows that :meth:`measured` gives for ``knobs``, or of all."""
        rows = chain(*self._measured.values()) if knobs is None else self.measured(knobs)
        return max(rows, key=lambda row: row.tokens_per_second or 0.0, default=None)

    def speed(self, candidate: Candidate) -> float | None:
        """Expected tokens per second; None before runs of its settings determine it, and outside of their sizes."""
        rows = self.measured(candidate.knobs)
        sizes = {row.candidate.micro_batch for row in rows}
        if len(sizes) < 2 or not min(sizes) <= candidate.micro_batch <= max(sizes):
            return None
        asked, *ran = (
            (1, 1 / each.micro_batch, 1 / self.space.global_batch(each))
            for each in (candidate, *(row.candidate for row in rows))
        )
        costs, _, rank, _ = np.linalg.lstsq(np.array(ran), [1 / (row.tokens_per_second or 1) for row in rows])
        if self.space.free and np.linalg.matrix_rank([asked, *ran]) > rank:
            return None
        expected = float(costs @ asked)
        return 1 / expected if expected > 0 else None
