"""The quantities of a report: written once, read as text by people and as metrics by MLflow."""

from collections.abc import Mapping
from typing import Self


class Fact(str):
    """The text of one or several quantities, which knows their numbers by the names of their metrics.

    It is a text wherever a report takes one: in a summary, in a cell of a table, in a sentence.
    """

    metrics: Mapping[str, float]

    def __new__(cls, text: str, metrics: Mapping[str, float]) -> Self:
        fact = super().__new__(cls, text)
        fact.metrics = metrics
        return fact

    @classmethod
    def of(
        cls, name: str, value: float | None, unit: str = "", *,
        interval: tuple[float, float] | None = None, limit: float | None = None,
    ) -> Self:  # fmt: skip
        """The quantity ``name``, which is its metric in MLflow; empty and without a metric if ``value`` is None.

        Args:
            unit: Format of the value with its unit, such as ``{:.2f} GB``; empty for a quantity without a text.
            interval: 95% confidence interval, also in the metrics ``NAME_low`` and ``NAME_high``.
            limit: Maximum of the value, in its unit.
        """
        if value is None:
            return cls("", {})
        text = unit.format(value)
        if limit:
            text += f" of {unit.format(limit)}"
        if interval:
            text += f" (95% CI {unit.format(interval[0])} to {unit.format(interval[1])})"
        ends = zip((f"{name}_low", f"{name}_high"), interval or (), strict=False)
        return cls(text, {name: value} | dict(ends))

    @classmethod
    def joined(cls, *parts: str, separator: str = "; ") -> Self:
        """The texts and facts in ``parts``, without empty texts, as one."""
        metrics = {name: value for part in parts if isinstance(part, Fact) for name, value in part.metrics.items()}
        return cls(separator.join(filter(None, parts)), metrics)
