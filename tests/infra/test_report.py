"""A report shows the figures of a folder's files, and runs no text of theirs; damage is refused in a sentence."""

import base64
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from infra.errors import UserError
from infra.report.__main__ import ReportOptions, report
from infra.report.folders import MOST_ROWS, page_of

ROOT = Path(__file__).resolve().parents[2]
HOSTILE = '<script>alert(1)</script> & "Sons" | <a href="javascript:alert(1)">here</a>'
PIXEL = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNk+A8AAQUBAScY42YAAAAASUVORK5CYII=")

MODEL = {"layers": 1, "heads": 2, "width": 64, "bias": True}
KEY = {"store": "sqlite:////home/mlflow.db", "experiment_id": "3", "run_id": "ee9478f222a7", "journal": ""}
THROUGHPUT = {"tokens_per_second": 4526.4, "low": 4423.0, "high": 4564.0, "steps": 29, "warmup_steps": 1}


def written(folder: Path, files: dict[str, Any]) -> Path:
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    (folder / "picture.png").write_bytes(PIXEL)
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    cycle = {"train_tokens": 5000, "train_loss": 9.9, "val_loss": 8.7, "cycle_tokens": 5500, "seconds": 2.0}
    result = {
        "outcome": "finished", "reason": "reached 30 steps", "steps": 30, "throughput": THROUGHPUT,
        "memory": {"process": 1245540515}, "val_loss": 6.868, "mfu": 0.4213, "train_tokens": 33792,
        "joules_per_million_tokens": 1754.0, "data_fingerprint": "39b00d4e7344", "device": "cpu", "sample": HOSTILE,
    }  # fmt: skip
    second = cycle | {"train_tokens": 10000, "train_loss": 7.0, "val_loss": None}
    cycles = json.dumps(cycle) + "\n" + json.dumps(second) + "\n" + '{"killed'
    config = {"data": "/data/books", "model": MODEL, "steps": 30}
    return written(
        tmp_path / "first", {"result.json": result, "cycles.jsonl": cycles, "config.json": config, "tracking.json": KEY}
    )


@pytest.fixture
def ladder(tmp_path: Path) -> Path:
    row = {
        "name": "baseline", "reason": "", "batch": "4", "memory": 889810000, "predicted_memory": 980110000,
        "speed": 2138.2, "low": 2122.0, "high": 2189.0,
        "total": None, "mfu": None, "loss": 10.6133, "changes_numerics": False,
    }  # fmt: skip
    rung = row | {
        "name": HOSTILE,
        "speed": 2673.8,
        "total": {"ratio": 1.25, "low": 1.2, "high": 1.3, "control_width": 0.1},
        "mfu": 0.31,
    }
    rung |= {"gib": 0.5122, "predicted_gib": 0.4657}  # as earlier versions wrote it
    del rung["memory"], rung["predicted_memory"]
    missing = dict.fromkeys(row) | {"name": "tensor cores", "reason": "TF32 is for GPUs", "changes_numerics": True}
    standings = {"suite": "loop", "device": "cpu", "commit": "eee7f4a", "rows": [row, rung, missing]}
    options = {
        "suite": "loop", "rungs": ["one thing"], "steps": 8, "model": MODEL, "fit": True, "best": None,
        "memory_limit": 4000, "time_budget": 20.0,
    }  # fmt: skip
    return written(tmp_path / "ladder", {"standings.json": standings, "ladder.json": {"options": options, "key": KEY}})


@pytest.fixture
def search(tmp_path: Path) -> Path:
    trials = (
        "micro_batch,compile,key,number,stage,accumulation,outcome,reason,tokens_per_second,low,high,memory,device\n"
        "4,off,m4-5b,1,probe,1,ok,ran its 8 steps,1510.2,1470.0,1540.0,920678400,cpu\n"
        f'8,whole,m8-ff,2,probe,1,oom,"{HOSTILE.replace(chr(34), chr(34) * 2)}",,,,,cpu\n'
    )
    winner = {"micro_batch": 4, "workers": 1, "global_batch": 16, "compile": "off"}
    measured = {"tokens_per_second": 1510.2, "low": 1470.0, "high": 1540.0, "memory_bytes": 920678400}
    kept = {
        "config": {"training": {"model": MODEL, "global_batch": 16}, "memory_limit": 4000000000, "trial_time": 60.0,
                   "name": "search", "dry_run": False, "knobs": []},
        "identity": {"memory_limit": 4000000000, "data": "39b00d4e7344"}, "parent": KEY,
    }  # fmt: skip
    best = {"config": winner, "measured": measured}
    return written(tmp_path / "search", {"trials.csv": trials, "best.json": best, "search.json": kept})


@pytest.fixture
def data(tmp_path: Path) -> Path:
    manifest = {
        "report": {
            "tokens": 1030419, "books_in": 68, "books_kept": 66, "chars": 4153147, "books_dropped": {"empty": 2},
            "tokens_a_book": {"over 1,000,000": 1, "up to 1,000": 5, "up to 30,000": 60},
        },
        "splits": {"train": {"books": 65, "tokens": 975165, "chars": 3928773, "shards": 1}},
        "shards": [{"bytes": 2062442}], "fingerprint": "39b00d4e7344", "inputs": {"files": 3},
        "config": {"sources": ["my books", "sample"], "join_lines": True, "languages": []},
    }  # fmt: skip
    dropped = {"book": HOSTILE, "reason": "empty", "detail": "nothing is left"}
    return written(tmp_path / "tokens", {"manifest.json": manifest, "quarantine.jsonl": json.dumps(dropped) + "\n"})


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    found = {
        "step": 2235.46, "forward": 690.7, "backward": 1414.98, "attention": "flash", "findings": [HOSTILE],
        "by_class": {"matmul": 715.9, "copies": 27.6}, "gaps": {"loader": 3.0},
        "kernels": [{"name": "aten::mm", "kind": "matmul", "calls": 22, "milliseconds": 1401.179}],
    }  # fmt: skip
    return written(tmp_path / "profile", {"profile.json": found})


FACTS = {
    "run": (
        "4,526 tokens/s", "95%: 4,423 to 4,564", "1.25 GB", "6.868", "42.1%", "1.75 kJ", "39b00d4e7344", "sqlite:////home/mlflow.db",
        "python -m train.run --config", "--name first-again",
    ),
    "ladder": (
        "2,138 tokens/s", "1.25x", "0.89", "0.55", "2,122 to 2,189",
        "tensor cores: not run, TF32 is for GPUs", "eee7f4a",
        "python -m train.ladder --suite loop --rungs 'one thing' --steps 8 --model "
        "gpt2-124m,layers=1,heads=2,width=64,bias=true --fit --memory-limit 4000B --time-budget 20s "
        "--name ladder-again",
    ),
    "search": (
        "winner: 4 x 4", "1: 4 x 1",
        "1,510 tokens/s", "4 x 4", "0.92 GB", "of 4.00 GB", "oom", "whole",
        "--global-batch 16 --memory-limit 4000000000B --trial-time 60s --name search-again",
    ),
    "data": (
        "1,030,419", "66 of 68", "4.03", "2.1 MB", "975,165", "Dropped: 2 empty", "up to 30,000",
        "python -m pipeline.tokenize 'my books' sample --out", "--join-lines",
    ),
    "profile": ("2235.46 ms", "flash", "715.90 ms", "aten::mm", "1401.179", "idle: loader"),
}  # fmt: skip


class Reader(HTMLParser):
    """What a browser would show, and the elements that it would make."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.tags, self.loaded = "", set[str](), list[str]()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.loaded += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize(
    ("changes", "shown"),
    [({}, "1.25x"), ({"control_width": 0.3}, "(1.25x)"), ({"low": 0.9}, "(1.25x)"), ({"low": 1.0}, "(1.25x)")],
    ids=["clear", "a control that varied too much", "an interval around 1", "an interval from 1"],
)
def test_a_ratio_that_may_be_no_difference_is_in_brackets(ladder: Path, changes: dict[str, float], shown: str) -> None:
    standings = json.loads((ladder / "standings.json").read_text())
    standings["rows"][1]["total"] |= changes
    (ladder / "standings.json").write_text(json.dumps(standings))
    html = page_of(ladder).html()
    assert f">{shown}<" in html
    assert f"{shown} the baseline<" in html


def test_the_share_of_each_rung_is_drawn_where_they_add_up(ladder: Path) -> None:
    standings = json.loads((ladder / "standings.json").read_text())
    base = standings["rows"][0] | {"speed": 1000.0}
    rows = [base]
    for name, ratio in (("fast", 1.5), ("slow", 1.4), ("last", 2.0)):
        total = {"ratio": ratio, "low": ratio - 0.01, "high": ratio + 0.01, "control_width": 0.1}
        rows.append(base | {"name": name, "speed": 1000 * ratio, "total": total})
    assert 'class="gain"' not in page_of(ladder).html(), "rungs that are each compared with the baseline do not add up"
    (ladder / "standings.json").write_text(json.dumps(standings | {"rows": rows, "cumulative": True}))
    shown = page_of(ladder).html()
    for text in ("+500 (+50%)", "-100 (-10%)", "+600 (+60%)"):
        assert text in shown
    assert (shown.count('class="gain"'), shown.count('class="loss"')) == (2, 1)


def test_the_memory_of_trials_is_drawn_with_the_limit_and_what_nothing_beats(search: Path) -> None:
    """Of four trials one is slower than another and no smaller, and one has run out of memory."""
    heading = "micro_batch,key,number,stage,accumulation,outcome,reason,tokens_per_second,low,high,memory,"
    lines = [heading + "predicted_memory,device"]
    for number, (speed, memory) in enumerate(((900.0, 10**9), (1000.0, 10**9), (1500.0, 3 * 10**9)), 1):
        lines.append(f"{number},m{number},{number},probe,1,ok,,{speed},{speed},{speed},{memory},{memory},cpu")
    lines.append("4,m4,4,probe,1,oom,,,,,,5e9,cpu")
    (search / "trials.csv").write_text("\n".join(lines) + "\n")
    (search / "pareto.png").write_bytes(PIXEL)
    page = page_of(search)
    fast, compared = (part for part in page.parts if '<circle class="bar"' in part)
    assert fast.count("<circle") == compared.count("<circle") == 3
    assert 'class="limit"' in fast
    (front,) = re.findall('class="line line2" d="M([^"]+)"', fast)
    assert len(front.split("L")) == 3, "from the smallest trial to the right, and up to the fastest"
    places = re.findall('cx="([^"]+)" cy="([^"]+)"', compared)
    diagonal = re.findall(r'class="grid" d="M([\d.]+) ([\d.]+)L([\d.]+) ([\d.]+)"', compared)
    (x0, y0, x1, y1) = map(float, diagonal[0])
    for x, y in places:
        assert (float(y) - y0) / (float(x) - x0) == pytest.approx((y1 - y0) / (x1 - x0), rel=0.01), "as predicted"
    assert "data:image/png" not in page.html(), "charts follow the page's colours; the pictures are MLflow's"
    memory, speed = (part for part in page.parts if "by micro-batch" in part)
    assert [part.count('class="limit"') for part in (memory, speed)] == [2, 0], "across the chart, and in its legend"
    assert [part.count("<circle") for part in (memory, speed)] == [3, 3]
    assert re.findall(r'text-anchor="end">([^<]+)</text>', speed) == ["1k", "1.2k", "1.4k", "micro-batch (sequences)"]


def test_trials_are_listed_from_the_fastest_and_drawn_as_the_mean_of_each_batch(search: Path) -> None:
    heading = "micro_batch,key,number,stage,accumulation,outcome,reason,tokens_per_second,low,high,memory,device\n"
    speeds = ((1, 4, "900.0"), (2, 4, "1100.0"), (3, 8, "2000.0"), (4, 16, ""))
    lines = [f"{size},m{size},{number},probe,1,ok,,{speed},,,,cpu\n" for number, size, speed in speeds]
    (search / "trials.csv").write_text(heading + "".join(lines))
    page = page_of(search)
    (table,) = (part for part in page.parts if "<th" in part and "outcome" in part)
    assert re.findall(r'<tr><td class="number">(\d)<', table) == ["3", "2", "1", "4"]
    (drawn,) = (part for part in page.parts if "Speed by micro-batch" in part)
    low, high = re.findall(r'<circle class="dot0" cx="[\d.]+" cy="([\d.]+)"', drawn)
    ticks = {text: float(down) for down, text in re.findall(r'H746"/><text x="58" y="([\d.]+)"[^>]*>([^<]+)<', drawn)}
    assert (float(low), float(high)) == (ticks["1k"] - 4, ticks["2k"] - 4)


def test_a_trial_is_labelled_with_the_knobs_that_are_not_the_first_ones(search: Path) -> None:
    """Also where the first one is not the fastest."""
    trials = (search / "trials.csv").read_text().splitlines()
    other = trials[1].replace("4,off,m4-5b,1,", "4,whole,m4-ff,2,").replace("1510.2", "1700.0")
    (search / "trials.csv").write_text("\n".join([trials[0], other, trials[1]]) + "\n")
    html = page_of(search).html()
    labels = re.findall(r'<text x="222" y="[\d.]+" text-anchor="end">([^<]+)<', html)
    assert labels == ["winner: 4 x 4", "2: 4 x 1, compile whole", "1: 4 x 1"]


def test_a_data_sets_sizes_are_in_order_and_its_dropped_books_few(data: Path) -> None:
    """JSON keeps names by letters, where ``over`` comes first."""
    manifest = json.loads((data / "manifest.json").read_text())
    manifest["report"]["tokens_a_book"]["up to 1,000,000"] = 2
    (data / "manifest.json").write_text(json.dumps(manifest))
    dropped = [json.dumps({"book": f"book {n:03}", "reason": "empty", "detail": ""}) for n in range(MOST_ROWS + 1)]
    (data / "quarantine.jsonl").write_text("\n".join(dropped[:-1]) + "\n")
    assert "The first" not in page_of(data).html()
    (data / "quarantine.jsonl").write_text("\n".join(dropped) + "\n")
    html = page_of(data).html()
    sizes = re.findall(r"<title>((?:up to|over) [\d,]+): ", html)
    assert sizes == ["up to 1,000", "up to 30,000", "up to 1,000,000", "over 1,000,000"]
    assert re.findall(r"<td>book (\d+)</td>", html) == [f"{number:03}" for number in range(MOST_ROWS)]
    assert "The first 200 of 201; quarantine.jsonl lists all." in html


def test_a_ladders_losses_are_lines_over_the_band_of_its_control(ladder: Path) -> None:
    standings = json.loads((ladder / "standings.json").read_text())
    names = ["the last by letters", *(f"rung {number}" for number in range(5)), HOSTILE]
    rows = [standings["rows"][0] | {"name": name} for name in names]
    losses = {name: [[tokens, 9.0 - tokens / 100] for tokens in range(0, 400, 10)] for name in names}
    band = [[tokens, 8.5 - tokens / 100, 9.5 - tokens / 100] for tokens in range(0, 200, 10)]
    (ladder / "loss.png").write_bytes(PIXEL)
    assert page_of(ladder).html().count("data:image/png") == 2, "an earlier ladder has only the picture"
    (ladder / "standings.json").write_text(
        json.dumps(standings | {"rows": rows, "losses": losses, "control_losses": band}, sort_keys=True)
    )
    page = page_of(ladder)
    assert page.html().count("data:image/png") == 1
    (chart,) = (part for part in page.parts if "Training loss" in part)
    drawn = re.findall(r'<path class="(line line\d dash\d)" d="M[^"]+"><title>', chart)
    assert len(set(drawn)) == len(names), "no two lines look the same"
    assert chart.count('class="band"') == 2, "the area, and its entry in the legend"
    seen = Reader()
    seen.feed(chart)
    places = [seen.text.rindex(name) for name in ["control, all runs", *names]]
    assert places == sorted(places), "the legend has the order of the rungs"
    edge = re.findall(r"([\d.]+) ([\d.]+)", re.findall(r'class="band" d="M([^"]+)Z"', chart)[0])
    assert len(edge) == 2 * len(band), "there and back"
    assert edge[0][0] == edge[-1][0]


@pytest.mark.parametrize("kind", FACTS)
def test_a_report_shows_the_facts_and_runs_nothing(kind: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(kind)
    assert report(ReportOptions(folder.name, out=folder.parent)) == 0
    html = (folder / "report.html").read_text()
    page = Reader()
    page.feed(html)
    assert [fact for fact in FACTS[kind] if fact not in page.text] == []
    assert HOSTILE in page.text  # as text
    assert "script" not in page.tags
    assert "<script" not in html
    assert [address[:22] for address in page.loaded] == ["data:image/png;base64,"] * (kind in ("ladder", "profile"))


@pytest.mark.parametrize(
    ("kind", "file"),
    [
        ("run", "result.json"), ("run", "config.json"), ("run", "tracking.json"),
        ("ladder", "standings.json"), ("ladder", "ladder.json"), ("search", "trials.csv"), ("search", "search.json"),
        ("search", "best.json"), ("data", "manifest.json"), ("data", "quarantine.jsonl"), ("profile", "profile.json"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("content", ['{"a": 1}', "[]", '{"tokens": '])
def test_a_damaged_file_is_named_in_one_sentence(
    kind: str, file: str, content: str, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(kind)
    (folder / file).write_text(content)
    with pytest.raises(UserError) as refused:
        page_of(folder)
    assert str(refused.value).startswith(f"{folder / file} is damaged")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("kind", "file"), [("run", "config.json"), ("ladder", "ladder.json"), ("search", "search.json")]
)
def test_a_missing_file_is_named(kind: str, file: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(kind)
    (folder / file).unlink()
    with pytest.raises(UserError, match=f"{file} is missing"):
        page_of(folder)


def test_the_command_refuses_what_it_cannot_report_with_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name, sentence in (("empty", "has nothing to report"), ("nowhere", "there is no folder")):
        command = [sys.executable, "-m", "infra.report", name, "--out", str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        assert (done.returncode, done.stdout) == (2, "")
        assert sentence in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_a_run_that_went_wrong_says_why_and_what_to_try(run: Path) -> None:
    kept = run / "result.json"
    diagnosis = {
        "rows": [["logits", "19.78 GB predicted"], ["torch's message", HOSTILE]],
        "advice": "try again with --loss fused: ", "command": "python -m train.run --loss fused",
    }  # fmt: skip
    kept.write_text(json.dumps(json.loads(kept.read_text()) | {"outcome": "oom", "diagnosis": diagnosis}))
    seen = Reader()
    seen.feed(page_of(run).html())
    for text in ("What was wrong", "19.78 GB predicted", HOSTILE, "try again with --loss fused", "--loss fused"):
        assert text in seen.text
    assert "script" not in seen.tags


def test_a_search_without_a_winner_and_a_run_without_a_speed_are_reported(run: Path, search: Path) -> None:
    (search / "best.json").unlink()
    assert "no winner" in page_of(search).html()
    result = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps(result | {"throughput": None, "val_loss": None, "mfu": None}))
    (run / "cycles.jsonl").unlink()
    assert "reached 30 steps" in page_of(run).html()
