"""A ladder beside the study and a textbook's loop, scaled by the matmul rate, with the first rung that is too slow."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from trial_rows import changed, trial_row

from infra.device.hardware import A100 as CARD
from infra.errors import UserError
from train.config import TrainConfig
from train.estimate.roofline import REACHED_FRACTION_RANGE
from train.intervals import Difference
from train.model_config import PRESETS
from train.resolved import resolve
from tune.space import Candidate
from tune.suite.catalog import A100, LOOP, MEMORY, SUITES
from tune.suite.effects import compare_effects, effects_table
from tune.suite.gpt2_study import A100_MATMUL, compare, matmul_precisions, verdict
from tune.suite.published import EFFECT_STUDIES, STUDY, VALIDATION
from tune.suite.runs import RungResult
from tune.suite.study import check_has_study, draw, predict
from tune.suite.suites import apply_changes
from tune.suite.textbook import (
    GIB,
    PICTURED_RUNGS,
    memory_table,
    read_textbook,
    rooflines_table,
    study_rungs,
)

ROOT = Path(__file__).parents[3]
CONFIGS = dict(study_rungs()) | {
    "baseline": resolve(apply_changes(TrainConfig.of(device="cuda", steps=10), A100.base), CARD)
}


def row(name: str, *, faster: float = 1.0, card: float = 1.0, **changes: Any) -> RungResult:
    """The study's rung ``name`` on a card that multiplies ``card`` times as fast, ``faster`` than that makes it."""
    published, rate = STUDY[name], card * A100_MATMUL[matmul_precisions()[name]]
    speed = published.speed / VALIDATION * card * faster
    total = published.speed * faster / STUDY["baseline"].speed
    trial = trial_row(
        name, 1, "rung", 0, Candidate(published.batch), 1, "ok", "", 1.0, memory=round(published.gib * GIB),
        tokens_per_second=speed, low=0.99 * speed, high=1.01 * speed, node="w1",
    )  # fmt: skip
    made = RungResult(name, row=trial, config=CONFIGS[name], matmul_rate=rate)
    compared = None if name == "baseline" else Difference(total, 0.9 * total, 1.1 * total)
    return replace(made, total=compared, **changes)


def test_the_studys_rungs_are_those_of_the_suite() -> None:
    configs = dict(study_rungs())
    assert list(configs) == list(STUDY)
    assert {name: config.batch.micro_batch for name, config in configs.items()} == {
        name: published.batch for name, published in STUDY.items()
    }
    assert matmul_precisions()["baseline"] == "fp32"
    assert matmul_precisions()["no synchronization"] == "tf32"
    assert matmul_precisions()["mixed precision fp16"] == matmul_precisions()["data-loading workers"] == "bf16"


def test_the_study_agrees_with_itself() -> None:
    (memory, _, speed), notes = compare([row(name) for name in STUDY])
    assert memory.rows[0] == ("baseline", "28", "37.0", "37.0", "22.3", "37.0", "28")
    assert memory.rows[5] == ("compile, same batch", "32", "25.4", "26.9", "16.1", "-", "-")
    assert memory.rows[6] == ("compile", "48", "37.4", "37.2", "22.8", "37.4", "48")
    assert speed.rows[0] == ("baseline", "16,950 / 15,923", "", "x1.00 / x1.00", "4.60 / 4.78", "-", "100%")
    assert speed.rows[4] == (
        "compile",
        "112,200 / 105,400",
        "x2.57 / x2.57",
        "x6.62 / x6.62",
        "33.7 / 31.6",
        "-",
        "100%",
    )
    assert "No rung" in notes[4]
    assert notes[-1].count("x8.7") == 2


def test_the_first_rung_that_is_too_slow_for_the_card_is_named() -> None:
    """A card that multiplies 2.9 times as fast should train 2.9 times as fast; faster than the study is not enough."""
    slow = {"compile": 0.8, "flash attention": 0.5}
    rows = [row(name, card=2.9, faster=slow.get(name, 1.0)) for name in STUDY]
    *_, speed = compare(rows)[0]
    assert [line[-1] for line in speed.rows][3:7] == ["100%", "80%", "50%", "100%"]
    assert "'compile', with 80%" in verdict(rows)
    assert "786 TFLOP/s" in verdict(rows)
    within = [row(name, faster=0.995) for name in STUDY]
    assert "No rung" in verdict(within), "its interval reaches the expected speed"


def test_what_was_not_measured_is_left_open() -> None:
    rows = [row("baseline"), replace(row("compile"), matmul_rate=None), RungResult("flash attention", "oom")]
    assert rows[1].row is not None
    rows.insert(1, replace(rows[1], name="compile, same batch", row=changed(rows[1].row, memory=20 * GIB)))
    (memory, _, speed), _ = compare(rows)
    assert [line[5:] for line in memory.rows[4:9]] == [
        ("-", "-"), ("20.0", "48"), ("37.4", "48"), ("-", "-"), ("-", "-"),
    ]  # fmt: skip
    assert speed.rows[4][2] == "x2.57 / -", "the rung before was not run here"
    assert speed.rows[4][-1] == "-"
    assert speed.rows[1] == ("tensor cores", "40,950 / -", "x2.42 / -", "x2.42 / -", "12.3 / -", "-", "-")
    assert "infra.doctor" in verdict([replace(rows[0], matmul_rate=None)])


def test_a_rung_that_lacks_what_came_before_it_has_no_expected_speed() -> None:
    """Such as compile in TF32, where fp16 could not be run: its matrix products are not those of the study."""
    slow = row("compile", faster=0.5, config=CONFIGS["compile"].replace(precision="tf32"))
    (*_, speed), notes = compare([slow if name == "compile" else row(name) for name in STUDY])
    assert [line[-1] for line in speed.rows][3:6] == ["100%", "-", "100%"]
    assert "compile (precision tf32, not fp16)" in notes[3]
    assert "No rung" in notes[5]


def test_each_published_effect_has_a_rung() -> None:
    assert {*SUITES} == {A100.name, *EFFECT_STUDIES}, "every suite has a study, or a note that says why not"
    for name, study in EFFECT_STUDIES.items():
        assert study.effects.keys() <= {rung.name for rung in SUITES[name].rungs}
        sections = predict(SUITES[name])
        assert sections[-1] == study.source
        assert len(sections) == 1 + bool(study.effects)
    guide = [name for name in EFFECT_STUDIES["memory"].effects if "," not in name]
    assert len(EFFECT_STUDIES["memory"].effects) == 8
    combined = [
        rung.changes for rung in MEMORY.rungs if rung.name in EFFECT_STUDIES["memory"].effects.keys() - {*guide}
    ]
    assert len(combined) == 4
    assert all(changes["micro_batch"] == 4 and changes["checkpointing"] == "full" for changes in combined)


def test_a_suite_of_ones_own_has_no_study() -> None:
    with pytest.raises(UserError, match="a100, loop"):
        check_has_study(replace(A100, name="mine"), PRESETS["tiny"])
    for suite in SUITES.values():
        check_has_study(suite, PRESETS["tiny"])


def test_the_effects_of_a_study_stand_beside_those_measured_here() -> None:
    """Over the rung that the study measured from: the previous one in a cumulative suite, else the baseline."""
    base, half = row("baseline"), row("baseline")
    assert half.row is not None
    half = replace(half, name="checkpointing", row=changed(half.row, memory=round(18.5 * GIB)))
    half = replace(half, total=Difference(0.8, 0.7, 0.9))
    assert effects_table(LOOP, [base, half]).rows == [
        ("accumulation", "x0.44", "-", "-", "-"), ("checkpointing", "x0.50", "x0.50", "x1.25", "x1.25"),
        ("asynchronous copies", "-", "-", "x0.75", "-"), ("compile", "-", "-", "x0.50", "-"),
        ("max-autotune", "-", "-", "x0.15", "-"),
    ]  # fmt: skip
    tie = replace(half, total=Difference(0.8, 0.6, 1.1))
    assert effects_table(LOOP, [base, tie]).rows[1][-1] == "(x1.25)"
    alone = effects_table(replace(LOOP, rungs=LOOP.rungs[:1]), [base, half])
    assert [cells[0] for cells in alone.rows] == ["accumulation"], "the ladder has no other rung"
    assert effects_table(LOOP, []).columns == ("rung", "peak memory: study", "step time: study")


def test_a_cumulative_suite_is_compared_with_the_previous_rung() -> None:
    base, first, second = row("baseline"), row("baseline"), row("baseline")
    assert first.row is not None
    assert second.row is not None
    first = replace(first, name="asynchronous copies", row=changed(first.row, memory=round(37 * GIB)))
    second = replace(
        second, name="max-autotune", row=changed(second.row, memory=round(18.5 * GIB)),
        step=Difference(4.0, 3.8, 4.2), total=Difference(9.0, 8.0, 10.0),
    )  # fmt: skip
    pairs = {pair.rung: pair for pair in compare_effects(SUITES["accumulation"], [base, first, second])}
    assert pairs["max-autotune"].published.time == 0.3, "over compile, not over the baseline"
    assert (pairs["max-autotune"].measured.memory, pairs["max-autotune"].measured.time) == (0.5, 0.25)


def test_the_closing_picture_shows_memory_and_speed_of_both() -> None:
    rows = [row("baseline"), row("tensor cores"), row("compile")]
    absolute = draw(A100, rows, "A100")
    assert absolute
    assert [axes.get_xlabel() for axes in absolute.axes] == ["GPU memory (GiB)", "tokens/s"]
    assert [text.get_text() for text in absolute.axes[0].get_yticklabels()] == [row.name for row in rows]
    smaller = rows[0].config
    assert smaller
    other = [replace(rows[0], config=smaller.replace(micro_batch=4, global_batch=4)), *rows[1:]]
    ratios = draw(A100, other, "A100")
    assert ratios
    assert all("ratio to the baseline" in axes.get_xlabel() for axes in ratios.axes)
    assert rows[2].total
    other[2] = replace(rows[2], total=replace(rows[2].total, ratio=1.25))
    ratios = draw(A100, other, "A100")
    assert ratios
    assert {bar.get_width() for bar in bars(ratios)} >= {1.0, 40_950 / 16_950, 1.25}, "as in the table"
    effects = draw(LOOP, [], "cpu")
    assert effects
    assert {bar.get_width() for bar in bars(effects)} >= {0.15, 0.5, 0.75, 1.25, 0.0}
    assert draw(SUITES["aa"], [], "cpu") is None


def bars(figure: Figure) -> list[Rectangle]:
    return [patch for axes in figure.axes for patch in axes.patches if isinstance(patch, Rectangle)]


def test_a_textbooks_loop_needs_what_the_study_says() -> None:
    assert {name: needed.gib for name, needed in read_textbook().items()} == pytest.approx({
        "baseline": 37.0, "tensor cores": 37.0, "no synchronization": 37.0,
        "mixed precision fp16, same batch": 32.4, "mixed precision fp16": 36.8,
        "compile, same batch": 26.9, "compile": 37.2, "flash attention, same batch": 31.1, "flash attention": 37.9,
        "padded vocabulary": 37.9, "tied weights": 37.7, "data-loading workers": 37.7,
    }, abs=0.06)  # fmt: skip
    lines = memory_table({}).rows
    assert {line[0] for line in lines} == read_textbook().keys()
    for _, batch, study, needed, predicted in lines:
        assert float(needed) == pytest.approx(float(study), rel=0.06)
        assert float(predicted) < 0.75 * float(needed), f"ours at a batch of {batch}"


def test_the_study_reached_a_share_of_its_textbooks_roofline() -> None:
    """The share that is expected of other cards and models is that of its compiled rungs."""
    lines = {line[0]: line for line in rooflines_table().rows}
    assert list(lines) == list(STUDY)
    reached = {name: float(line[-1].rstrip("%")) / 100 for name, line in lines.items()}
    assert reached == pytest.approx({
        "baseline": 0.98, "tensor cores": 0.84, "no synchronization": 0.84, "mixed precision fp16": 0.74,
        "compile": 0.78, "flash attention": 0.72, "padded vocabulary": 0.81, "tied weights": 0.80,
        "data-loading workers": 0.79,
    }, abs=0.006)  # fmt: skip
    compiled = list(STUDY)[list(STUDY).index("compile") :]
    shares = [reached[name] for name in compiled]
    assert (min(shares), max(shares)) == REACHED_FRACTION_RANGE
    for _, study, allowed, ours, expected, _ in lines.values():
        speeds = [float(speed.replace(",", "")) for speed in (study, allowed, ours, expected)]
        assert speeds[3] / speeds[2] == pytest.approx(speeds[0] / speeds[1], rel=1e-3)
        assert speeds[3] > 1.1 * speeds[0]


def test_the_picture_of_the_readme_has_these_numbers() -> None:
    """``python -P tests/benchmarks/study_picture.py tune/pictures/study.svg`` draws it anew."""
    drawn = (ROOT / "tune" / "pictures" / "study.svg").read_text(encoding="utf-8")
    needs, speeds = ({line[0]: line for line in table.rows} for table in (memory_table({}), rooflines_table()))
    for name in PICTURED_RUNGS:
        for number in (*needs[name][2:5], speeds[name][1], speeds[name][2], speeds[name][4]):
            assert f">{number}<" in drawn, (name, number)
