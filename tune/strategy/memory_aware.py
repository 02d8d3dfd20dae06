"""The memory-aware strategy: predict memory, probe the largest and a small micro-batch, prune, and refine.

The order of trials is:

1. the control
2. the largest micro-batch that is predicted to fit with the control's knobs
3. the largest micro-batch of each neighbor of the best combination (one knob away), until no neighbor is faster: hill
   climbing, because most knobs help independently of each other
4. a small micro-batch of each combination that is within reach of the best
5. micro-batches near the fastest one of each of these combinations

A trial is pruned once it cannot reach its speed threshold. The accumulation, if it is searched, is one of the knobs.
All accumulations share a curve, so a small micro-batch of the fastest accumulation is enough.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from tune.space import Candidate, KnobValues, Space
from tune.strategy.curves import FittedCurves, Prior
from tune.strategy.ranking import eligible_rows
from tune.trial.row import Proposal, Stage, TrialRow

WITHIN_REACH_FRACTION = 0.03
"""Maximum fraction by which a candidate is predicted to be slower than the best for it to be tried.

Tile and wave quantization make speeds irregular, so that such a candidate may still be the fastest.
"""
REFINEMENTS = 3
"""Maximum number of micro-batches that are tried near a combination's fastest one, in addition to its two probes."""
MAX_CONTROL_LIMIT_MULTIPLE = 1.25
"""Multiple of the memory limit up to which the control runs although it is predicted to exceed the limit."""
TILE = 8
"""Size of tensor-core tiles in sequences; micro-batches that are multiples of it are tried first."""


@dataclass(frozen=True)
class MemorySearcher:
    """The memory-aware strategy."""

    space: Space
    """Space of the search."""
    prior: Prior
    """Prediction of memory before any trial."""
    limit: float
    """Memory limit of a process in bytes."""

    def curves(self, rows: Sequence[TrialRow]) -> FittedCurves:
        """Return the predictions of memory and speed, fitted to ``rows``."""
        return FittedCurves(self.space, self.prior, self.limit, rows)

    def propose(self, rows: Sequence[TrialRow]) -> Proposal | None:
        neighbors = self.space.neighbors(self.space.control.knobs)
        if len(rows) > len(neighbors) and all(row.outcome == "failed" for row in rows):
            return None  # If everything near the control fails, the cause is not in the candidates.
        curves = self.curves(rows)
        tried = {row.candidate for row in rows}
        choice = (
            self._control(tried)
            or self._largest_that_fits(curves)
            or self._small_probe(curves, tried)
            or self._refinement(curves, tried)
        )
        if choice is None:
            return None
        candidate, stage = choice
        lows = [row.speed.low for runs in eligible_rows(rows).values() for row in runs if row.speed]
        return Proposal(
            candidate, stage, predicted_memory=curves.memory(candidate), predicted_speed=curves.speed(candidate),
            speed_threshold=max(lows) if lows and candidate != self.space.control else None,
        )  # fmt: skip

    def remaining(self, rows: Sequence[TrialRow]) -> int:
        curves = self.curves(rows)
        tried = {row.candidate for row in rows}
        best = curves.fastest()
        center = best.candidate if best else self.space.control
        neighbors = [k for k in self.space.neighbors(center.knobs) if not self._is_probed(curves, k)]
        combinations = [
            k for k in self.space.combinations if self._is_within_reach(curves, k) and self._is_probed(curves, k)
        ]
        refinements = sum(self._refinements_left(curves, k) for k in combinations or [self.space.control.knobs])
        expected_count = len(neighbors) + refinements + (0 if tried else 3)
        untried = (c for c in self.space.candidates() if c not in tried and curves.fits(c))
        # All knobs together have forty thousand candidates, so counting stops at the expected number.
        count = len(list(islice(untried, expected_count)))
        return max(count, bool(self._control(tried)))

    def skip_reason(self, curves: FittedCurves, candidate: Candidate) -> str:
        """Return the reason why ``candidate`` was not tried, for the report."""
        if candidate.micro_batch > curves.max_micro_batch(candidate.knobs):
            return "a smaller micro-batch did not fit"
        if not curves.fits(candidate):
            return "predicted not to fit"
        if curves.rows and curves.fastest() is None:
            return "the search ended because no trial had a speed"
        if not self._is_probed(curves, candidate.knobs):
            return "none of its neighbors (one knob away) was ever the fastest"
        if not curves.measured_rows(candidate.knobs):
            return "another micro-batch with the same knobs failed"
        if not self._is_within_reach(curves, candidate.knobs):
            return f"with these knobs, more than {WITHIN_REACH_FRACTION:.0%} slower than the fastest"
        speed = curves.speed(candidate)
        if speed is not None and speed < self._speed_threshold(curves):
            return f"predicted to be more than {WITHIN_REACH_FRACTION:.0%} slower than the fastest"
        if speed is None:
            return "smaller than the micro-batches that could win"
        return "enough micro-batches near it were tried"

    def _control(self, tried: set[Candidate]) -> tuple[Candidate, Stage] | None:
        control = self.space.control
        if tried or self.prior(control) > MAX_CONTROL_LIMIT_MULTIPLE * self.limit:
            return None
        return control, "probe"

    def _largest_that_fits(self, curves: FittedCurves) -> tuple[Candidate, Stage] | None:
        """Return the largest micro-batch that fits, with the knobs of the control or of a neighbor of the best
        combination."""
        best = curves.fastest()
        neighbors = self.space.combinations if best is None else self.space.neighbors(best.candidate.knobs)
        for knobs in (self.space.control.knobs, *neighbors):
            sizes = curves.feasible_sizes(knobs)
            if sizes and not self._is_probed(curves, knobs):
                return Candidate(sizes[-1], knobs), "probe"
        return None

    def _small_probe(self, curves: FittedCurves, tried: set[Candidate]) -> tuple[Candidate, Stage] | None:
        """Return a micro-batch of about a quarter of the largest, for the fit; smaller ones while the smallest is
        fastest."""
        for knobs in self.space.combinations:
            best = curves.fastest(knobs)
            if best is None or best.candidate.knobs != knobs or not self._is_within_reach(curves, knobs):
                continue
            sizes = [row.candidate.micro_batch for row in curves.measured_rows(knobs) if row.candidate.knobs == knobs]
            smallest, largest, fastest = sizes[0], sizes[-1], best.candidate.micro_batch
            options = [
                s for s in self.space.micro_batches_for(knobs) if s < smallest and Candidate(s, knobs) not in tried
            ]
            if options and (3 * smallest > largest or fastest == smallest):
                goal = min(largest, 2 * smallest) / 4 if fastest == smallest and smallest < largest else largest / 4
                return Candidate(min(options, key=lambda size: abs(size - goal)), knobs), "probe"
        return None

    def _refinement(self, curves: FittedCurves, tried: set[Candidate]) -> tuple[Candidate, Stage] | None:
        """Return the most promising untried micro-batch between two probes: multiples of a tile first, then the
        fastest."""
        threshold, options = self._speed_threshold(curves), []
        for knobs in self.space.combinations:
            if self._refinements_left(curves, knobs) <= 0:
                continue
            for size in curves.feasible_sizes(knobs):
                candidate = Candidate(size, knobs)
                speed = curves.speed(candidate)
                if candidate not in tried and speed is not None and speed >= threshold:
                    options.append((size % TILE == 0, speed, candidate))
        return (max(options, key=lambda option: option[:2])[2], "refine") if options else None

    def _is_probed(self, curves: FittedCurves, knobs: KnobValues) -> bool:
        """Return whether the largest micro-batch that fits has run, a micro-batch has failed, or no micro-batch
        fits."""
        sizes = curves.feasible_sizes(knobs)
        rows = [row for row in curves.rows if row.candidate.knobs == knobs]
        has_failed = any(row.outcome == "failed" for row in rows)
        return has_failed or not sizes or sizes[-1] in {row.candidate.micro_batch for row in rows}

    def _is_within_reach(self, curves: FittedCurves, knobs: KnobValues) -> bool:
        """Return whether the fastest row with these knobs is within reach of the best row."""
        fastest = curves.fastest(knobs)
        return fastest is not None and _speed(fastest) >= self._speed_threshold(curves)

    def _speed_threshold(self, curves: FittedCurves) -> float:
        """Return the minimum speed that is within reach of the best row, in tokens/s."""
        return (1 - WITHIN_REACH_FRACTION) * _speed(curves.fastest())

    def _refinements_left(self, curves: FittedCurves, knobs: KnobValues) -> int:
        """Return the number of further refinements of the combination, which has only one if another accumulation is
        faster."""
        best = curves.fastest(knobs)
        maximum = REFINEMENTS if best is None or best.candidate.knobs == knobs else 1
        return maximum - sum(row.candidate.knobs == knobs and row.stage == "refine" for row in curves.rows)


def _speed(row: TrialRow | None) -> float:
    return row.tokens_per_second if row else 0.0
