"""The memory-aware search: predict, probe both ends, prune, refine near the top. Plain Python, no Ray.

The order is: the control; the largest size that should fit with the control's knobs; the same with each setting that
differs from the best combination in one knob, until no neighbour is better (hill climbing: knobs mostly help one by
one); a small size of every combination that is still within reach of the best; then the sizes near the top of those.
Each trial carries the bar below which it stops. Where the accumulation is searched it is one more knob, but all
accumulations share a curve: a small size of the fastest is enough.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from tune.space import Candidate, Combination, Space
from tune.strategy.curves import Curves, Prior
from tune.strategy.ranking import fit_to_win
from tune.trial.row import Proposal, Stage, TrialRow

REACH = 0.03
"""How far behind the best a size or a combination may be expected and still be tried: dips of tiles and waves."""
REFINEMENTS = 3
"""Sizes tried near the top of a combination, in addition to its two ends."""
HOPELESS = 1.25
"""The control is not run when it is predicted to need more than this many limits."""
TILE = 8
"""Multiples of this fill tensor-core tiles, so they are refined first."""


@dataclass(frozen=True)
class MemorySearcher:
    """A strategy over ``space``, with a prior for memory and a limit, both in bytes."""

    space: Space
    prior: Prior
    limit: float

    def curves(self, rows: Sequence[TrialRow]) -> Curves:
        """What ``rows`` say of the rest of the space."""
        return Curves(self.space, self.prior, self.limit, rows)

    def propose(self, rows: Sequence[TrialRow]) -> Proposal | None:
        near = self.space.neighbours(self.space.control.knobs)
        if len(rows) > len(near) and all(row.outcome == "failed" for row in rows):
            return None  # what fails everywhere near the control is not the candidates' fault
        curves = self.curves(rows)
        seen = {row.candidate for row in rows}
        chosen = self._control(seen) or self._top(curves) or self._bottom(curves, seen) or self._refine(curves, seen)
        if chosen is None:
            return None
        candidate, stage = chosen
        lows = [row.low for runs in fit_to_win(rows).values() for row in runs if row.low]
        return Proposal(
            candidate, stage, predicted_memory=curves.memory(candidate), predicted_speed=curves.speed(candidate),
            bar=max(lows) if lows and candidate != self.space.control else None,
        )  # fmt: skip

    def remaining(self, rows: Sequence[TrialRow]) -> int:
        curves = self.curves(rows)
        seen = {row.candidate for row in rows}
        best = curves.fastest()
        middle = best.candidate if best else self.space.control
        neighbours = [k for k in self.space.neighbours(middle.knobs) if not self._probed(curves, k)]
        live = [k for k in self.space.combinations if self._live(curves, k) and self._probed(curves, k)]
        left = sum(self._refinements(curves, k) for k in live or [self.space.control.knobs])
        expected = len(neighbours) + left + (0 if seen else 3)
        untried = (c for c in self.space.candidates() if c not in seen and curves.fits(c))
        there = len(list(islice(untried, expected)))  # no more are counted: all knobs make 40,000 candidates
        return max(there, bool(self._control(seen)))

    def why_not(self, curves: Curves, candidate: Candidate) -> str:
        """Why ``candidate`` was never run, in words, by what ``curves`` say of it."""
        if candidate.micro_batch > curves.ceiling(candidate.knobs):
            return "a smaller one did not fit"
        if not curves.fits(candidate):
            return "predicted not to fit"
        if curves.rows and curves.fastest() is None:
            return "the search ended, because no trial had a speed"
        if not self._probed(curves, candidate.knobs):
            return "no combination one knob away was the best"
        if not curves.measured(candidate.knobs):
            return "another size of its combination failed"
        if not self._live(curves, candidate.knobs):
            return f"its combination is more than {REACH:.0%} behind the best"
        speed = curves.speed(candidate)
        if speed is not None and speed < self._bar(curves):
            return f"predicted more than {REACH:.0%} behind the best"
        return "below the sizes that could win" if speed is None else "enough sizes near it were tried"

    def _control(self, seen: set[Candidate]) -> tuple[Candidate, Stage] | None:
        control = self.space.control
        if seen or self.prior(control) > HOPELESS * self.limit:
            return None
        return control, "probe"

    def _top(self, curves: Curves) -> tuple[Candidate, Stage] | None:
        """The largest size that fits, of the control's knobs and then of the best combination's neighbours."""
        best = curves.fastest()
        others = self.space.combinations if best is None else self.space.neighbours(best.candidate.knobs)
        for knobs in (self.space.control.knobs, *others):
            sizes = curves.feasible_sizes(knobs)
            if sizes and not self._probed(curves, knobs):
                return Candidate(sizes[-1], knobs), "probe"
        return None

    def _bottom(self, curves: Curves, seen: set[Candidate]) -> tuple[Candidate, Stage] | None:
        """A size about a quarter of the largest, for the fit; further down while the smallest is the fastest."""
        for knobs in self.space.combinations:
            best = curves.fastest(knobs)
            if best is None or best.candidate.knobs != knobs or not self._live(curves, knobs):
                continue
            sizes = [row.candidate.micro_batch for row in curves.measured(knobs) if row.candidate.knobs == knobs]
            smallest, largest, fastest = sizes[0], sizes[-1], best.candidate.micro_batch
            below = [s for s in self.space.sizes_of(knobs) if s < smallest and Candidate(s, knobs) not in seen]
            if below and (3 * smallest > largest or fastest == smallest):
                goal = min(largest, 2 * smallest) / 4 if fastest == smallest and smallest < largest else largest / 4
                return Candidate(min(below, key=lambda size: abs(size - goal)), knobs), "probe"
        return None

    def _refine(self, curves: Curves, seen: set[Candidate]) -> tuple[Candidate, Stage] | None:
        """The most promising untried size between the ends of a combination: whole tiles first, then by speed."""
        bar, options = self._bar(curves), []
        for knobs in self.space.combinations:
            if self._refinements(curves, knobs) <= 0:
                continue
            for size in curves.feasible_sizes(knobs):
                candidate = Candidate(size, knobs)
                speed = curves.speed(candidate)
                if candidate not in seen and speed is not None and speed >= bar:
                    options.append((size % TILE == 0, speed, candidate))
        return (max(options, key=lambda option: option[:2])[2], "refine") if options else None

    def _probed(self, curves: Curves, knobs: Combination) -> bool:
        """Whether the largest size that fits has run, or nothing fits."""
        sizes = curves.feasible_sizes(knobs)
        ran = {row.candidate.micro_batch for row in curves.rows if row.candidate.knobs == knobs}
        failed = any(row.candidate.knobs == knobs and row.outcome == "failed" for row in curves.rows)
        return failed or not sizes or sizes[-1] in ran

    def _live(self, curves: Curves, knobs: Combination) -> bool:
        """Whether the combination has come within reach of the best."""
        own = curves.fastest(knobs)
        return own is not None and _speed(own) >= self._bar(curves)

    def _bar(self, curves: Curves) -> float:
        """The speed that is within reach of the best."""
        return (1 - REACH) * _speed(curves.fastest())

    def _refinements(self, curves: Curves, knobs: Combination) -> int:
        """How many more sizes of the combination may be refined: one where another accumulation is faster."""
        best = curves.fastest(knobs)
        most = REFINEMENTS if best is None or best.candidate.knobs == knobs else 1
        return most - sum(row.candidate.knobs == knobs and row.stage == "refine" for row in curves.rows)


def _speed(row: TrialRow | None) -> float:
    return (row and row.tokens_per_second) or 0.0
