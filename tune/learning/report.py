"""The report of a search for the lowest loss, for the terminal, ``summary.md`` and MLflow."""

from collections.abc import Sequence
from typing import Any

from infra.charts import describe_conditions
from infra.cli.table import Report, Table, bullet_list
from infra.cli.units import format_count, format_duration
from infra.facts import Fact
from infra.storage.files import write_json, write_text
from infra.tracking.names import group_under_detail
from train.intervals import Estimate
from train.reporting.next_steps import after_comparison
from tune.experiment.folder import ExperimentResult
from tune.learning import charts
from tune.learning.final_run import best_json, final_run
from tune.learning.notes import notes_on
from tune.learning.plan import LearningSearch
from tune.learning.results import LEARNED, CandidateResult, LearningResults
from tune.learning.tables import candidate_notes, candidate_table, front_table, time_table
from tune.learning.text import format_time, loss_text, time_text
from tune.reporting.report import format_csv
from tune.space import Candidate
from tune.trial.row import OUTCOMES, TrialRow, flatten_row

UNRANKED = {"rank": "unranked"}
"""Tags of trials without a loss in MLflow."""

METRICS = (
    "prediction/loss", "prediction/loss_low", "prediction/loss_high", "result/gain_over_control",
    "result/gain_over_control_low", "result/gain_over_control_high", "result/seconds_to_loss", "trials/all",
    "time/device_seconds",
)  # fmt: skip
"""Metrics at the top level of a search's page in MLflow; its other metrics are under ``detail/``."""


def publish_learning(search: LearningSearch, rows: Sequence[TrialRow]) -> None:
    """Print the report of a finished search, and write its result, files and chart."""
    results = search.strategy.results(rows)
    report = learning_report(search, rows, results)
    tags = candidate_tags(search, results)
    result = ExperimentResult(
        has_winner=results.winner is not None,
        metrics=[*group_under_detail(report.metrics(), METRICS).items()],
        files=write_files(search, rows, results),
        tags={"goal": goal(search)},
        trial_tags={row.key: tags[row.candidate] if row.rungs and row.candidate in tags else UNRANKED for row in rows},
    )
    device = next((row.result.device for row in rows if row.result), search.device)
    figure = charts.draw_loss_by_time(
        results, search.space.label, f"Loss of {search.config.training.model.text} by training time",
        describe_conditions(device, search.limit),
    )  # fmt: skip
    search.publish(report, {"loss-by-time": figure} if figure else {}, result)
    search.discard_checkpoints()


def goal(search: LearningSearch) -> str:
    """Return the goal of the search as a phrase."""
    time, target = format_duration(search.train_time), search.config.target_loss
    return f"lowest loss after {time}" if target is None else f"soonest to a loss of {target:g}"


def learning_report(search: LearningSearch, rows: Sequence[TrialRow], results: LearningResults) -> Report:
    """Build the report of a search."""
    sections: list[str | Table] = []
    if results.candidates:
        sections.append(candidate_table(search, results))
        sections += [table for table in (time_table(search, results), front_table(search, results)) if table.rows]
    if texts := failures(search, rows):
        sections += ["Trials without a loss, or that failed:", bullet_list(texts)]
    sections.append(bullet_list(notes_on(search, rows, results)))
    outcomes = [Fact.of(f"trials/{name}", sum(row.outcome == name for row in rows)) for name in OUTCOMES]
    return Report(summary_fields(search, rows, results), sections, outcomes)


def summary_fields(search: LearningSearch, rows: Sequence[TrialRow], results: LearningResults) -> list[tuple[str, str]]:
    """Return the first lines of the report: (name, text)."""
    seconds = sum(row.seconds for row in rows)
    trials = Fact.joined(
        Fact.of("trials/all", len(rows), "{} trials"),
        Fact.of("time/device_seconds", seconds, f"in {format_duration(round(seconds))}"),
        separator=" ",
    )
    winner = results.winner
    if winner is None:
        reason = "; ".join(failures(search, rows)) or "no trial has learned"
        return [("Search", f"{goal(search)}: none"), ("Reason", reason), ("Trials", trials)]
    config, time = final_run(search, results, winner), format_duration(results.train_time)
    lines: list[tuple[str, str]] = [
        ("Search", Fact.joined(f"{goal(search)}: {search.space.label(winner.candidate)}", trials))
    ]
    if results.is_target_out_of_reach:
        lines[0] = ("Search", Fact.joined(f"{goal(search)}: out of reach", trials))
        floor = f"no candidate reaches it, in however much time; lowest loss after {time}"
        lines.append(("Instead", f"{floor}: {search.space.label(winner.candidate)}"))
    lines.append(("Loss", predicted_loss(winner, results.train_time)))
    lines.append(("Gain", gain(search, results, winner)))
    if text := time_to_loss(results, winner):
        lines.append(("Time", text))
    command = after_comparison(
        config, search.training.execution.device, search.manifest, winner.speed.middle, search.directory / "best.json"
    )
    return [*lines, ("Next", str(command))]


def predicted_loss(winner: CandidateResult, train_time: float) -> Fact:
    """Return the loss of the winner after the full time, and how far it is extrapolated."""
    loss, time = winner.loss(train_time), format_duration(train_time)
    if loss is None:
        text = f"{winner.longest_loss:.3f} measured after {format_time(winner.longest_rung)}"
        return Fact(f"{text}; one rung is too few to predict the loss after {time}", {})
    source = f"measured with {format_count(len(winner.longest_losses), 'seed')}"
    if (ratio := winner.law.extrapolation(train_time)) > 1:
        source = f"extrapolated x{ratio:.3g} from {format_time(winner.longest_rung)}"
    metrics = {"prediction/loss": loss.middle, "prediction/loss_low": loss.low, "prediction/loss_high": loss.high}
    return Fact(f"{loss_text(loss)} after {time}, {source}", metrics)


def gain(search: LearningSearch, results: LearningResults, winner: CandidateResult) -> Fact:
    """Return by how much the winner's loss is lower than the control's, and the candidates that may be as good."""
    tied = [search.space.label(result.candidate) for result in results.finalists if results.is_tied(result)]
    tie = f"tied with {', '.join(tied)}" if tied else ""
    control = results.control
    if control is None or control.is_failed:
        return Fact.joined("unknown, because the control has no loss", tie)
    if control is winner:
        return Fact.joined("none; the control is the best", tie)
    difference = results.difference(control, winner, results.goal_time)
    if difference is None:
        return Fact.joined("unknown, because the control has too few rungs in common with the winner", tie)
    name = "result/gain_over_control"
    metrics = {name: difference.middle, f"{name}_low": difference.low, f"{name}_high": difference.high}
    after = f" after {format_time(results.goal_time)}" if results.goal_time != results.train_time else ""
    is_significant = difference.low > 0 or difference.high < 0
    text = f"{difference.middle:.3f} nats lower than the control{after} (95% CI {difference.low:.3f} to "
    text += f"{difference.high:.3f}{'' if is_significant else '; not significant'})"
    return Fact.joined(Fact(text, metrics), tie)


def time_to_loss(results: LearningResults, winner: CandidateResult) -> Fact:
    """Return the time of the winner to the loss to reach, or to the control's loss at the full time, and the control's
    time; empty if it is unknown."""
    control, target, train_time = results.control, results.target_loss, results.train_time
    if target is not None:
        reached, other = winner.seconds(target), control and control.seconds(target)
        if reached is None:
            return Fact("", {})
        own = Fact.joined(f"{time_text(reached)} to a loss of {target:g}", _exceeds(reached, train_time))
        control_text = f"the control {time_text(other)}" if other and control is not winner else ""
        return Fact(Fact.joined(own, control_text), {"result/seconds_to_loss": reached.middle})
    loss = control.loss(train_time) if control and control is not winner else None
    reached = loss and winner.seconds(loss.middle)
    if loss is None or reached is None:
        return Fact("", {})
    text = f"{time_text(reached)} to the control's {loss.middle:.3f}"
    return Fact(text, {"result/seconds_to_loss": reached.middle})


def _exceeds(reached: Estimate, train_time: float) -> str:
    return f"longer than --train-time {format_duration(train_time)}" * (reached.middle > train_time)


def failures(search: LearningSearch, rows: Sequence[TrialRow]) -> list[str]:
    """Format a text for each reason why trials failed."""
    reasons: dict[str, dict[str, None]] = {}
    for row in rows:
        if row.outcome not in LEARNED:
            stage = " (speed)" if row.stage == "speed" else ""
            label = f"{search.space.label(row.candidate)}{stage}"
            reasons.setdefault(f"{row.outcome}: {row.reason}", {})[label] = None
    return [f"{'; '.join(labels)}: {reason}" for reason, labels in reasons.items()]


def candidate_tags(search: LearningSearch, results: LearningResults) -> dict[Candidate, dict[str, str]]:
    """Return the tags of each candidate's trials in MLflow: its rank, and its predicted loss."""
    tags = {}
    for number, result in enumerate(results.candidates, 1):
        loss = result.loss(results.train_time)
        rank = " ".join([f"{number:02d}", *candidate_notes(search, results, result)])  # MLflow sorts tags as text.
        tags[result.candidate] = {"rank": rank} | ({"predicted_loss": loss_text(loss, short=True)} if loss else {})
    return tags


def write_files(search: LearningSearch, rows: Sequence[TrialRow], results: LearningResults) -> list[str]:
    """Write trials.csv and, if there is a winner, best.json; return their names."""
    columns = {result.candidate: _prediction_columns(result, results.train_time) for result in results.candidates}
    write_text(search.folder / "trials.csv", format_csv([flatten_row(r) | columns.get(r.candidate, {}) for r in rows]))
    if results.winner is None:
        (search.folder / "best.json").unlink(missing_ok=True)
        return ["trials.csv"]
    write_json(search.folder / "best.json", best_json(search, rows, results, results.winner))
    return ["trials.csv", "best.json"]


def _prediction_columns(result: CandidateResult, seconds: float) -> dict[str, Any]:
    loss = result.loss(seconds)
    low, middle, high = (loss.low, loss.middle, loss.high) if loss else (None, None, None)
    return {"predicted_loss": middle, "predicted_loss_low": low, "predicted_loss_high": high}
