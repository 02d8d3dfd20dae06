"""The tables in the report of a search for the lowest loss."""

from infra.cli.table import Table
from infra.cli.units import format_duration
from tune.learning.plan import LearningSearch
from tune.learning.results import CandidateResult, LearningResults
from tune.learning.text import difference_text, format_time, time_text

FRONT_FRACTIONS = (1 / 6, 1 / 2, 1.0)
"""Fractions of the final run's time in the table of the best settings by time."""


def candidate_table(search: LearningSearch, results: LearningResults) -> Table:
    """Build the table of the candidates that have learned, the best first."""
    control, time = results.control, results.train_time
    rows = []
    for result in results.candidates:
        loss = result.loss(time)
        difference = control and control is not result and results.difference(result, control, results.goal_time)
        rows.append((
            search.space.label(result.candidate), f"{result.speed.middle:,.0f}", format_time(result.longest_rung),
            f"{result.longest_loss:.3f}", f"{loss.middle:.3f}" if loss else "-",
            f"{loss.low:.3f} to {loss.high:.3f}" if loss else "", difference_text(difference or None),
            str(len(result.longest_losses)), ", ".join(candidate_notes(search, results, result)),
        ))  # fmt: skip
    columns = (
        "settings", "tokens/s", "longest rung", "loss there", f"loss after {format_duration(time)}", "95% CI",
        "vs control (nats)", "seeds", "notes",
    )  # fmt: skip
    return Table("Candidates, best first", columns, rows)


def candidate_notes(search: LearningSearch, results: LearningResults, result: CandidateResult) -> list[str]:
    """Return the notes on a candidate: winner, tie, control, stopped or failed."""
    return (
        ["winner"] * (result is results.winner)
        + ["tie"] * results.is_tied(result)
        + ["control"] * (result.candidate == search.space.control)
        + ["stopped"] * result.is_stopped
        + ["failed"] * result.is_failed
    )


def time_table(search: LearningSearch, results: LearningResults) -> Table:
    """Build the table of the time to each of several losses, a column for each finalist and the control."""
    candidates = [result for result in results.compared if result.loss(results.train_time)]
    rows = []
    for loss in results.round_losses() if candidates else []:
        times = [result.seconds(loss) for result in candidates]
        rows.append((f"{loss:.2f}", *(time_text(time, short=True) if time else "never" for time in times)))
    columns = ("loss", *(search.space.label(result.candidate) for result in candidates))
    return Table("Time to a loss (95% CI)", columns, rows)


def front_table(search: LearningSearch, results: LearningResults) -> Table:
    """Build the table of the best settings for shorter runs."""
    rows = []
    for fraction in FRONT_FRACTIONS:
        seconds = fraction * results.train_time
        best = results.best_at(seconds)
        if best and (loss := best.loss(seconds)):
            rows.append((
                format_time(seconds), search.space.label(best.candidate), f"{loss.middle:.3f}",
                f"{loss.low:.3f} to {loss.high:.3f}", f"{best.speed.middle * seconds:,.0f}",
            ))  # fmt: skip
    return Table("Best settings by training time", ("time", "settings", "loss", "95% CI", "training tokens"), rows)
