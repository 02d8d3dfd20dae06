"""The reports of a search for the lowest loss."""

from collections.abc import Sequence

from infra.cli.console import console
from infra.cli.table import Report, Table
from infra.facts import Fact
from tune.experiment.folder import ExperimentResult
from tune.learning.plan import LearningSearch, describe_knobs
from tune.trial.row import TrialRow


def introduce_learning(search: LearningSearch) -> None:
    """Print the size of the search and its control."""
    console.print(f"{len(search.space.candidates)} candidates: {describe_knobs(search.space)}", markup=False)
    console.print(f"control: {search.space.label(search.space.control)}", markup=False)


def publish_learning(search: LearningSearch, rows: Sequence[TrialRow]) -> None:
    """Print the report of a finished search, and write its result and files."""
    cells = [
        (row.stage, row.name, str(row.round), *(f"{rung.loss:.3f}" for rung in row.rungs)) for row in rows if row.rungs
    ]
    report = Report(
        [("Search", Fact.of("trials/all", len(rows), "{} trials"))], [Table("Losses", ("stage",), cells)], []
    )
    search.publish(report, {}, ExperimentResult(True, [], []))
