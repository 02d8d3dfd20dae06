"""Predictions of the memory and speed of steps that have not run, and the table in which every command prints them."""

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

from infra.cli.table import Table
from infra.cli.units import GB
from infra.errors import UserError
from train.config import Batch, Step
from train.estimate.gpu_rates import GpuRates
from train.estimate.memory import peak_if_known
from train.estimate.roofline import expected_range, roofline_speed

SECONDS_PER_HOUR = 3600


class Range(NamedTuple):
    """The lowest and the highest value of a prediction."""

    low: float
    high: float

    def span(self, other: "Range") -> "Range":
        """Return the range from the lowest to the highest value of both."""
        return Range(min(self.low, other.low), max(self.high, other.high))


@dataclass(frozen=True)
class Prediction:
    """The predicted memory and speed of one step, or of several steps whose speeds differ by less than their error."""

    label: str
    """Text of the first column."""
    batches: tuple[Batch, ...]
    """The batches of the steps, from the first to the last."""
    peak: Range | None
    """Peak memory of the process in bytes; None if it must be measured."""
    speed: Range | None
    """Speed to expect in tokens/s of one GPU; None if it is not predicted."""
    common_speed: Range | None
    """Speeds that all steps may have, in tokens/s."""
    limit: float | None = None
    """Memory limit in bytes; None if it is unknown."""
    price: float | None = None
    """Price per hour of the GPU; None if it is unknown."""

    @property
    def batch_text(self) -> str:
        """The micro-batch and accumulation: ``80 x 6``, or ``4 x 120 to 12 x 40``."""
        ends = dict.fromkeys(
            f"{batch.micro_batch} x {batch.accumulation}" for batch in (self.batches[0], self.batches[-1])
        )
        return " to ".join(ends)

    @property
    def peak_text(self) -> str:
        """The peak memory in GB, marked if it exceeds the limit."""
        if self.peak is None:
            return "-"
        text = " to ".join(dict.fromkeys(f"{size / GB:.2f}" for size in self.peak))
        return f"{text} > limit" if self.exceeds_limit else text

    def has_similar_speed(self, other: "Prediction") -> bool:
        """Return whether the speeds differ by less than their error, or both are not predicted."""
        if self.common_speed is None or other.common_speed is None:
            return self.common_speed is other.common_speed
        return self.common_speed.low <= other.common_speed.high and other.common_speed.low <= self.common_speed.high

    def is_similar(self, other: "Prediction") -> bool:
        """Return whether batch and memory are equal, and the speeds similar."""
        has_same_batch = self.batches[-1] == other.batches[0]
        return has_same_batch and self.peak_text == other.peak_text and self.has_similar_speed(other)

    def joined(self, other: "Prediction", label: str) -> "Prediction":
        """Return one prediction for the steps of both, which have similar speeds."""
        common = speed = None
        if self.speed and other.speed and self.common_speed and other.common_speed:
            lows, highs = zip(self.common_speed, other.common_speed, strict=True)
            common, speed = Range(max(lows), min(highs)), self.speed.span(other.speed)
        peak = self.peak.span(other.peak) if self.peak and other.peak else None
        batches = (*self.batches, *other.batches)
        return replace(self, label=label, batches=batches, peak=peak, speed=speed, common_speed=common)

    @property
    def exceeds_limit(self) -> bool:
        """Whether the memory is predicted to exceed the limit."""
        return bool(self.limit and self.peak and self.peak.low > self.limit)

    def seconds(self, tokens: float) -> Range | None:
        """Return the time for this number of tokens; None without a predicted speed."""
        return self.speed and Range(tokens / self.speed.high, tokens / self.speed.low)


def predict(
    label: str, step: Step, gpu_rates: GpuRates | None, limit: float | None = None, price: float | None = None
) -> Prediction:
    """Predict the memory of ``step`` and, on a GPU with ``gpu_rates``, its speed if it fits ``limit`` bytes."""
    breakdown, speed = peak_if_known(step), None
    peak = Range(breakdown.total, breakdown.total) if breakdown else None
    if gpu_rates and not (peak and limit and peak.low > limit):
        with suppress(UserError):  # The formulas do not cover every setting.
            speed = Range(*expected_range(roofline_speed(step.model, step.batch, step.execution, gpu_rates)))
    return Prediction(label, (step.batch,), peak, speed, speed, limit, price)


def merge_batches(predictions: Iterable[Prediction]) -> list[Prediction]:
    """Merge neighbors of different batches whose speeds differ by less than their error, or are not predicted."""
    merged: list[Prediction] = []
    for prediction in predictions:
        if merged and merged[-1].has_similar_speed(prediction):
            merged[-1] = merged[-1].joined(prediction, prediction.label)
        else:
            merged.append(prediction)
    return merged


def merge_changes(predictions: Iterable[Prediction]) -> list[Prediction]:
    """Merge neighbors of equal batch and memory whose speeds differ by less than their error, as ``first to last``."""
    merged: list[Prediction] = []
    for prediction in predictions:
        if merged and merged[-1].is_similar(prediction):
            first = merged[-1].label.partition(" to ")[0]
            merged[-1] = merged[-1].joined(prediction, f"{first} to {prediction.label}")
        else:
            merged.append(prediction)
    return merged


def prediction_table(title: str, heading: str, predictions: Sequence[Prediction], tokens: float | None = None) -> Table:
    """Build the table of predictions; "-" is a value that is not predicted.

    Args:
        heading: heading of the labels, whose column is missing if all are empty.
        tokens: tokens of the run whose time and, with prices, cost is predicted; None for a table without them.
    """
    has_labels = any(prediction.label for prediction in predictions)
    has_price = tokens is not None and any(prediction.price for prediction in predictions)
    has_speed = any(prediction.speed for prediction in predictions)
    columns = (
        [heading] * has_labels
        + ["micro-batch x accumulation", "peak memory (GB)"]
        + ["tokens/s (thousands)"] * has_speed
    )
    columns += ["time (h)"] * (tokens is not None) + ["cost"] * has_price
    rows = []
    for prediction in predictions:
        cells = [prediction.label] * has_labels + [prediction.batch_text, prediction.peak_text]
        cells += [format_speed(prediction.speed)] * has_speed
        if tokens is not None:
            seconds = prediction.seconds(tokens)
            cells.append(format_range(seconds, 1 / SECONDS_PER_HOUR))
            cells += [format_range(seconds, (prediction.price or 0) / SECONDS_PER_HOUR)] * has_price
        rows.append(cells)
    return Table(title, columns, rows)


def format_speed(speed: Range | None) -> str:
    """Format a predicted speed in thousand tokens/s with three significant digits: ``164 to 184``."""
    return format_range(speed, 1 / 1000, digits=3)


def format_range(values: Range | None, factor: float = 1.0, digits: int = 2) -> str:
    """Format a range times ``factor`` with this number of significant digits; "-" for None or a factor of 0."""
    if values is None or not factor:
        return "-"
    return " to ".join(dict.fromkeys(_format_digits(value * factor, digits) for value in values))


def _format_digits(value: float, digits: int) -> str:
    decimals = digits - 1 - math.floor(math.log10(value)) if value > 0 else 0
    return f"{round(value, decimals):,.{max(0, decimals)}f}"
