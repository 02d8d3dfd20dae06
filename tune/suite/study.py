"""``--compare study``: a ladder beside the published figures for its suite, in tables, notes and a chart."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from infra.cli.table import Table
from infra.errors import UserError
from train.model_config import ModelSpec
from tune.suite import effects, gpt2_study
from tune.suite.catalog import A100
from tune.suite.published import EFFECT_STUDIES
from tune.suite.runs import RungResult
from tune.suite.suites import Suite
from tune.suite.textbook import MEMORY, ROOFLINES, memory_table, rooflines_table

NAME = "study"
"""Value of ``--compare`` that selects the published figures of the suite."""

MODEL = "GPT-2"
"""Architecture of the models in the studies, apart from one BERT."""


def check_has_study(suite: Suite, model: ModelSpec) -> None:
    """Raise ``UserError`` if there are no published figures for ``suite`` or for the architecture of ``model``."""
    if suite.name not in (suites := (A100.name, *EFFECT_STUDIES)):
        raise UserError(
            f"--compare study is only available for the suites {', '.join(suites)}, not for {suite.name}. "
            "Remove --compare."
        )
    if model.title != MODEL:
        raise UserError("--compare study is only available for GPT-2. Remove --compare or --model.")


def predict(suite: Suite) -> list[str | Table]:
    """Return the sections about the study before any run: its figures, and predictions for this project."""
    if suite.name == A100.name:
        return [memory_table({}), MEMORY, rooflines_table(), ROOFLINES]
    return effects.compare(suite, [])


def compare(suite: Suite, rows: Sequence[RungResult]) -> list[str | Table]:
    """Return the sections that compare the ``rows`` of a finished ladder with the study."""
    if suite.name == A100.name:
        tables, notes = gpt2_study.compare(rows)
        return [*tables, *notes]
    return effects.compare(suite, rows)


def draw(suite: Suite, rows: Sequence[RungResult], conditions: str) -> Figure | None:
    """Draw memory and speed of the study and of the ``rows``; None if nothing was published.

    ``conditions`` describe where the rows were measured.
    """
    if suite.name == A100.name:
        return gpt2_study.draw(rows, conditions)
    return effects.draw(suite, rows, conditions)
