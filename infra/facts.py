"""Quantities of a report, each both a text for people and metrics for MLflow."""

from collections.abc import Mapping
from typing import Self


class Fact(str):
    """Text of one or several quantities that also has their values by the names of their MLflow metrics.

    A report accepts it wherever it accepts text: in a summary, in a cell of a table, in a sentence.
    """

    metrics: Mapping[str, float]

    def __new__(cls, text: str, metrics: Mapping[str, float]) -> Self:
        fact = super().__new__(cls, text)
        fact.metrics = metrics
        return fact

    @classmethod
    def of(cls, name: str, value: float | None, unit: str = "", *, limit: float | None = None) -> Self:
        """Create a quantity; its text is empty, and it has no metric, if ``value`` is None.

        Args:
            name: name of the MLflow metric.
            value: value of the metric.
            unit: format of the value with its unit, such as ``{:.2f} GB``; empty for a quantity without text.
            limit: maximum of the value, in its unit.
        """
        if value is None:
            return cls("", {})
        text = unit.format(value)
        if limit:
            text += f" of {unit.format(limit)}"
        return cls(text, {name: value})

    @classmethod
    def joined(cls, *parts: str, separator: str = "; ") -> Self:
        """Join the texts and facts in ``parts``, without empty texts, to one fact with all metrics."""
        metrics = {name: value for part in parts if isinstance(part, Fact) for name, value in part.metrics.items()}
        return cls(separator.join(filter(None, parts)), metrics)
