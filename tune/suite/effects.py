"""Comparison of a ladder with published effects on memory and step time, as ratios."""

import textwrap
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from matplotlib.figure import Figure

from infra.cli.table import Table
from tune.suite import charts
from tune.suite.published import EFFECT_STUDIES, Effect
from tune.suite.results import without_empty_columns
from tune.suite.runs import RungResult
from tune.suite.suites import Suite

MAX_LABEL_WIDTH = 28
"""Maximum length of a line of a rung's name in the chart, in characters."""


class EffectPair(NamedTuple):
    """Effect of a rung in a published study and on this machine."""

    rung: str
    published: Effect
    measured: Effect
    is_significant: bool
    """Whether this machine's change of speed is significant."""


def compare_effects(suite: Suite, rows: Sequence[RungResult]) -> Iterator[EffectPair]:
    """Yield the effects of the rungs of ``suite`` that the study has.

    Both are over the same rung: the previous one in a cumulative suite, else the baseline. A rung that the ladder does
    not have is left out, unless there are no ``rows``.
    """
    by_name = {row.name: row for row in rows}
    measured = [row for row in rows if row.speed]
    for name, published in EFFECT_STUDIES[suite.name].effects.items():
        row = by_name.get(name, RungResult(name))
        if rows and name not in {rung.name for rung in suite.rungs}:
            continue
        difference = row.step if suite.cumulative else row.total
        reference = measured[measured.index(row) - 1 if suite.cumulative else 0] if row in measured else RungResult("")
        memory = row.memory / reference.memory if row.memory and reference.memory else None
        time = 1 / difference.ratio if difference else None
        yield EffectPair(name, published, Effect(memory, time), bool(difference and difference.is_significant))


def compare(suite: Suite, rows: Sequence[RungResult]) -> list[str | Table]:
    """Return the table of the effects, without one if nothing was published, and the source as a note below it."""
    table = effects_table(suite, rows)
    return [*[table] * bool(table.rows), EFFECT_STUDIES[suite.name].source]


def draw(suite: Suite, rows: Sequence[RungResult], conditions: str) -> Figure | None:
    """Draw the effects on memory and step time in the study and on this machine; None if nothing was published.

    ``conditions`` describe where the rows were measured.
    """
    pairs = list(compare_effects(suite, rows))
    if not pairs:
        return None
    reference = "previous rung" if suite.cumulative else "baseline"
    panels = {
        f"peak memory (ratio to the {reference})": {
            "study": [pair.published.memory for pair in pairs], "this machine": [pair.measured.memory for pair in pairs]
        },
        f"step time (ratio to the {reference})": {
            "study": [pair.published.time for pair in pairs], "this machine": [pair.measured.time for pair in pairs]
        },
    }  # fmt: skip
    names = [textwrap.fill(pair.rung, MAX_LABEL_WIDTH) for pair in pairs]
    source = EFFECT_STUDIES[suite.name].source
    return charts.grouped_bars(
        f"{suite.title}: a study and this machine", f"this machine: {conditions}", names, panels, source
    )


def effects_table(suite: Suite, rows: Sequence[RungResult]) -> Table:
    """Build the table of the published effects of a suite's rungs and, if there are ``rows``, of those measured."""
    cells = [
        (
            pair.rung, _ratio(pair.published.memory), _ratio(pair.measured.memory), _ratio(pair.published.time),
            _ratio(pair.measured.time, in_brackets=not pair.is_significant),
        )
        for pair in compare_effects(suite, rows)
    ]  # fmt: skip
    reference = "the previous rung" if suite.cumulative else "the baseline"
    meanings = '"-": not published' + ", or not measured; in brackets: not significant" * bool(rows)
    title = f"Published effects vs {reference} ({meanings})"
    columns = (
        "rung", "peak memory: study", "peak memory: this machine", "step time: study", "step time: this machine",
    )  # fmt: skip
    return without_empty_columns(title, columns, cells)


def _ratio(value: float | None, *, in_brackets: bool = False) -> str:
    text = "-" if value is None else f"x{value:.2f}"
    return f"({text})" if in_brackets and value is not None else text
