"""Two rungs side by side: their time by class of kernel, their memory by part, and both timelines."""

import json
from pathlib import Path
from typing import Any

import pytest
from trial_rows import trial_row

from infra.errors import UserError
from train.config import ResolvedConfig
from train.estimate.memory import predict_peak
from train.profile.memory_timeline import CATEGORIES, POINTS
from tune.config import LadderConfig
from tune.space import Candidate
from tune.suite.profiles import check_profiled_rungs, draw_timelines, profile_rungs, profile_tables
from tune.suite.runs import RungResult


def rung(name: str, gigabytes: float, **settings: Any) -> RungResult:
    config = ResolvedConfig.of(global_batch=4, micro_batch=4, device="cpu", **settings)
    row = trial_row(name, 1, "rung", 0, Candidate(4), 2, "ok", "", 1.0, memory=round(gigabytes * 1e9), node="w1")
    return RungResult(name, row=row, config=config)


RUNGS = [rung("baseline", 3.0), rung("full / blocks", 2.0, checkpointing="full"), RungResult("flash", "oom")]
TIMES = {
    "baseline": {
        "steps": 2, "step": 10.0, "forward": 3.0, "backward": 6.0, "by_class": {"matmul": 8.0, "copies": 1.0},
        "gaps": {},
    },
    "full / blocks": {
        "steps": 2, "step": 15.0, "forward": 3.0, "backward": 11.0, "by_class": {"matmul": 12.0}, "gaps": {"x": 1.0},
    },
}  # fmt: skip


def write(rung: RungResult, folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "profile.json").write_text(json.dumps(TIMES[rung.name]))
    rows = [[0, *[size] * len(CATEGORIES)] for size in (10**6, 10**9, 10**7)]
    (folder / POINTS).write_text(json.dumps([[0.0, 1000.0, 2000.0], rows]))


def test_two_profiles_stand_side_by_side(tmp_path: Path) -> None:
    recorded: list[str] = []

    def record(rung: RungResult, folder: Path) -> None:
        recorded.append(rung.name)
        write(rung, folder)

    names = ("baseline", "full / blocks")
    profile_rungs(names, RUNGS, tmp_path / "profiles", record)
    profiles = profile_rungs(names, RUNGS, tmp_path / "profiles", record)
    assert recorded == [*names], "a profile is recorded once"
    assert {path.name for path in (tmp_path / "profiles").iterdir()} == {"baseline", "full-blocks"}
    time, memory = profile_tables(profiles)
    assert time.columns[1:3] == names
    rows = {row[0]: list(row[1:]) for row in time.rows}
    assert rows["step"] == ["10.00", "15.00", "+5.00", "x1.50"]
    assert rows["kernels: copies"] == ["1.00", "0.00", "-1.00", "x0.00"]
    assert rows["idle: x"] == ["0.00", "1.00", "+1.00", "-"]
    rows = {row[0]: list(row[1:]) for row in memory.rows}
    assert rows["measured peak of the process"] == ["3.000", "2.000", "-1.000"]
    config = RUNGS[1].config
    assert config
    assert rows["predicted activations"][1] == f"{predict_peak(config.step).activations / 1e9:.3f}"
    figure = draw_timelines(profiles, "cpu")
    assert figure
    first, second = figure.axes
    assert first.get_ylim() == second.get_ylim()
    assert first.get_ylim()[1] > len(CATEGORIES) * 0.99, "in GB"
    assert first.get_xlim() == second.get_xlim() == (0, 2)
    texts = [{text.get_text() for text in axes.texts} for axes in figure.axes]
    assert [name in shown for name, shown in zip(names, texts, strict=True)] == [True, True]
    (tmp_path / "profiles" / "baseline" / POINTS).unlink()
    assert draw_timelines(profile_rungs(names, RUNGS, tmp_path / "profiles", record), "cpu") is None


def test_what_cannot_be_profiled_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--profile 'flash' was not measured: oom\."):
        profile_rungs(("baseline", "flash"), RUNGS, tmp_path, write)
    with pytest.raises(UserError, match=r"--profile 'flush' is not a rung.*Choose from baseline, flash"):
        check_profiled_rungs(("baseline", "flush"), ("baseline", "flash"))
    for names in (("baseline",), ("a", "a"), ("a", "b", "c")):
        with pytest.raises(UserError, match=r"--profile .* must name two rungs"):
            LadderConfig(profile=names)
