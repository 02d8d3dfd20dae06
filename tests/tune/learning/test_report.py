"""What a person reads of a search for the lowest loss."""

import csv
import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from learning_rows import TRAIN_TIME, learning_row, speed_row

from infra.cli.table import Table
from infra.storage.directory import StorageDir
from train.config import config_from_json
from train.intervals import Estimate
from train.search_reference import read_search_reference
from tune.experiment.session import format_progress, format_trial
from tune.learning.charts import draw_loss_by_time
from tune.learning.final_run import final_run
from tune.learning.introduction import introduce_learning, planned_trials
from tune.learning.notes import notes_on
from tune.learning.plan import LearningSearch, read_speeds
from tune.learning.report import failures, learning_report, write_files
from tune.trial.row import TrialRow

MakeSearch = Callable[..., LearningSearch]


def report_of(search: LearningSearch, rows: list[TrialRow]) -> tuple[dict[str, str], dict[str, Table], str]:
    """The summary, the tables by title, and the whole text of the report."""
    report = learning_report(search, rows, search.strategy.results(rows))
    tables = {section.title: section for section in report.sections if isinstance(section, Table)}
    return dict(report.summary), tables, report.markdown()


def notes_of(search: LearningSearch, rows: list[TrialRow]) -> str:
    return "\n".join(notes_on(search, rows, search.strategy.results(rows)))


def test_the_summary_has_winner_loss_gain_time_and_the_next_command(
    search: LearningSearch, rows: list[TrialRow]
) -> None:
    summary, _, _ = report_of(search, rows)
    assert list(summary) == ["Search", "Loss", "Gain", "Time", "Next"]
    assert "53m20s: learning_rate=0.001" in summary["Search"]
    assert "2.6" in summary["Loss"]
    assert "extrapolated x2 from 26m40s" in summary["Loss"]
    assert "nats lower than the control" in summary["Gain"]
    assert "not significant" not in summary["Gain"]
    assert "tied with learning_rate=0.002" in summary["Gain"]
    assert "to the control's 2.7" in summary["Time"]
    assert "--config" in summary["Next"]
    assert "best.json" in summary["Next"]


def test_metrics_are_the_numbers_of_the_summary(search: LearningSearch, rows: list[TrialRow]) -> None:
    metrics = learning_report(search, rows, search.strategy.results(rows)).metrics()
    assert metrics["prediction/loss_low"] < metrics["prediction/loss"] < metrics["prediction/loss_high"]
    assert metrics["result/gain_over_control"] == pytest.approx(0.11, abs=0.01)
    assert metrics["result/seconds_to_loss"] < TRAIN_TIME
    assert metrics["trials/pruned"] == 1


def test_the_table_has_the_best_first_and_brackets_for_what_is_not_significant(
    search: LearningSearch, rows: list[TrialRow]
) -> None:
    _, tables, _ = report_of(search, rows)
    table = tables["Candidates, best first"]
    lines = [dict(zip(table.columns, cells, strict=True)) for cells in table.rows]
    assert [line["notes"] for line in lines] == ["winner", "tie", "control", "stopped"]
    assert [line["seeds"] for line in lines] == ["3", "3", "3", "1"]
    assert lines[0]["vs control (nats)"].startswith("-0.1")
    assert lines[2]["vs control (nats)"] == "-"
    assert lines[3]["loss after 53m20s"] == "-"


def test_an_insignificant_gain_says_so(search: LearningSearch, rows: list[TrialRow]) -> None:
    control, _, close, _ = search.space.candidates
    few = [speed_row(control), learning_row(control, 1.7), learning_row(close, 1.699)]
    summary, tables, _ = report_of(search, few)
    assert "not significant" in summary["Gain"]
    assert any(cell.startswith("(") for cells in tables["Candidates, best first"].rows for cell in cells)


def test_times_to_losses_have_a_column_for_each_finalist(search: LearningSearch, rows: list[TrialRow]) -> None:
    _, tables, _ = report_of(search, rows)
    table = tables["Time to a loss (95% CI)"]
    assert len(table.columns) == 4
    assert 4 <= len(table.rows) <= 7
    assert all(" to " in cell for cell in table.rows[0][1:])


def test_the_best_settings_of_shorter_runs_are_listed(search: LearningSearch, rows: list[TrialRow]) -> None:
    _, tables, _ = report_of(search, rows)
    times, settings, *_ = zip(*tables["Best settings by training time"].rows, strict=True)
    assert times == ("8m53s", "26m40s", "53m20s")
    assert set(settings) == {"learning_rate=0.001"}


def test_a_target_is_answered_with_a_time(make_search: MakeSearch, rows: list[TrialRow]) -> None:
    summary, tables, _ = report_of(make_search(target_loss=2.8), rows)
    assert "soonest to a loss of 2.8: learning_rate=0.001" in summary["Search"]
    assert "to a loss of 2.8" in summary["Time"]
    assert "the control" in summary["Time"]
    assert "2.80" in [cells[0] for cells in tables["Time to a loss (95% CI)"].rows]


def test_a_target_out_of_reach_is_named_with_what_can_be_had(make_search: MakeSearch, rows: list[TrialRow]) -> None:
    search = make_search(target_loss=0.3)
    summary, tables, _ = report_of(search, rows)
    assert "out of reach" in summary["Search"]
    assert "learning_rate=0.001" in summary["Instead"]
    assert tables["Time to a loss (95% CI)"].rows[-1][1:] == ("never", "never", "never")
    assert "out of reach" in format_progress(search, rows)
    assert "out of reach" not in format_progress(make_search(target_loss=2.8), rows)


def test_a_best_value_at_the_edge_names_the_knob(search: LearningSearch, rows: list[TrialRow]) -> None:
    assert "--knobs" not in notes_of(search, rows)
    control, best, _, _ = search.space.candidates
    small = [speed_row(control), learning_row(control, 1.5), learning_row(best, 1.7)]
    text = notes_of(search, small)
    assert "learning_rate, 0.0003" in text
    assert "Add smaller values" in text


def test_losses_on_the_plateau_of_token_frequencies_are_named(search: LearningSearch, rows: list[TrialRow]) -> None:
    assert "longer --train-time" not in notes_of(search, rows)
    unlearned = [replace(row, rungs=[replace(rung, has_learned=False) for rung in row.rungs]) for row in rows]
    assert "longer --train-time" in notes_of(search, unlearned)


def test_a_batch_far_above_the_noise_scale_is_named(make_search: MakeSearch) -> None:
    search = make_search(("global_batch=32,128",))
    control = search.space.control
    plain = learning_row(control, 2.0)

    def note(scale: float) -> str:
        measured = replace(plain, noise_scale=Estimate(scale, 0.8 * scale, 1.3 * scale))
        return notes_of(search, [speed_row(control), measured])

    assert "128" in note(20)
    assert "32" not in note(20).split("A global batch of")[1].split("is more")[0]
    assert "far more tokens" not in note(40)
    assert "noise scale is 40" in note(40)
    assert "noise scale" not in notes_of(search, [speed_row(control), plain])


def test_epochs_of_the_final_run_are_counted(make_search: MakeSearch, rows: list[TrialRow]) -> None:
    assert "epochs" not in notes_of(make_search(train_tokens=10**7), rows)
    assert "1.6 epochs" in notes_of(make_search(train_tokens=2 * 10**6), rows)
    assert "the rungs saw less than one" in notes_of(make_search(train_tokens=2 * 10**6), rows)
    assert "5.3 epochs" in notes_of(make_search(train_tokens=6 * 10**5), rows)
    assert "2305.16264" in notes_of(make_search(train_tokens=6 * 10**5), rows)


def test_failures_have_their_reasons_and_a_search_without_a_loss_has_no_winner(
    search: LearningSearch, tmp_path: Path
) -> None:
    control, best, *_ = search.space.candidates
    rows = [
        replace(speed_row(control), outcome="oom", reason="out of memory", result=None),
        learning_row(best, 2.0, (), outcome="failed", reason="the loss is NaN"),
    ]
    summary, tables, text = report_of(search, rows)
    assert "none" in summary["Search"]
    assert "out of memory" in summary["Reason"]
    assert "the loss is NaN" in text
    assert not tables
    assert len(failures(search, rows)) == 2
    assert draw_loss_by_time(search.strategy.results(rows), search.space.label, "title", "") is None
    stored = replace(search, directory=StorageDir.of(tmp_path))
    assert write_files(stored, rows, search.strategy.results(rows)) == ["trials.csv"]


def test_best_json_is_a_config_with_its_time_and_its_prediction(
    search: LearningSearch, rows: list[TrialRow], tmp_path: Path
) -> None:
    stored, results = replace(search, directory=StorageDir.of(tmp_path)), search.strategy.results(rows)
    assert write_files(stored, rows, results) == ["trials.csv", "best.json"]
    values = json.loads((tmp_path / "best.json").read_text())
    config = config_from_json(values["config"], "best.json")
    assert config.duration.time_budget == TRAIN_TIME
    assert config.duration.steps is None
    assert config.optimization.schedule == "wsd"
    assert config.optimization.learning_rate == 1e-3
    assert config.duration.cycle.val_batches == 4  # 64 windows in batches of 16
    reference = read_search_reference(str(tmp_path / "best.json"), config.flat())
    assert reference
    assert reference.tied_with == ["learning_rate=0.002"]
    prediction = reference.loss_prediction
    assert prediction
    winner = results.winner
    assert winner
    assert (prediction.loss, prediction.low, prediction.high) == winner.loss(TRAIN_TIME)
    assert prediction.train_tokens == 3_200_000
    # The law falls by a few hundredths of a nat per doubling at the end.
    assert -0.3 < prediction.slope < -0.1
    assert prediction.val_windows == 64
    lines = list(csv.DictReader(io.StringIO((tmp_path / "trials.csv").read_text())))
    assert len(lines) == len(rows)
    assert float(lines[-1]["predicted_loss"]) > 2


def test_a_later_search_reads_the_speeds_of_all_candidates(make_search: MakeSearch, tmp_path: Path) -> None:
    search = make_search(("global_batch=32,64",))
    small, middle, large = search.space.candidates
    rows = [
        *(speed_row(who, speed) for who, speed in ((small, 900.0), (middle, 1000.0), (large, 1100.0))),
        learning_row(small, 2.0), learning_row(middle, 1.7),
    ]  # fmt: skip
    stored = replace(search, directory=StorageDir.of(tmp_path))
    write_files(stored, rows, search.strategy.results(rows))
    later = replace(search.config, config=tmp_path / "best.json")
    device = rows[0].result.device if rows[0].result else ""
    speeds = read_speeds(later, search.space, device)
    assert [speeds[search.space.speed_key(who)].middle for who in (small, middle, large)] == [900.0, 1000.0, 1100.0]
    assert not read_speeds(search.config, search.space, device)


def test_the_final_run_to_a_target_takes_the_upper_end_of_its_time(
    make_search: MakeSearch, rows: list[TrialRow]
) -> None:
    search = make_search(target_loss=2.8)
    results = search.strategy.results(rows)
    winner = results.winner
    assert winner
    reached = winner.seconds(2.8)
    assert reached
    budget = final_run(search, results, winner).duration.time_budget
    assert budget
    assert reached.high <= budget < reached.high + 1 < TRAIN_TIME


def test_the_line_of_a_trial_has_its_loss_and_no_speed(search: LearningSearch, rows: list[TrialRow]) -> None:
    measured = replace(rows[1], noise_scale=Estimate(20, 10, 30))
    line = format_trial(search, measured)
    assert "learn" in line
    assert "learning_rate=0.0003" in line
    assert "after 6m40s" in line
    assert "tokens/s" not in line
    assert "noise scale 20" in line
    assert "tokens/s" in format_trial(search, rows[0])
    assert "seed 2" in format_trial(search, rows[7])
    assert "after 6m40s" in search.describe_part(rows[1])


def test_the_progress_has_the_best_prediction_and_the_time_left(search: LearningSearch, rows: list[TrialRow]) -> None:
    text = format_progress(search, rows[:4])
    assert "best so far: learning_rate=0.001, 2.6" in text
    assert "predicted after 53m20s" in text
    assert search.seconds_left(rows) == 0
    seconds = [search.seconds_left(rows[:count]) for count in (1, 5, 8, 11)]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] > 0


def test_a_dry_run_says_what_the_search_costs(make_search: MakeSearch, capsys: pytest.CaptureFixture[str]) -> None:
    search = make_search(
        ("learning_rate=1e-3,3e-3", "global_batch=32,64"), dry_run=True, gpu="A100", price_per_hour=("1.2",)
    )
    introduce_learning(search)
    text = capsys.readouterr().out
    assert len(text.splitlines()) <= 25
    assert "9 candidates" in text
    assert "learning_rate=0.0003 global_batch=16" in text
    assert "wsd" in text
    assert "64 held-out windows" in text
    assert "cost at most" in text
    stages = [stage for stage, _ in planned_trials(search)]
    assert [stages.count(stage) for stage in ("speed", "learn", "final")] == [3, 9, 10]
    assert f"at most {len(stages)} trials" in " ".join(text.split())


def test_a_finalists_first_seed_continues_its_exploration(search: LearningSearch) -> None:
    explored, first, second = (
        search.trial_seconds("learn"), search.trial_seconds("final"), search.trial_seconds("final", 1)
    )  # fmt: skip
    assert 0 < explored < TRAIN_TIME
    assert first < second < TRAIN_TIME
    assert second == pytest.approx(0.8 * 1600 + 0.2 * (400 + 800 + 1600))


def test_one_held_out_book_is_a_warning(search: LearningSearch, capsys: pytest.CaptureFixture[str]) -> None:
    for books in (1, 2):
        splits = search.manifest.splits | {"val": {"books": books, "tokens": 10**6}}
        introduce_learning(replace(search, manifest=replace(search.manifest, fingerprint="ab12", splits=splits)))
        assert ("one held-out book" in capsys.readouterr().out) == (books == 1)
