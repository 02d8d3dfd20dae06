"""What the rows of a search for the lowest loss show: each candidate's losses and times, and which one wins.

A candidate's losses are measured at rungs, whose time is that of the final run at the speed that was measured. An error
of the speed therefore scales the time: it widens the intervals of losses after a time, and of times to a loss.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations

import numpy as np

from train.intervals import Estimate, Scatter, power_product
from tune.learning.law import MAX_RATIO, Curves, LearningLaw, first_time, loss_difference, paired_ratios, seed_scatter
from tune.space import Candidate
from tune.trial.row import TrialRow

LEARNED = ("ok", "pruned")
"""Outcomes of learning trials that have losses which can be compared."""

LOSS_STEPS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Distances between the round losses to which times are shown, in nats."""
MAX_ROUND_LOSSES = 7
"""Maximum number of round losses."""


@dataclass(frozen=True)
class CandidateResult:
    """What the trials of one candidate show."""

    candidate: Candidate
    """The candidate."""
    curves: Curves
    """Losses at its rungs by seed, at least one."""
    speed: Estimate
    """Measured speed of its final run in tokens/s."""
    scatter: Scatter | None = None
    """Scatter of losses between seeds, of all candidates; None without repeated seeds."""
    is_failed: bool = False
    """Whether one of its trials failed, so that it cannot win."""
    has_learned: bool = True
    """Whether it has learned more than the frequencies of tokens at a rung. If so, its curves begin there."""
    is_stopped: bool = False
    """Whether its trial was stopped, because its loss at a rung was above the median."""

    @cached_property
    def law(self) -> LearningLaw:
        """The law of its losses over the time of the final run, at exactly the measured speed."""
        return LearningLaw(self.curves, self.scatter)

    @property
    def longest_rung(self) -> float:
        """Time of its longest rung in seconds of the final run."""
        return max(curve[-1][0] for curve in self.curves.values())

    @property
    def longest_losses(self) -> list[float]:
        """Losses at its longest rung, of each seed that reached it."""
        return [curve[-1][1] for curve in self.curves.values() if curve[-1][0] == self.longest_rung]

    @property
    def longest_loss(self) -> float:
        """Mean loss at its longest rung."""
        return statistics.fmean(self.longest_losses)

    @cached_property
    def mean_curve(self) -> list[tuple[float, float]]:
        """Times of its rungs, and the mean loss of the seeds at each."""
        losses: dict[float, list[float]] = {}
        for seconds, loss in sorted(point for curve in self.curves.values() for point in curve):
            losses.setdefault(seconds, []).append(loss)
        return [(seconds, statistics.fmean(values)) for seconds, values in losses.items()]

    def loss(self, seconds: float) -> Estimate | None:
        """Return the loss to expect of a final run of this time, with its interval; None if it is unknown.

        Between rungs it is interpolated. Beyond the longest rung it follows the law, which needs two rungs.
        """
        estimate = self._loss_at_measured_speed(seconds)
        return estimate and _widened(estimate, *self.speed_errors(seconds))

    def seconds(self, loss: float) -> Estimate | None:
        """Return the time in which a final run reaches ``loss``, with its interval; None if it does not.

        It is the quotient of the tokens to this loss and of the speed, both with their intervals. An upper end that is
        not reached is infinite.
        """
        if self._loss_at_measured_speed(MAX_RATIO * self.longest_rung) is None:
            return None
        low, middle, high = sorted(self._first_time(loss, end) for end in range(3))
        if math.isinf(low):
            return None
        fastest, slowest = self.speed.middle / self.speed.high, self.speed.middle / self.speed.low
        if math.isinf(middle):
            return Estimate(math.inf, low * fastest, math.inf)
        return power_product([(Estimate(middle, low, high), 1), (Estimate(1.0, fastest, slowest), 1)])

    def _first_time(self, loss: float, end: int) -> float:
        """Return the time at the measured speed after which this end of the interval of losses is below ``loss``."""

        def is_reached(seconds: float) -> bool:
            estimate = self._loss_at_measured_speed(seconds)
            return estimate is not None and estimate[end] <= loss

        return first_time(is_reached, self.mean_curve[0][0] / MAX_RATIO, self.longest_rung * MAX_RATIO)

    def _loss_at_measured_speed(self, seconds: float) -> Estimate | None:
        times, losses = zip(*self.mean_curve, strict=True)
        if not times[0] <= seconds <= times[-1]:
            return self.law.loss(seconds)
        mean = float(np.interp(math.log(seconds), np.log(times), losses))
        return LearningLaw({0: [(seconds, mean)]}, self.scatter).loss(seconds)

    def speed_errors(self, seconds: float) -> tuple[float, float]:
        """Return by how much the loss after ``seconds`` is lower at the fastest speed, and higher at the slowest."""
        speeds = (self.speed.middle, self.speed.high, self.speed.low)
        middle, fast, slow = (self._loss_at_measured_speed(seconds * speed / self.speed.middle) for speed in speeds)
        if middle is None or fast is None or slow is None:
            return 0.0, 0.0
        return middle.middle - fast.middle, slow.middle - middle.middle


@dataclass(frozen=True)
class LearningResults:
    """The results of all candidates that have learned."""

    candidates: Sequence[CandidateResult]
    """All candidates that have learned, the best first."""
    control: CandidateResult | None
    """The control; None if it has not learned."""
    train_time: float
    """Time of the final run in seconds."""
    target_loss: float | None
    """Loss to reach soonest; None for the lowest loss after ``train_time``."""
    ratio_scatter: Scatter | None
    """Scatter between seeds of the ratios of two candidates' losses, of all pairs."""

    @property
    def winner(self) -> CandidateResult | None:
        """The best candidate; None if all failed."""
        return next((result for result in self.candidates if not result.is_failed), None)

    @property
    def finalists(self) -> list[CandidateResult]:
        """The candidates that have learned as long as the winner, the best first."""
        winner = self.winner
        return [
            result
            for result in self.candidates
            if winner and not result.is_failed and result.longest_rung == winner.longest_rung
        ]

    @property
    def compared(self) -> list[CandidateResult]:
        """The candidates that are compared in detail: the finalists, and the control."""
        control = self.control
        return [*self.finalists, *([control] if control and control not in self.finalists else [])]

    @property
    def is_target_out_of_reach(self) -> bool:
        """Whether a loss to reach is set that no candidate reaches, in however much time."""
        predicted = [result for result in self.candidates if result.loss(self.train_time)]
        if self.target_loss is None or not predicted:
            return False
        return all(result.seconds(self.target_loss) is None for result in predicted)

    def difference(self, first: CandidateResult, second: CandidateResult, seconds: float) -> Estimate | None:
        """Return the loss of ``first`` after ``seconds`` minus that of ``second``; None without two common rungs."""
        difference = loss_difference(first.curves, second.curves, seconds, self.ratio_scatter)
        if difference is None or first.speed == second.speed:  # An error of a common speed cancels out.
            return difference
        (lower, higher), (other_lower, other_higher) = (each.speed_errors(seconds) for each in (first, second))
        return _widened(difference, math.hypot(lower, other_higher), math.hypot(higher, other_lower))

    def is_tied(self, result: CandidateResult) -> bool:
        """Return whether ``result`` is not the winner, but may be as good."""
        winner = self.winner
        if winner is None or result is winner or result not in self.finalists:
            return False
        time = self.goal_time
        difference = self.difference(result, winner, time)
        if difference is None:
            loss, best = result.loss(time), winner.loss(time)
            return loss is None or best is None or loss.low <= best.high
        return difference.low <= 0

    @property
    def goal_time(self) -> float:
        """The time after which losses are compared: that of the final run, or of the winner to the loss to reach."""
        if self.target_loss is None or self.winner is None:
            return self.train_time
        reached = self.winner.seconds(self.target_loss)
        return self.train_time if reached is None or math.isinf(reached.middle) else reached.middle

    def best_at(self, seconds: float) -> CandidateResult | None:
        """Return the candidate with the lowest loss after ``seconds``, or at the winner's longest rung if that is
        shorter; None without any. Candidates count that were trained for as long, there with as many seeds."""
        winner, losses = self.winner, []
        if winner is None:
            return None
        time = min(seconds, winner.longest_rung)
        for result in self.candidates:
            is_as_sure = time < winner.longest_rung or len(result.longest_losses) == len(winner.longest_losses)
            if not result.is_failed and result.longest_rung >= time and is_as_sure:
                loss = result.loss(time)
                losses += [(loss.middle, result)] if loss else []
        return min(losses, key=lambda entry: entry[0])[1] if losses else None

    def round_losses(self) -> list[float]:
        """Return up to seven round losses between that of the winner after the full time and that at the first rung of
        the control, the highest first, and the loss to reach."""
        winner = self.winner
        lowest = winner and winner.loss(self.train_time)
        if winner is None or lowest is None:
            return []
        highest = max(curve[0][1] for curve in (self.control or winner).curves.values())
        spread = max(highest - lowest.middle, LOSS_STEPS[0])
        step = next((step for step in LOSS_STEPS if spread / step <= MAX_ROUND_LOSSES), LOSS_STEPS[-1])
        first = math.ceil(lowest.middle / step)
        losses = {
            round(step * number, 2) for number in range(first, first + MAX_ROUND_LOSSES) if step * number < highest
        }
        return sorted(losses | ({self.target_loss} if self.target_loss else set()), reverse=True)


def learning_results(
    rows: Sequence[TrialRow],
    control: Candidate,
    speed: Callable[[Candidate], Estimate | None],
    train_time: float,
    target_loss: float | None = None,
) -> LearningResults:
    """Collect the results in ``rows``, and rank the candidates.

    Candidates that have learned longer, or as long with more seeds, come first, because the others were stopped or not
    chosen as finalists. They are ranked by the loss at their longest rung, not by predicted losses: those err by more
    than the order of two candidates changes later. Candidates that have not learned more than the frequencies of tokens
    follow, and those with a failed trial are last.

    Args:
        rows: rows of all trials.
        control: the control.
        speed: function that returns the measured speed of a candidate.
        train_time: time of the final run in seconds.
        target_loss: loss to reach soonest; None for the lowest loss after ``train_time``.
    """
    results = [
        result
        for candidate in dict.fromkeys(row.candidate for row in rows if row.rungs)
        if (result := _candidate_result([row for row in rows if row.candidate == candidate], speed(candidate)))
    ]
    scatter = seed_scatter(result.curves for result in results)
    results = [replace(result, scatter=scatter) for result in results]
    pairs = [paired_ratios(a.curves, b.curves) for a, b in combinations(results, 2)]

    def rank(result: CandidateResult) -> tuple[bool, bool, float, int, float, float]:
        reached = target_loss is not None and result.seconds(target_loss)
        time = reached.middle if reached else math.inf
        seeds = len(result.longest_losses)
        return result.is_failed, not result.has_learned, -result.longest_rung, -seeds, time, result.longest_loss

    return LearningResults(
        sorted(results, key=rank), next((result for result in results if result.candidate == control), None),
        train_time, target_loss, seed_scatter(pairs),
    )  # fmt: skip


def _candidate_result(rows: Iterable[TrialRow], speed: Estimate | None) -> CandidateResult | None:
    """Combine the ``rows`` of one candidate; None without a speed. Rows of a seed continue one another."""
    learning = [row for row in rows if row.stage in ("learn", "final")]
    if speed is None:
        return None
    learned = _curves(learning, only_learned=True)
    curves = learned or _curves(learning, only_learned=False)
    is_failed = any(row.outcome not in LEARNED for row in learning)
    return CandidateResult(
        learning[0].candidate, curves, speed, is_failed=is_failed, has_learned=bool(learned),
        is_stopped=any(row.outcome == "pruned" for row in learning),
    )  # fmt: skip


def _curves(rows: Iterable[TrialRow], *, only_learned: bool) -> Curves:
    """Collect the losses at the rungs of ``rows`` by seed.

    A rung at which a model has not learned more than the frequencies of tokens says little about how it goes on.
    """
    rungs: dict[int, dict[float, float]] = {}
    for row in rows:
        for rung in row.rungs:
            if rung.has_learned or not only_learned:
                rungs.setdefault(row.round, {})[rung.seconds] = rung.loss
    return {seed: sorted(losses.items()) for seed, losses in rungs.items()}


def _widened(estimate: Estimate, lower: float, higher: float) -> Estimate:
    """Return ``estimate`` with an independent additional error of these half-widths."""
    return Estimate(
        estimate.middle,
        estimate.middle - math.hypot(estimate.middle - estimate.low, lower),
        estimate.middle + math.hypot(estimate.high - estimate.middle, higher),
    )
