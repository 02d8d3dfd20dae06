"""What a person reads of a search: who won, why nobody did, and why a candidate never ran."""

import csv
import io
import json
import re
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from trial_rows import changed, trial_row

from infra.cli.units import format_duration
from infra.device.hardware import A100, cpu_info
from infra.storage.directory import StorageDir
from pipeline.shards import Manifest
from train.config import TrainConfig
from train.intervals import Estimate
from train.resolved import resolve
from train.search_reference import MeasuredSpeed, SearchReference, read_search_reference
from tune.config import SearchConfig
from tune.experiment.search_plan import Search
from tune.experiment.session import format_progress
from tune.reporting.report import (
    ACCUMULATION_NOTE,
    TIE_NOTE,
    best_json,
    csv_text,
    failures,
    headings,
    leaderboard,
    no_winner,
    search_report,
    untried_candidates,
    write_files,
)
from tune.space import Candidate, Space, make_space
from tune.strategy.base import GridStrategy
from tune.strategy.memory_aware import MemorySearcher
from tune.strategy.ranking import eligible_rows
from tune.trial.row import Stage, TrialOutcome, TrialRow

SPACE = make_space(
    resolve(TrainConfig.of(global_batch=16, micro_batch=4), cpu_info()), ("checkpointing=none,selective,full",)
)
OWN = SPACE.control.knobs


def row(
    size: int, outcome: TrialOutcome = "ok", reason: str = "", *, speed: float | None = None, stage: Stage = "probe",
    round: int = 0,
) -> TrialRow:  # fmt: skip
    """A finished trial, at one percent where it has a speed."""
    return trial_row(
        f"m{size}", size, stage, round, Candidate(size, OWN), 16 // size, outcome, reason, 10.0,
        tokens_per_second=speed, low=speed and 0.99 * speed, high=speed and 1.01 * speed, memory=size * 10**9,
        node="w1",
    )  # fmt: skip


def planned(limit: float, space: Space = SPACE) -> Search:
    """A search of every candidate that expects a gigabyte per sequence."""
    memory = MemorySearcher(space, lambda candidate: candidate.micro_batch * 1e9, limit)
    manifest = Manifest.of([], config={}, tokenizer_sha256="", inputs={}, report={})
    control = space.config(space.control)
    directory = StorageDir.of("runs/one")
    config = SearchConfig(memory_limit=int(limit))
    return Search(config, directory, (), manifest, control, int(limit), space, memory, GridStrategy(space))


SEARCH = planned(4e9)


def test_a_limit_that_nobody_asked_for_is_what_there_is() -> None:
    search = replace(SEARCH, limit=25_276_514_304, config=SearchConfig())
    assert "25.3 GB (all available)" in no_winner(search, [])
    assert "25.3 GB (all available)" in search_report(search, []).markdown()


def test_why_nothing_won() -> None:
    assert re.search("no trial .*4GB.* --memory-limit", no_winner(SEARCH, []))
    unfit = [row(4, "over_limit"), row(2, "oom"), row(1, "thrash")]
    assert "no configuration fits 4GB" in no_winner(SEARCH, unfit)
    failed = [row(8, "failed", "no driver"), row(16, "failed", "no driver"), row(1, "failed", "its process died")]
    assert "3 of 3 trials failed" in no_winner(SEARCH, failed)
    assert failures(SEARCH, failed) == [
        "micro-batch 1 x 16: failed: its process died", "micro-batch 8 x 2; micro-batch 16 x 1: failed: no driver",
    ]  # fmt: skip
    assert re.search("1 of 4 .*3 .*4GB", no_winner(SEARCH, [*unfit, failed[0]]))
    again = [row(8, "failed", "only 3 steps"), row(8, "failed", "only 3 steps", round=1)]
    assert failures(SEARCH, again) == ["micro-batch 8 x 2: failed: only 3 steps"], "named once"


def test_who_won_and_by_how_much() -> None:
    rows = [row(4, speed=100.0), row(8, speed=150.0), row(16, "oom", "out of memory")]
    first, control, last = leaderboard(SEARCH, rows)
    assert first == ("8 x 2", "150", "148 to 152", "x1.500", "8.00", "1", "winner")
    assert control == ("4 x 4", "100", "99 to 101", "-", "4.00", "1", "control")
    assert last == ("16 x 1", "-", "", "", "16.00", "1", "oom")
    assert failures(SEARCH, rows) == ["micro-batch 16 x 1: oom: out of memory"]
    best = best_json(SEARCH, rows)
    assert best
    assert (best["config"]["micro_batch"], best["config"]["global_batch"]) == (8, 16)
    assert best["measured"] == {
        "name": "one", "tokens_per_second": 150.0, "speed_low": 148.5, "speed_high": 151.5,
        "memory_bytes": 8 * 10**9, "runs": 1, "tied_with": [],
        "device": "cpu", "machines": ["w1"], "data_wait_fraction": None, "telemetry": {}, "loss_prediction": None,
        "other_speeds": [
            {"changes": {"micro_batch": 4}, "tokens_per_second": 100.0, "speed_low": 99.0, "speed_high": 101.0}
        ],
    }  # fmt: skip
    assert best_json(SEARCH, [row(16, "oom")]) is None


def test_the_winner_is_kept_with_what_its_machine_did() -> None:
    """For a run that is slower than it was."""
    rows = [
        changed(
            row(8, speed=150.0 + number), device="NVIDIA H100", node="w1", data_wait_fraction=0.01 * number,
            telemetry={"system/gpu_sm_clock_mhz": 1700.0 + 100 * number},
        )
        for number in (0, 1)
    ]  # fmt: skip
    best = best_json(SEARCH, [*rows, row(4, speed=100.0)])
    assert best
    assert {name: best["measured"][name] for name in ("device", "machines", "data_wait_fraction", "telemetry")} == {
        "device": "NVIDIA H100", "machines": ["w1"], "data_wait_fraction": pytest.approx(0.005),
        "telemetry": {"system/gpu_sm_clock_mhz": 1750.0},
    }  # fmt: skip


def test_a_search_is_told_in_three_lines_above_its_table() -> None:
    rows = [row(4, speed=100.0), row(8, speed=150.0), row(16, "oom", "tried | to <allocate>")]
    first, _, table, *other_sections = search_report(SEARCH, rows).markdown().split("\n\n")
    what, numbers, following = first.split("  \n")
    assert re.search("16 sequences .* 4GB: micro-batch 8 x 2; 3 trials in 30s", what)
    assert re.search("150 .*148 to 152.* 8.00 GB of 4.00 GB .*1.500", numbers)
    assert f"--config {SEARCH.directory}/best.json" in following
    assert table.splitlines()[2] == "| 8 x 2 | 150 | 148 to 152 | x1.500 | 8.00 | 1 | winner |"
    assert table.splitlines()[-1].endswith("| oom |")
    assert "- micro-batch 16 x 1: oom: tried | to <allocate>" in other_sections
    assert "1 of 1 trials failed" in search_report(SEARCH, [row(8, "failed", "no driver")]).markdown()


def test_a_tie_is_marked_and_named() -> None:
    rows = [row(4, speed=100.0), row(8, speed=101.0), row(1, speed=50.0)]
    assert TIE_NOTE in search_report(SEARCH, rows).markdown()
    assert [line[-1] for line in leaderboard(SEARCH, rows)] == ["winner, tie", "tie, control", ""]
    best = best_json(SEARCH, rows)
    assert best
    assert best["measured"]["tied_with"] == ["4 x 4"]
    assert TIE_NOTE not in search_report(SEARCH, rows[::2]).markdown()


def test_the_table_fits_a_terminal_without_breaking_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    knobs = ("compile=max-autotune,reduce-overhead", "checkpointing=none,selective,full", "loss_chunks=1,8")
    space = make_space(resolve(TrainConfig.of(global_batch=480, micro_batch=32), A100), knobs)
    longest = max(space.combinations, key=lambda knobs: len(space.knobs_label(knobs)))
    rows = [
        changed(row(32, speed=123456.0), candidate=space.control, memory=39 * 10**9),
        replace(row(48, speed=123457.0), candidate=Candidate(48, longest), stage="confirm", round=1),
        replace(row(60, "over_limit", "the process used 41.00 GB of 40.00 GB"), candidate=Candidate(60, longest)),
    ]
    monkeypatch.setenv("COLUMNS", "80")
    search_report(planned(40e9, space), rows).show()
    table, _ = capsys.readouterr().out.split("- memory is")
    assert max(map(len, table.splitlines())) <= 80
    assert {*space.knobs_label(longest).split(), "micro-batch", "over_limit", "123,457"} <= set(table.split())


def test_the_best_so_far_is_of_complete_rounds() -> None:
    rows = [row(4, speed=100.0), row(8, speed=150.0)]
    left = len(SPACE.candidates()) - len(rows)
    text = format_progress(SEARCH, rows)
    assert all(expected in text for expected in ("8 x 2, 150 tokens/s", "20s", format_duration(10.0 * left)))
    two_at_a_time = replace(SEARCH, config=replace(SEARCH.config, max_concurrent_trials=2))
    assert format_duration(5.0 * left) in format_progress(two_at_a_time, rows)
    rows += [row(4, speed=200.0, stage="confirm", round=1)]
    assert "8 x 2, 150 tokens/s" in format_progress(SEARCH, rows)
    assert "none" in format_progress(SEARCH, [row(4, "failed")])


def test_a_search_that_lost_its_winner_leaves_none(tmp_path: Path) -> None:
    """As one that is resumed with a row less may."""
    search = replace(SEARCH, directory=StorageDir.of(tmp_path))
    won = [tmp_path / name for name in ("trials.csv", "best.json")]
    assert write_files(search, [row(4, speed=100.0)]) == [path.name for path in won]
    assert all(path.stat().st_size for path in won)
    assert write_files(search, [row(4, "oom")]) == ["trials.csv"]
    assert not won[1].exists()


def test_a_search_of_two_axes_shows_each_global_batch_and_the_best_of_each_accumulation() -> None:
    space = make_space(SPACE.base, (), (1, 2))
    rows = [
        replace(row(size, speed=speed), candidate=Candidate(size, (("accumulation", times),)))
        for size, times, speed in ((4, 1, 100.0), (8, 1, 110.0), (4, 2, 115.0), (8, 2, 130.0))
    ]
    free = planned(16e9, space)
    assert headings(space).index("global batch (sequences)") == 1
    assert {cells[0]: (cells[1], cells[-1]) for cells in leaderboard(free, rows)} == {
        "8 x 2": ("16", "winner, fastest with x 2"), "4 x 2": ("8", ""), "8 x 1": ("8", "fastest with x 1"),
        "4 x 1": ("4", "control"),
    }  # fmt: skip
    assert ACCUMULATION_NOTE in search_report(free, rows).sections
    assert ACCUMULATION_NOTE not in search_report(SEARCH, [row(4, speed=100.0)]).sections
    best = best_json(free, rows)
    assert best
    assert (best["space"], best["config"]["micro_batch"], best["config"]["global_batch"]) == (
        "free global batch",
        8,
        16,
    )


def test_each_candidate_that_never_ran_has_its_reason() -> None:
    texts = untried_candidates(planned(6e9), [row(4, "oom"), row(1, speed=100.0)])
    assert "micro-batch 8, 16: a smaller micro-batch did not fit" in texts
    assert "micro-batch 8, 16 with 2 combinations of knobs: predicted not to fit" in texts
    failed = untried_candidates(planned(6e9), [row(4, "failed", "no driver")])
    assert "micro-batch 1, 2: the search ended because no trial had a speed" in failed


def test_a_combination_whose_only_trial_failed_is_not_called_slow() -> None:
    other = SPACE.combinations[1]
    rows = [row(4, speed=100.0), replace(row(16, "failed", "no kernel"), candidate=Candidate(16, other))]
    texts = untried_candidates(planned(32e9), rows)
    label = SPACE.knobs_label(other)
    assert f"micro-batch 1, 2, 4, 8 with {label}: another micro-batch with the same knobs failed" in texts


def test_all_rows_as_csv() -> None:
    lines = list(csv.DictReader(io.StringIO(csv_text([row(4, speed=100.0), row(16, "oom", "too much, by far")]))))
    assert [(line["micro_batch"], line["checkpointing"], line["outcome"]) for line in lines] == [
        ("4", "none", "ok"), ("16", "none", "oom")
    ]  # fmt: skip
    assert lines[1]["reason"] == "too much, by far"
    assert [line["candidate_tokens_per_second"] for line in lines] == ["100.0", ""]
    assert "step_seconds" not in lines[0]


def test_a_ratio_to_the_control_is_in_brackets_where_no_difference_is_shown() -> None:
    def row(size: int, speed: float, width: float) -> TrialRow:
        return trial_row(
            f"{size}", 1, "probe", 0, Candidate(size), 1, "ok", "", 10.0, tokens_per_second=speed,
            low=speed * (1 - width), high=speed * (1 + width), memory=1, node="w1",
        )  # fmt: skip

    space = make_space(resolve(TrainConfig.of(global_batch=8, micro_batch=2), cpu_info()), ())

    def ratios(*rows: TrialRow) -> dict[str, str]:
        assert len(eligible_rows(rows)) == len(rows)
        return {cells[0].split()[0]: cells[3] for cells in leaderboard(planned(8e9, space), rows)}

    fast, close = row(8, 1500, 0.02), row(4, 1020, 0.02)
    assert ratios(fast, close, row(2, 1000, 0.02)) == {"8": "x1.500", "4": "(x1.020)", "2": "-"}
    assert ratios(fast, row(2, 1000, 0.45)) == {"8": "x1.500", "2": "-"}, "however wide the control's interval is"
    assert ratios(fast, row(2, 1000, 0.5)) == {"8": "(x1.500)", "2": "-"}, "they touch"
    assert ratios(fast) == {"8": "-"}, "the control has no speed"


def test_what_the_trials_measured_is_what_a_later_run_is_compared_with(
    distinct: Callable[..., Any], tmp_path: Path
) -> None:
    """From the rows of a winner that ran on two machines, through best.json, to the reference: each value by its name.

    The other machine is half as fast, of which the reference knows nothing.
    """
    search = replace(SEARCH, directory=StorageDir.of(tmp_path / "fast"))
    search.folder.mkdir()
    base = changed(
        distinct(TrialRow, candidate=Candidate(8, OWN), stage="probe", outcome="ok", number=1, round=0, node="w1"),
        memory=3 * 10**9, tokens_per_second=150.0, low=148.0, high=152.0, telemetry={"clock": 1700.0, "power": 300.0},
    )  # fmt: skip
    control = changed(base, candidate=Candidate(4, OWN), key="c", tokens_per_second=100.0, low=99.0, high=101.0)
    slow = changed(
        base, number=3, key="w2", stage="control", node="w2", candidate=Candidate(8, OWN), memory=9 * 10**9,
        tokens_per_second=75.0, low=74.0, high=76.0, telemetry={},
    )  # fmt: skip
    again = changed(
        slow, number=4, key="again", stage="confirm", round=1, memory=4 * 10**9, data_wait_fraction=0.5,
        telemetry={"clock": 1500.0},
    )  # fmt: skip
    also = replace(control, number=5, key="also", stage="confirm", round=1)
    write_files(search, [base, control, slow, again, also])
    table = list(csv.DictReader((search.folder / "trials.csv").open()))
    assert [float(line["tokens_per_second"]) for line in table] == [150.0, 100.0, 75.0, 75.0, 100.0], "as measured"
    stored_json = json.loads((search.folder / "best.json").read_text())
    assert stored_json["measured"]["memory_bytes"] == 4 * 10**9, "the most that it took in any of its own trials"
    assert stored_json["measured"]["runs"] == len([again])
    reference = read_search_reference(str(search.folder / "best.json"), search.space.config(base.candidate).flat())
    assert reference
    assert reference.speed.middle == pytest.approx(150.0, rel=0.01), "as on the first machine"
    assert base.result
    assert reference == SearchReference(
        "fast", *reference.speed, 4 * 10**9, runs=1, tied_with=[], device=base.result.device, machines=["w1", "w2"],
        data_wait_fraction=((base.result.data_wait_fraction or 0.0) + 0.5) / 2,
        telemetry={"clock": 1600.0, "power": 300.0},
        other_speeds=[MeasuredSpeed({"micro_batch": 4}, 100.0, 99.0, 101.0)],
    )  # fmt: skip


def test_the_table_of_trials_has_every_field_of_a_row(distinct: Callable[..., Any]) -> None:
    """And the measurements of its result, each by its name, but for what has a value for each step or metric."""
    row = replace(distinct(TrialRow, candidate=Candidate(8, OWN)), noise_scale=Estimate(12.0, 8.0, 20.0))
    (line,) = csv.DictReader(io.StringIO(csv_text([row])))
    nested = {"candidate", "result", "step_seconds", "losses", "labels"}
    own = {field.name: getattr(row, field.name) for field in fields(row) if field.name not in nested}
    result, memory, speed = row.result, row.result.memory, row.result.throughput
    names = ("flops_per_second", "mfu", "hfu", "data_wait_fraction", "train_loss", "val_loss", "device", "attention")
    measured = {name: getattr(result, name) for name in names} | {
        "tokens_per_second": speed.tokens_per_second, "speed_low": speed.low, "speed_high": speed.high,
        "memory": memory.process, "memory_source": memory.process_source, "allocated": memory.allocated,
        "reserved": memory.reserved, "allocator_retries": memory.allocator_retries,
        "compile_seconds": row.compile_seconds, "noise_scale": row.noise_scale.middle,
        "rungs": " ".join(f"{rung.seconds:g}s:{rung.loss:.4f}" for rung in row.rungs),
    }  # fmt: skip
    assert {n: line[n] for n in line if n not in ("micro_batch", *dict(OWN)) and not n.startswith("candidate_")} == {
        name: str(value) for name, value in (own | measured).items()
    }
