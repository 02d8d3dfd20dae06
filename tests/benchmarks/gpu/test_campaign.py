"""The GPU's campaign by pretended times: what it does when, and that it survives machines, steps and calls that end."""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import archive
import campaign as campaign_file
import pytest
import schedule
import verdict
from archive import read_rows
from campaign import Campaign, parse_options
from card import FULL, REHEARSAL, Card, Extent, Step
from commands import plan_commands
from pretended import NAME, pretend
from processes import PEERS, Processes

from infra.ceilings import read_matmul_rate
from infra.cli import flags
from infra.storage.directory import StorageDir
from train.run import RunOptions
from tune.config import LadderConfig, SearchConfig

REPOSITORY = Path(__file__).parents[3]
FIRST = {"precision": "bf16", "compile": "whole", "attention": "auto", "loss": "fused", "micro_batch": 160}


def make_campaign(folder: Path, **options: Any) -> Campaign:
    """A campaign by pretended times in ``folder``."""
    now = [0.0]
    folder.mkdir(exist_ok=True)
    values = {"execute": partial(pretend, now, folder), "clock": lambda: now[0], "say": lambda line: None} | options
    return Campaign(folder, folder / "bring", **values)


def test_each_borrowed_half_hour_is_used_and_nothing_is_done_twice() -> None:
    machines = campaign_file.schedule()
    rows = [row for machine in machines for row in machine]
    assert max(row["seconds"] for row in rows) <= 240
    assert [row["kind"] for row in rows[:3]] == ["gpu test", "tests", "peer ours"], "the main question comes first"
    assert {row["kind"] for row in machines[0]} >= {"versions", "train", "peer nanogpt"}
    assert all(row["kind"] != "command" for row in machines[0]), "which need Ray"
    assert all(sum(row["seconds"] for row in machine) <= 28 * 60 for machine in machines)
    assert sum(row["seconds"] for row in machines[0]) > 25 * 60
    names = [row["step"] for row in rows if row["outcome"] != "timeout"]
    assert len(set(names)) == len(names)
    assert names[-1] == "ladder sizes"
    assert len(machines) <= 6
    automatic = [row for row in rows if row["group"] == "automatic" and row["outcome"] == "finished"]
    sides = [row["kind"].split()[1] for row in automatic]
    assert sides == ["ours", "nanogpt", "nanogpt", "ours", "ours", "nanogpt"], "the sides take turns, there and back"
    assert automatic[0]["settings"] == FIRST, "the settings of the five-minute test"
    trained = [row["step"] for row in rows if row["kind"] == "train"]
    assert [step for step in trained if "max-autotune" in step] == trained[-1:]
    assert not any(" cudnn " in step for step in trained), "auto has run cuDNN's"


def test_a_quarter_of_an_hour_answers_the_main_question(tmp_path: Path) -> None:
    """Nine minutes and, on the machine that is still warm, three more."""
    made = make_campaign(tmp_path)
    made.work(9 * 60)
    assert sum(row["seconds"] for row in made.rows) <= 9 * 60
    assert verdict.ratio(made.rows, "nanogpt") == pytest.approx(1 / 0.94)
    assert verdict.loss_difference(made.rows, "ours", "nanogpt") == pytest.approx(0.0006)
    made.work(3.5 * 60)
    lines = verdict.summary(made.rows, made.missing)
    assert any("nanoGPT" in line and "x1.064" in line and "1,755" in line for line in lines)
    assert "Not run: " in lines[-1]


def test_a_step_that_fits_into_the_time_that_is_left_is_run_before_a_longer_one() -> None:
    report = pretend([0.0], Path(), Step("gpu test", "gpu test"), 300, Card())
    rows = [{"step": "gpu test", "kind": "gpu test", "settings": {}} | report, passed("tests")]

    def chosen(seconds: float) -> str | None:
        step = schedule.next_step(rows, ("ours", "nanogpt"), FULL, ray=False, seconds=seconds)
        return step and step.name

    assert chosen(300) == "peer ours automatic 0 at 160"
    assert chosen(45) == "versions"
    assert chosen(10) is None


def passed(name: str, **values: Any) -> dict[str, Any]:
    return {"step": name, "kind": name, "settings": {}, "outcome": "finished", "seconds": 1.0, "group": ""} | values


def test_what_can_only_be_slower_or_out_of_memory_is_not_tried() -> None:
    def trained(speed: float | None, outcome: str = "finished", **settings: Any) -> dict[str, Any]:
        settings = FIRST | settings
        return {
            "step": str(settings), "kind": "train", "settings": settings, "outcome": outcome,
            "tokens_per_second": speed,
        }  # fmt: skip

    def pointless(row: dict[str, Any], **settings: Any) -> bool:
        return schedule.is_pointless([trained(400_000), row], FIRST | settings)

    fp16, blocks = "fp16", "blocks"
    assert pointless(trained(310_000, precision=fp16), precision=fp16, micro_batch=32)
    assert not pointless(trained(330_000, precision=fp16), precision=fp16, micro_batch=32)
    assert not pointless(trained(200_000, precision=fp16, compile=blocks), precision=fp16), "either may be slow"
    assert pointless(trained(None, "oom", micro_batch=48))
    assert not pointless(trained(None, "oom", micro_batch=48), micro_batch=32)


@pytest.mark.parametrize(("gate", "count"), [("gpu test", 1), ("tests", 2)])
def test_nothing_is_measured_on_a_gpu_that_fails(tmp_path: Path, gate: str, count: int) -> None:
    now = [0.0]

    def execute(step: Any, seconds: float, card: Card) -> dict[str, Any]:
        row = pretend(now, tmp_path, step, seconds, card)
        return row | ({"outcome": "failed", "reason": "flash is wrong"} if step.name == gate else {})

    made = make_campaign(tmp_path, execute=execute, clock=lambda: now[0])
    assert made.work(60 * 60), "there is nothing left to do"
    assert len(made.rows) == count
    assert schedule.gate_failure(made.rows) == f"{gate} failed: flash is wrong"
    assert any("flash is wrong" in line for line in verdict.summary(made.rows))
    made.despite_failures = True
    made.work(10 * 60)
    assert (len(made.rows) > count) is (gate == "tests"), "only tests may be wrong themselves"
    assert any("flash is wrong" in line for line in verdict.summary(made.rows))


@pytest.mark.parametrize("harm", ["raises", "failed", "timeout"])
def test_a_step_that_fails_or_takes_too_long_costs_no_other(tmp_path: Path, harm: str) -> None:
    now = [0.0]

    def execute(step: Any, seconds: float, card: Card) -> dict[str, Any]:
        row = pretend(now, tmp_path, step, seconds, card)
        if step.kind == "train" and "fused" in step.name:
            if harm == "raises":
                raise ValueError("no JSON")
            return {"outcome": harm, "reason": "too long"}
        return row

    made = make_campaign(tmp_path, execute=execute, clock=lambda: now[0], sides=("ours", "nanogpt"))
    assert made.work(3 * 60 * 60)
    outcomes = {row["step"]: row["outcome"] for row in made.rows}
    assert outcomes["profile"] == outcomes["ceilings"] == "finished"
    assert verdict.ratio(made.rows, "nanogpt") == pytest.approx(1 / 0.94)
    attempts = [row["step"] for row in made.rows if row["step"] == "train auto whole fused 160 bf16"]
    assert len(attempts) == (2 if harm == "timeout" else 1), "once more, after all others"
    assert made.missing == [step.name for step in plan_commands(FIRST, "40.0GB", FULL)]


def test_a_peer_that_fails_has_no_more_turns_and_one_that_runs_out_of_memory_a_smaller_batch(tmp_path: Path) -> None:
    now = [0.0]

    def execute(step: Any, seconds: float, card: Card) -> dict[str, Any]:
        row = pretend(now, tmp_path, step, seconds, card)
        return {"outcome": "failed", "reason": "no transformers"} if step.kind == "peer huggingface" else row

    made = make_campaign(tmp_path, execute=execute, clock=lambda: now[0])
    made.work(60 * 60)
    assert [row["outcome"] for row in made.rows if row["kind"] == "peer huggingface"] == ["failed"]
    sizes = [row["settings"]["micro_batch"] for row in made.rows if row["kind"] == "peer nanogpt"]
    assert sizes[:2] == [80, 60], "80 by the five-minute test"
    assert set(sizes[1:]) == {60}


def gpu_test_row(memory: float, automatic: dict[str, Any] | None, speed: float | None, **facts: Any) -> dict[str, Any]:
    train = {"config": automatic, "tokens_per_second": speed} if automatic else {}
    report = {"steps": [{"name": "train", "values": train}]}
    return {"step": "gpu test", "facts": {"memory": memory, "bf16": True} | facts, "report": report}


@pytest.mark.parametrize(
    ("memory", "bf16", "automatic", "speed", "batch", "order"),
    [
        (85e9, True, 160, 430e3, 480, [160, 96, 120, 60]),
        (42e9, True, 96, 150e3, 480, [96, 60, 80, 40]),
        (24e9, True, 48, 40e3, 240, [48, 30, 40, 20]),
        (15.6e9, False, 24, 8e3, 24, [24, 8, 12, 4]),
        (12e9, True, 20, 15e3, 60, [20, 12, 15, 6]),
        (3e9, True, 1, 5e3, 20, [1]),
    ],
    ids=["H100", "A100", "24 GB", "T4", "RTX 3060", "3 GB"],
)
def test_sizes_follow_the_memory_and_the_global_batch_the_speed(
    memory: float, bf16: bool, automatic: int, speed: float, batch: int, order: list[int]
) -> None:
    """Ten optimizer steps take well below a minute on each card."""
    precision = "bf16" if bf16 else "fp16"
    config = FIRST | {"micro_batch": automatic, "precision": precision, "loss": "plain"}
    card = Card.of([gpu_test_row(memory, config, speed, bf16=bf16)])
    assert card.first == config
    assert card.global_batch % automatic == 0
    assert 1024 * card.global_batch / speed < 8 or card.global_batch == automatic
    assert (card.global_batch, card.order) == (batch, order)
    assert card.precisions[0] == precision


@pytest.mark.parametrize(("memory", "size", "limit"), [(85e9, 80, "40.0GB"), (15.6e9, 24, "14.0GB"), (3e9, 1, "2.7GB")])
def test_sizes_without_the_automatic_settings_are_guessed(memory: float, size: int, limit: str) -> None:
    card = Card.of([gpu_test_row(memory, None, None)])
    assert (card.first["micro_batch"], card.global_batch, card.limit) == (size, 480, limit)


def test_the_error_of_memory_is_that_of_the_prediction() -> None:
    rows = [
        {"kind": "train", "outcome": "finished", "predicted": predicted, "process": process}
        for predicted, process in ((10.0, 10.1), (20.0, 25.0), (40.0, 40.0))
    ]
    assert verdict.memory_error(rows) == pytest.approx(0.2)
    assert verdict.memory_error([]) is None
    steps = [{"name": "train", "values": {"predicted_bytes": 12, "process_bytes": 10}}]
    tested = {"kind": "gpu test", "outcome": "finished", "report": {"steps": steps}}
    assert verdict.memory_error([tested]) == pytest.approx(0.2)


def test_losses_and_speeds_are_compared_within_a_group_of_turns() -> None:
    def row(side: str, group: str, speed: float, *losses: float) -> dict[str, Any]:
        return {
            "step": side, "kind": f"peer {side}", "outcome": "finished", "group": group, "tokens_per_second": speed,
            "losses": losses,
        }  # fmt: skip

    rows = [
        row("ours", "automatic", 100.0, 10.9, 9.0), row("nanogpt", "automatic", 80.0, 10.9, 9.25),
        row("ours", "best", 130.0, 10.9, 9.9), row("nanogpt", "best", 100.0, 10.9, 9.25),
        row("ours", "others", 120.0, 10.9, 9.9), row("huggingface", "others", 60.0, 1.0, 1.0),
    ]  # fmt: skip
    assert verdict.loss_difference(rows, "ours", "nanogpt") == 0.25, "the automatic precision"
    assert verdict.loss_difference(rows[:1], "ours", "nanogpt") is None
    assert verdict.ratio(rows, "nanogpt") == pytest.approx(1.3)
    assert verdict.ratio(rows[:3], "nanogpt") == pytest.approx(1.25), "the best settings have had no turn of nanoGPT's"
    assert verdict.ratio(rows, "huggingface") == pytest.approx(2.0)
    assert verdict.ratio(rows, "llm.c") is None


def test_a_summary_and_a_record_stand_after_every_step(tmp_path: Path) -> None:
    made = make_campaign(tmp_path)
    assert not made.work(60 * 14)
    text = (tmp_path / "bring" / archive.VERDICT).read_text()
    assert all(number in text for number in ("tokens/s: 424,691 (goal: at least 500,000)", "0.4596", "x1.064"))
    reports = tmp_path / "reports"
    reports.mkdir()
    paths = verdict.record(tmp_path / "bring", read_rows(tmp_path / "bring"), tmp_path, reports)
    assert [path.name for path in paths] == ["campaign-nvidia-h100-80gb-hbm3.json", "nvidia-h100-80gb-hbm3.json"]
    assert json.loads(paths[0].read_text())["rows"] == made.rows
    assert json.loads(paths[1].read_text())["facts"]["name"] == NAME
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"step": "train')  # the machine was taken away
    assert len(made.rows) == len((tmp_path / "rows.jsonl").read_text().splitlines()) - 1
    made.work(60 * 60)
    rate = read_matmul_rate(StorageDir.of(tmp_path / "runs"), NAME, "bf16", "any")
    assert rate == 790e12, "which ladders compare with"


def test_a_rehearsal_runs_every_kind_of_step_and_its_record_has_a_name_of_its_own(tmp_path: Path) -> None:
    """Its numbers cannot be taken for measurements, and neither can those of a simulated GPU."""
    now = [0.0]

    def execute(step: Any, seconds: float, card: Card) -> dict[str, Any]:
        row = pretend(now, tmp_path, step, seconds, card)
        return row | ({"simulated": True} if step.kind == "gpu test" else {})

    made = make_campaign(tmp_path, execute=execute, clock=lambda: now[0], extent=REHEARSAL, ray=True)
    while not made.work(60 * 60):
        pass
    full = [row["kind"] for machine in campaign_file.schedule() for row in machine]
    assert {row["kind"] for row in made.rows} == {*full} - {"peer build-nanogpt", "peer llm.c"}
    assert all(row["rehearsal"] for row in made.rows)
    assert not any("tokens_per_second" in row or "losses" in row for row in made.rows)
    lines = verdict.summary(made.rows)
    assert any("rehearsal" in line for line in lines)
    assert any("simulated" in line for line in lines)
    (path,) = verdict.record(tmp_path, made.rows, tmp_path, tmp_path)
    assert path.name == "campaign-rehearsal-simulated-nvidia-h100-80gb-hbm3.json"


def test_a_record_names_no_folder_of_the_machine() -> None:
    row = {"command": "python /a/b/tests/x.py --data /a/b/campaign/tokens", "folders": ["/a/b/campaign", "/a/b"]}
    assert verdict.without_folders(row) == {"command": "python tests/x.py --data tokens"}


@pytest.mark.parametrize("rehearsal", [True, False])
def test_a_rehearsal_and_a_campaign_do_not_share_a_folder(
    tmp_path: Path, command_line: Callable[..., AbstractContextManager[None]], *, rehearsal: bool
) -> None:
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / "manifest.json").touch()
    (tmp_path / "rows.jsonl").write_text(json.dumps(passed("versions", rehearsal=not rehearsal)) + "\n")
    words = ["run", "--folder", str(tmp_path), *["--rehearsal"] * rehearsal]
    with command_line(*words), pytest.raises(SystemExit, match="another --folder"):
        campaign_file.run(parse_options())


def test_tokens_are_needed(tmp_path: Path, command_line: Callable[..., AbstractContextManager[None]]) -> None:
    with command_line("run", "--folder", str(tmp_path)), pytest.raises(SystemExit, match=r"pipeline\.tokenize"):
        campaign_file.run(parse_options())


OPTIONS = {"train.run": RunOptions, "tune.search": SearchConfig, "tune.ladder": LadderConfig}


@pytest.mark.parametrize("extent", [FULL, REHEARSAL], ids=["campaign", "rehearsal"])
@pytest.mark.parametrize("number", range(7))
def test_the_products_commands_have_these_flags(
    extent: Extent, number: int, command_line: Callable[..., AbstractContextManager[None]], tmp_path: Path
) -> None:
    step = [*plan_commands(FIRST, "40GB", extent)][number]
    _, module, *words = step.command
    with command_line(*words):
        options = flags.parse_flags(OPTIONS[module], module, OPTIONS[module]())
    assert options.name == step.run
    assert step.result.startswith(f"runs/{step.run}/")


def test_an_archive_in_parts_keeps_all_rows_and_the_newest_of_the_cache(tmp_path: Path) -> None:
    folder, bring = tmp_path / "here", tmp_path / "bring"
    (folder / "inductor").mkdir(parents=True)
    (folder / "tokens").mkdir()
    (folder / "rows.jsonl").write_text('{"step": "versions"}\n')
    (folder / "tokens" / "manifest.json").write_text("brought again, not sent home")
    for number in range(8):
        path = folder / "inductor" / str(number)
        path.write_bytes(os.urandom(60_000))
        os.utime(path, (number, number))
    archive.pack(folder, bring, 10**6, 100_000)
    assert len(list(bring.iterdir())) == 5
    archive.pack(folder, bring, 250_000, 100_000)
    parts = list(bring.iterdir())
    assert sum(part.stat().st_size for part in parts) <= 250_000
    assert max(part.stat().st_size for part in parts) <= 100_000
    archive.restore(bring, tmp_path / "there")
    assert (tmp_path / "there" / "rows.jsonl").read_text() == '{"step": "versions"}\n'
    assert not (tmp_path / "there" / "tokens").exists()
    remaining = sorted(int(path.name) for path in (tmp_path / "there" / "inductor").iterdir())
    assert remaining == list(range(8 - len(remaining), 8))
    assert len(remaining) >= 3


def test_a_machine_that_ends_while_it_writes_the_archive_loses_no_row(tmp_path: Path) -> None:
    folder, bring, there = tmp_path / "here", tmp_path / "here" / "bring", tmp_path / "there"
    made = make_campaign(folder)
    made.work(60 * 15)
    archive.pack(folder, bring, 10**6, 2000)
    (bring / "campaign.tar.gz.01").write_bytes(b"of another archive")
    archive.restore(bring, there)
    after = make_campaign(there)
    assert after.rows == made.rows
    after.work(60 * 2)
    assert len(after.rows) > len(made.rows)


# --- processes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "outcome", "text"),
    [
        ('print(\'{"outcome": "ok"}\')', "finished", ""),
        ('print(\'{"outcome": "out of memory"}\')', "oom", ""),
        ('import os; print(\'{"outcome": "out of memory"}\', flush=True); os.abort()', "oom", ""),
        ("import sys; sys.exit('no such kernel')", "failed", "no such kernel"),
        ("import os; os.kill(os.getpid(), 11)", "failed", "SIGSEGV"),
        ("import time; print('at step 3'); time.sleep(60)", "timeout", "at step 3"),
    ],
)
def test_a_process_leaves_a_row(tmp_path: Path, code: str, outcome: str, text: str) -> None:
    seconds = 2.0 if outcome == "timeout" else 30.0
    row = Processes(tmp_path).run(Step("versions", "versions", command=("-c", code)), seconds, 480, 40e9)
    assert row["outcome"] == outcome
    assert text in row.get("reason", "")
    assert verdict.describe(passed("versions") | row).startswith(outcome)


@pytest.mark.parametrize("files", [{"rungs.json": "[1]"}, {"trials.csv": "rank"}, {"result.json": "[1]"}], ids=str)
def test_the_row_of_a_command_has_its_rungs_its_trials_or_its_result(tmp_path: Path, files: dict[str, str]) -> None:
    """A search also leaves a result, and a ladder trials."""
    folder = tmp_path / "runs" / "search"
    folder.mkdir(parents=True)
    for name, text in ({"result.json": "[2]"} | files).items():
        (folder / name).write_text(text)
    step = Step("search", "command", command=("-c", ""), result="runs/search/result.json", run="search")
    row = Processes(tmp_path).run(step, 30.0, 480, 40e9)
    assert row["outcome"] == "finished"
    assert row["found"] in ([1], "rank")


def test_tests_that_fail_before_they_are_stopped_have_failed(tmp_path: Path) -> None:
    for progress, outcome in (("..s.F..", "failed"), ("..s...", "timeout")):
        step = Step("tests", "tests", command=("-c", f"import time; print('{progress}'); time.sleep(60)"))
        assert Processes(tmp_path).run(step, 2.0, 480, 40e9)["outcome"] == outcome


def test_an_interrupted_campaign_shows_and_keeps_what_it_has(tmp_path: Path, small_shards: Path) -> None:
    """Also by SIGTERM, with which machines are taken back; the step that runs does not outlive it."""
    (tmp_path / "tokens").symlink_to(small_shards)
    rows = [
        gpu_test_row(40e9, FIRST, None) | passed("gpu test", facts={"memory": 40e9}, device="a GPU"),
        passed("tests"),
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row | {"rehearsal": False}) + "\n" for row in rows))
    process = subprocess.Popen(
        [sys.executable, campaign_file.__file__, "run", "--folder", str(tmp_path), "--out", str(tmp_path / "out")],
        stdout=subprocess.PIPE, text=True, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert process.stdout
    assert process.stdout.readline().startswith("peer ours")
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert "2 of 2 steps finished" in output
    assert (tmp_path / "out" / "campaign.tar.gz.00").exists()
    found = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True)
    assert not found.stdout


SMALL = "tiny,layers=1,width=32,heads=2,context_length=32,vocab_size=257,padded_vocab_size=320"

COMMON = {
    "filelock", "matplotlib", "numpy", "nvidia_ml_py", "psutil", "pyarrow", "requests", "rich", "safetensors", "scipy",
    "tiktoken", "tokenizers", "torch", "urllib3",
}  # fmt: skip
"""This project's dependencies that are in images with torch."""


@pytest.fixture
def bare_site(tmp_path: Path) -> Path:
    """A folder for PYTHONPATH by which dependencies cannot be imported that are neither there nor come along."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    # Not torchao, which transformers imports wherever its metadata are installed.
    texts = (*project["dependencies"], *project["optional-dependencies"]["optuna"])
    names = {re.split(r"[\[<>=; ]", text)[0].replace("-", "_") for text in texts}
    absent = names - COMMON - {name.replace("-", "_") for name in archive.LIGHT}
    assert absent > {"ray", "mlflow", "optuna"}
    site = tmp_path / "site"
    site.mkdir()
    for name in absent:
        (site / f"{name}.py").write_text(f"raise ModuleNotFoundError('No module named {name}', name='{name}')")
    return site


@pytest.fixture
def bare(tmp_path: Path, bare_site: Path, small_shards: Path) -> Campaign:
    """A campaign on a bare machine."""
    (tmp_path / "tokens").symlink_to(small_shards)
    processes = Processes(tmp_path, Extent(SMALL, 4))
    return Campaign(
        tmp_path, tmp_path / "bring", lambda step, seconds, card: processes.run(step, seconds, 4, card.memory)
    )


@pytest.mark.slow
def test_a_trainer_and_ours_among_the_peers_run_without_ray_and_mlflow(bare: Campaign) -> None:
    settings = {"micro_batch": 2, "precision": "fp32", "attention": "sdpa", "compile": "off"}
    step = Step("train", "train", settings)
    found = bare.execute(step, 200, Card())
    assert found["outcome"] == "finished", found
    assert found["tokens_per_second"] > 0
    assert len(found["step_seconds"]) == 10
    assert found["predicted"] > 0
    assert found["attention"] == "flash", "the CPU's own"
    bare.keep(passed("train", settings=settings) | found)
    ours = bare.execute(Step("peer ours 0 at 2", "peer ours", settings), 200, Card())
    assert ours["outcome"] == "finished", ours
    assert ours["tokens_per_second"] > 0
    peer = bare.execute(Step("peer nanogpt 0 at 2", "peer nanogpt", settings), 200, Card())
    rows = [passed("peer ours", group="automatic") | ours, passed("peer nanogpt", group="automatic") | peer]
    difference = verdict.loss_difference(rows, "ours", "nanogpt")
    assert difference is not None
    assert difference < 1e-3, "both start from the same weights"


@pytest.mark.slow
def test_the_five_minute_test_starts_without_ray_and_mlflow(bare: Campaign) -> None:
    row = bare.execute(next(schedule.gates(FULL)), 200, Card())
    assert row["outcome"] == "failed"
    assert "--gpu needs a CUDA GPU" in row["reason"], "here is none"


@pytest.mark.slow
@pytest.mark.parametrize("side", ["huggingface", "nanogpt"])
def test_a_peer_runs_without_ray_and_mlflow(small_shards: Path, bare_site: Path, side: str) -> None:
    if side == "huggingface":
        pytest.importorskip("transformers")
    done = subprocess.run(
        [sys.executable, "-P", PEERS, "--side", side, "--size", "2", "--data", str(small_shards), "--model", SMALL,
         "--global-batch", "4", "--steps", "3", "--compile", "off"],
        capture_output=True, text=True, env=os.environ | {"PYTHONPATH": f"{bare_site}:{REPOSITORY}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["outcome"] == "ok"


def test_the_options_of_a_rehearsal_lead_to_folders_of_its_own(
    command_line: Callable[..., AbstractContextManager[None]],
) -> None:
    def folders(*words: str) -> argparse.Namespace:
        with command_line(*words):
            return parse_options()

    real, rehearsed = folders("run"), folders("run", "--rehearsal")
    assert real.folder != rehearsed.folder
    assert real.bring != rehearsed.bring
    assert rehearsed.out == rehearsed.bring
