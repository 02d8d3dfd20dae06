"""The law y = E + A x^-a fitted to a few points, with the interval of all laws that are compatible with the points.

Three points determine the three parameters, but not their error. The error is therefore the assumed deviation of a
point from the law, or the residuals if these are larger. With two points every exponent is compatible, so that the
interval is wide, but not infinite, because exponents and offset have bounds.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from train.intervals import Estimate, t_quantile

EXPONENTS = np.geomspace(0.02, 1.0, 320)[:, None]
"""Exponents that are considered."""
OFFSET_FRACTIONS = np.linspace(0, 1, 25)
"""Positions in the range of compatible offsets of an exponent, at which the range of compatible scales is computed."""
PARAMETERS = 3
"""Number of parameters of the law."""
TYPICAL_WEIGHT = 0.1
"""Square by which a law counts as worse whose exponent differs from the typical one by a factor of e."""
EXPONENT_DEVIATION = 0.1
"""Assumed standard deviation of the difference of two laws' exponents, as a fraction of the exponent."""


class _Laws(NamedTuple):
    """The best law, and the compatible laws by exponent (rows) and offset (columns)."""

    best: tuple[float, float, float]
    """Offset, scale and exponent of the best law."""
    offsets: np.ndarray
    low_scales: np.ndarray
    high_scales: np.ndarray
    exponents: np.ndarray


@dataclass(frozen=True)
class PowerLaw:
    """The law y = E + A x^-a of points, with E and A of at least zero, by the profile likelihood.

    A law is compatible with the points if its squared residuals exceed the best law's by at most the square of the
    quantile, in units of the variance.
    """

    positions: Sequence[float]
    """Position x of each point, at least two different ones."""
    values: Sequence[float]
    """Value y of each point."""
    deviations: Sequence[float]
    """Assumed standard deviation of each value from the law."""
    degrees_of_freedom: float
    """Degrees of freedom of the deviations, with which they are pooled with residuals that are larger."""
    typical_exponent: float
    """Exponent near which the best law is chosen among laws that fit about equally well."""

    def at(self, position: float) -> Estimate:
        """Return the value of the law at ``position`` with its 95% interval."""
        laws = self._laws
        offset, scale, exponent = laws.best
        relative = position / self._reference
        powers = relative**-laws.exponents
        low, high = laws.offsets + laws.low_scales * powers, laws.offsets + laws.high_scales * powers
        return Estimate(offset + scale * relative**-exponent, float(low.min()), float(high.max()))

    @cached_property
    def _reference(self) -> float:
        """The unit of positions in the fit, in their middle, so that the scale is a value of the law there."""
        return _middle(self.positions)

    @cached_property
    def _laws(self) -> _Laws:
        values, weights = np.array(self.values), np.array(self.deviations) ** -2.0
        powers = (np.array(self.positions) / self._reference) ** -EXPONENTS
        # For each exponent the best offset and scale are a weighted linear fit. The squares of the best scale for an
        # offset are a parabola with its minimum at the best offset.
        total, curvature = weights.sum(), (weights * powers**2).sum(-1)
        mean_power, mean_value = (weights * powers).sum(-1) / total, (weights * values).sum() / total
        distances = powers - mean_power[:, None]
        spread = (weights * distances**2).sum(-1)
        fitted_scale = (weights * distances * values).sum(-1) / spread
        fitted_offset = mean_value - fitted_scale * mean_power
        residuals = values - fitted_offset[:, None] - fitted_scale[:, None] * powers
        squares = (weights * residuals**2).sum(-1)
        offset_variance = curvature / (total * spread)
        highest = values.min()  # A higher offset would need a negative scale.
        best_offset = np.clip(fitted_offset, 0, highest)
        profile = squares + (best_offset - fitted_offset) ** 2 / offset_variance
        typical = TYPICAL_WEIGHT * np.log(EXPONENTS[:, 0] / self.typical_exponent) ** 2
        best = int((profile + typical).argmin())
        threshold = profile.min() + _squared_quantile(profile.min(), len(values), self.degrees_of_freedom)
        compatible = profile <= threshold
        reach = np.sqrt(np.maximum(threshold - squares, 0) * offset_variance)
        first, last = np.maximum(fitted_offset - reach, 0), np.minimum(fitted_offset + reach, highest)
        offsets = (first[:, None] + OFFSET_FRACTIONS * (last - first)[:, None])[compatible]
        slack = threshold - squares[compatible, None]
        slack = slack - (offsets - fitted_offset[compatible, None]) ** 2 / offset_variance[compatible, None]

        def best_scale(offset: np.ndarray, curvature: np.ndarray, powers: np.ndarray) -> np.ndarray:
            return (weights * powers * (values - offset[..., None])).sum(-1) / curvature

        scales = best_scale(offsets, curvature[compatible, None], powers[compatible, None, :])
        reach = np.sqrt(np.maximum(slack, 0) / curvature[compatible, None])
        best_law = (
            float(best_offset[best]),
            float(best_scale(best_offset[best], curvature[best], powers[best])),
            float(EXPONENTS[best, 0]),
        )
        return _Laws(best_law, offsets, np.maximum(scales - reach, 0), scales + reach, EXPONENTS[compatible])


@dataclass(frozen=True)
class PowerLawDifference:
    """The difference of two power laws of points at the same positions, by the profile likelihood.

    Two laws with the same exponent a differ by D + C x^-a, with D and C of any sign. Exponents that differ a little add
    a term, the derivative of the laws by the exponent, whose size is limited by the assumed difference of exponents.
    """

    positions: Sequence[float]
    """Position x of each pair of points, at least two different ones."""
    differences: Sequence[float]
    """Difference of the values of each pair."""
    means: Sequence[float]
    """Mean of the values of each pair."""
    deviations: Sequence[float]
    """Assumed standard deviation of each difference."""
    degrees_of_freedom: float
    """Degrees of freedom of the deviations, with which they are pooled with residuals that are larger."""

    def at(self, position: float) -> Estimate:
        """Return the difference of the laws at ``position`` with its 95% interval."""
        reference = _middle(self.positions)
        design = self._terms(np.array(self.positions) / reference)
        # The prior of the third coefficient is an additional point, in units of its deviation.
        prior = np.broadcast_to([0.0, 0.0, 1.0], (len(EXPONENTS), 1, 3))
        deviations = np.append(self.deviations, 1.0)
        values = np.append(self.differences, 0.0) / deviations
        design = np.concatenate([design, prior], axis=1) / deviations[:, None]
        covariance = np.linalg.inv(design.transpose(0, 2, 1) @ design)
        coefficients = covariance @ (design.transpose(0, 2, 1) @ values)[..., None]
        squares = ((values - (design @ coefficients)[..., 0]) ** 2).sum(-1)
        best = int(squares.argmin())
        slack = squares[best] - squares + _squared_quantile(squares[best], len(values) - 1, self.degrees_of_freedom)
        target = self._terms(np.array([position / reference]))
        middles = (target @ coefficients)[:, 0, 0]
        variances = (target @ covariance @ target.transpose(0, 2, 1))[:, 0, 0]
        compatible = slack >= 0
        reach = np.sqrt(slack[compatible] * variances[compatible])
        low, high = (middles[compatible] - reach).min(), (middles[compatible] + reach).max()
        return Estimate(float(middles[best]), float(low), float(high))

    def _terms(self, positions: np.ndarray) -> np.ndarray:
        """Return the terms of the difference for each exponent (rows) and position: D, C, and that of the exponents."""
        powers = positions**-EXPONENTS
        own_powers = (np.array(self.positions) / _middle(self.positions)) ** -EXPONENTS
        means = np.array(self.means)
        distances = own_powers - own_powers.mean(-1, keepdims=True)
        scale = (distances * means).sum(-1, keepdims=True) / (distances**2).sum(-1, keepdims=True)
        scale = np.clip(scale, 0, means.mean())  # A larger scale would need a negative offset.
        derivative = EXPONENT_DEVIATION * EXPONENTS * scale * np.log(positions) * powers
        return np.stack([np.ones_like(powers), powers, derivative], axis=-1)


def _middle(positions: Sequence[float]) -> float:
    return math.exp(float(np.mean(np.log(positions))))


def _squared_quantile(best_squares: float, count: int, degrees_of_freedom: float) -> float:
    """Return the square of the quantile in units of the assumed variance, for the residuals of ``count`` points."""
    freedom = max(1, count - PARAMETERS)  # Laws have bounds, so that also three points may deviate from all of them.
    if best_squares > freedom:  # The points deviate from the law by more than assumed.
        variance = (degrees_of_freedom + best_squares) / (degrees_of_freedom + freedom)
        return t_quantile(degrees_of_freedom + freedom) ** 2 * variance
    return t_quantile(degrees_of_freedom) ** 2
