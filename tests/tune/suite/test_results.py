"""A ladder's closing table: each rung beside its controls, losses at equal tokens, and verdicts that say how sure."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from trial_rows import changed, trial_row

from infra.cli.units import GB
from infra.storage.directory import StorageDir
from train.config import ResolvedConfig
from train.intervals import Difference
from tune.space import Candidate
from tune.suite.catalog import AA, SUITES
from tune.suite.charts import band
from tune.suite.results import (
    compare_rungs,
    detail_tables,
    effects_table,
    equal_work_table,
    held_out_table,
    legend,
    loss_at,
    results_table,
    summary_fields,
    utilization,
)
from tune.suite.runs import RungResult
from tune.suite.suites import Rung, Suite

CUMULATIVE = Suite("mine", "Mine", {}, (Rung("first", {"batch": 2}), Rung("second", {"batch": 4})), cumulative=True)
FLAT = replace(CUMULATIVE, cumulative=False)


def measured(
    name: str, speed: float, batch: int = 4, reach: float = 10.0, gigabytes: float = 2.0, **changes: Any
) -> RungResult:
    """A rung of ten steps, whose loss at each step is its number; ``changes`` are of its row or of the rung."""
    config = ResolvedConfig.of(global_batch=changes.pop("global_batch", batch), micro_batch=batch, device="cpu")
    row = trial_row(
        name, 1, "rung", 0, Candidate(batch), 2, "ok", "", 1.0, tokens_per_second=speed, low=speed - reach,
        high=speed + reach, memory=round(gigabytes * GB), node="w1", step_tokens=32, attention="flash",
        losses=[float(step) for step in range(1, 11)],
    )  # fmt: skip
    of_rung = {field: changes.pop(field) for field in [*changes] if field in RungResult.__annotations__}
    return RungResult(name, row=changed(row, **changes), config=config, **of_rung)


def test_a_ladder_is_told_in_four_lines() -> None:
    fields = dict(summary_fields(FLAT, ROWS, "NVIDIA H100"))
    for name, numbers in {
        "Ladder": "2 of 3 .*NVIDIA H100",
        "Tokens/s": "first 1,500 .*1,490 to 1,510.* 1,000", "Peak memory": "9.00 GB.* 10.00 GB",
        "Speedup": "x1.500 .*x1.400 to x1.600",
    }.items():  # fmt: skip
        assert re.search(numbers, fields[name]), fields[name]
    alone = dict(summary_fields(FLAT, ROWS[:1], "cpu"))
    assert re.search("1,000 .*990 to 1,003", alone["Tokens/s"])
    assert "no rung is faster" in alone["Speedup"]


def test_each_rung_is_compared_with_its_own_controls(tmp_path: Path) -> None:
    controls = [measured("baseline", 1000), measured("control-1", 1000), measured("control-2", 2000)]
    rungs = [
        measured("first", 3000, step_tokens=64),
        RungResult("refused", "no such GPU"),
        measured("second", 2000, changes_numerics=True),
    ]
    base, first, refused, second = compare_rungs(controls, rungs, StorageDir.of(tmp_path))
    assert refused == RungResult("refused", "no such GPU")
    assert (base.name, base.step, base.total) == ("baseline", None, None)
    assert first.total is not None
    assert second.total is not None
    assert second.step is not None
    assert first.step == first.total
    assert first.total.ratio == pytest.approx(3)
    assert second.total.ratio == pytest.approx(2**0.5), "over the controls around it"
    assert second.step.ratio == pytest.approx(2**0.5 / 3)
    assert (base.loss, first.loss) == (9.5, 5.0), "of the last fifth before the 320 tokens that all have seen"
    assert (first.changes_numerics, second.changes_numerics) == (False, True)


def test_losses_at_equal_tokens_are_those_of_the_last_fifth() -> None:
    row = measured("one", 1000).row
    assert row is not None
    assert row.curve[:2] == [(32, 1.0), (64, 2.0)]
    assert [loss_at(row, tokens) for tokens in (320, 160, 31)] == [9.5, 5.0, None]


def test_the_band_ends_with_the_shortest_control() -> None:
    controls = [[(10, 5.0), (20, 4.0), (30, 3.0)], [(10, 5.5), (20, 3.5)], [(10, 4.5), (20, 3.75)]]
    assert band(controls) == [(10, 4.5, 5.5), (20, 3.5, 4.0)]
    assert band([]) == []


ROWS = [
    measured("baseline", 1000.0, gigabytes=10, low=990.0, high=1003.0, step_tokens=250),
    measured("first", 1500.0, 2, gigabytes=9, predicted_memory=8.5 * GB, step=Difference(1.5, 1.4, 1.6),
             total=Difference(1.5, 1.4, 1.6), mfu=0.5, flops_per_second=1e12, loss=3.25, changes_numerics=True),
    RungResult("refused", "no such GPU"),
    measured("second", 1500.0, 2, gigabytes=9.95, step=Difference(1.0, 0.9, 1.1), attention="cudnn",
             total=Difference(1.5, 1.2, 1.9)),
]  # fmt: skip


def test_a_row_is_told_under_its_headings() -> None:
    table = results_table(CUMULATIVE, ROWS)
    base, first, refused, second = (dict(zip(table.columns, line, strict=True)) for line in table.rows)
    assert first == {
        "rung": "first*", "batch (sequences)": "2", "tokens/s": "1,500", "95% CI": "1,490 to 1,510",
        "vs previous": "x1.500, x1.400 to x1.600", "vs baseline": "x1.500, x1.400 to x1.600",
        "s/step": "0.0213", "peak memory (GB)": "9.00", "predicted (GB)": "8.50",
        "loss (nats/token)": "3.250", "attention kernel": "flash",
    }  # fmt: skip
    assert (base["tokens/s"], base["95% CI"]) == ("1,000", "990 to 1,003"), "whose sides differ"
    assert (base["peak memory (GB)"], base["predicted (GB)"]) == ("10.00", "-")
    assert set(refused.values()) == {"refused", ""}
    assert second["vs previous"] == "(x1.000, x0.900 to x1.100)"
    assert second["vs baseline"] == "x1.500, x1.200 to x1.900"


def test_a_column_that_is_empty_here_is_left_out() -> None:
    """Each rung is over the baseline, and all ran the same kernel of attention."""
    assert results_table(FLAT, [replace(row, loss=None) for row in ROWS[:3]]).columns == (
        "rung", "batch (sequences)", "tokens/s", "95% CI", "vs baseline", "s/step", "peak memory (GB)",
        "predicted (GB)",
    )  # fmt: skip


def test_the_batch_is_shown_with_its_accumulation_and_with_one_that_did_not_fit() -> None:
    shown = [measured("accumulated", 1.0, global_batch=8), measured("retried", 1.0, failed_micro_batches=(64, 56))]
    assert [rung.batch for rung in shown] == ["4 x 2", "4 (64)"]


def test_the_closing_table_times_as_many_steps_as_the_study() -> None:
    timed = {}
    for suite in SUITES.values():
        shown = results_table(suite, ROWS[:1])
        timed[suite.name] = next(cell for cell in zip(shown.columns, shown.rows[0], strict=True) if cell[0][:2] == "s/")
    assert timed.pop("loop") == ("s/2 steps", "0.500")
    assert set(timed.values()) == {("s/step", "0.250")}


def test_the_legend_says_how_sure_the_table_is() -> None:
    refused, drift, *_, total = legend(CUMULATIVE, ROWS, [100.0, 90.0, 110.0, 105.0])
    assert refused == "refused: skipped; no such GPU."
    assert re.findall(r"\d+", drift) == ["4", "100", "105", "90", "110"]
    assert re.search("x1.500 .*x1.200 to x1.900", total)
    assert "not significant" not in total
    tied = replace(ROWS[-1], total=Difference(1.02, 0.98, 1.05))
    assert re.search("x1.020 .*0.980 to x1.050.*not significant", legend(CUMULATIVE, [*ROWS[:2], tied], [100.0])[-1])
    assert not any("Total" in line for line in legend(FLAT, ROWS[:1], [100.0])), "what changes one thing at a time"
    equal = [*ROWS, replace(ROWS[-1], name="third", total=Difference(1.0, 0.9, 1.1))]
    assert legend(AA, equal, [100.0])[-1].startswith("2 of 3 ")


TWICE = [
    measured("baseline", 100.0, 28, gigabytes=40),
    measured("compile, same batch", 200.0, 28, gigabytes=20, step=Difference(2.0, 1.9, 2.1),
             total=Difference(2.0, 1.9, 2.1)),
    measured("compile", 220.0, 48, gigabytes=38, step=Difference(1.1, 1.05, 1.2), total=Difference(2.2, 2.1, 2.3),
             changes_numerics=True),
    measured("flash, same batch", 440.0, 48, gigabytes=19, step=Difference(2.0, 1.9, 2.1),
             total=Difference(4.4, 4.1, 4.6)),
    RungResult("flash", "oom"),
]  # fmt: skip


def test_a_rung_with_a_larger_batch_shows_both() -> None:
    """First the memory that the change frees and the speed that it gains at equal work, then what the batch adds."""
    assert equal_work_table(TWICE, cumulative=True).rows == [
        ("compile", "28", "-50%", "x2.00, x1.90 to x2.10", "48", "+90%", "x1.100, x1.050 to x1.200"),
        ("flash", "48", "-50%", "x2.00, x1.90 to x2.10", "not run", "", ""),
    ]
    failed = [TWICE[0], RungResult("refused", "no such GPU"), *TWICE[1:]]
    assert equal_work_table(failed, cumulative=True) == equal_work_table(TWICE, cumulative=True), "over what ran before"
    (_, *over_baseline) = equal_work_table(TWICE, cumulative=False).rows[1]
    assert over_baseline[:3] == ["48", "-52%", "x4.40, x4.10 to x4.60"]
    assert [tuple(line[:2]) for line in results_table(CUMULATIVE, TWICE).rows[1:4]] == [
        ("compile", "28"),
        ("compile*", "48"),
        ("flash", "48"),
    ]
    assert detail_tables(CUMULATIVE, TWICE) == [equal_work_table(TWICE, cumulative=True)]
    assert equal_work_table(ROWS, cumulative=True) not in detail_tables(CUMULATIVE, ROWS)


def test_a_precision_is_judged_by_the_held_out_losses_of_all_seeds() -> None:
    """Student's interval of three paired differences: 4.303 standard errors."""
    rows = [
        RungResult("baseline"),
        RungResult("noise", held_out=((3.0, 3.01), (3.1, 3.09), (3.2, 3.21))),
        RungResult("close", held_out=((3.0, 3.01), (3.1, 3.12), (3.2, 3.23))),
        RungResult("worse, same batch", held_out=((3.0, 3.1), (3.1, 3.201), (3.2, 3.299))),
        RungResult("better", held_out=((3.0, 2.9), (3.1, 2.999), (3.2, 3.101))),
        RungResult("one seed", held_out=((3.0, 2.0),)),
    ]
    assert held_out_table(FLAT, rows).rows == [
        ("noise", "3.1033", "+0.0033 ±0.0287", "not significant"),
        ("close", "3.1200", "+0.0200 ±0.0248", "not significant"),
        ("worse", "3.2000", "+0.1000 ±0.0025", "higher"),
        ("better", "3.0000", "-0.1000 ±0.0025", "lower"),
    ]
    (part,) = [part for part in detail_tables(replace(FLAT, seeds=3), [*ROWS, *rows[1:2]]) if "3 seeds" in part.title]
    assert part.rows == held_out_table(FLAT, rows[1:2]).rows


def test_what_is_computed_again_counts_as_arithmetic_of_the_hardware() -> None:
    plain = measured("plain", 1.0, flops_per_second=100e12, mfu=0.4, matmul_rate=200e12)
    again = measured("checkpointing", 1.0, flops_per_second=80e12, mfu=0.32, hfu=0.4)
    assert utilization([plain, again, RungResult("refused", "oom")]).rows == [
        ("plain", "100", "40.0%", "-", "50.0%"),
        ("checkpointing", "80", "32.0%", "40.0%", "-"),
    ]
    assert not utilization([measured("plain", 1.0, flops_per_second=1e9)]).rows, "a CPU that the doctor has not seen"
    arithmetic = detail_tables(FLAT, [ROWS[0], plain])[-1]
    assert ("plain", "100", "40.0%", "50.0%") in arithmetic.rows, "without an empty column"


def test_what_helps_memory_and_what_helps_speed_is_said_with_its_number() -> None:
    def rung(name: str, gigabytes: float, ratio: float, spread: float) -> RungResult:
        total = Difference(ratio, ratio - spread, ratio + spread)
        return measured(name, 1.0, gigabytes=gigabytes, total=total)

    rungs = [ROWS[0], rung("smaller", 6.0, 0.8, 0.1), rung("faster", 9.99, 1.5, 0.1), rung("noise", 10.5, 1.1, 0.2),
             rung("wide", 9.0, 3.81, 1.7), RungResult("refused", "no such GPU")]  # fmt: skip
    assert ("first", "yes (-10.0%)", "yes (+50.0%)") in detail_tables(FLAT, ROWS)[0].rows
    assert effects_table(rungs).rows == [
        ("smaller", "yes (-40.0%)", "no (-20.0%)"),
        ("faster", "no (-0.1%)", "yes (+50.0%)"),
        ("noise", "no (+5.0%)", "not significant (+10.0%)"),
        ("wide", "yes (-10.0%)", "yes (+281.0%)"),
    ]
