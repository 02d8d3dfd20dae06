"""Whole commands, trials and rungs on a GPU: memory by NVML, the kernel that ran, and no speed that cannot be."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from trainers import make_trainer

from infra.device.gpu import read_gpu
from train.config import Cycle, ResolvedConfig
from train.model_config import ModelConfig
from train.resolved import resolve_local
from tune.space import Candidate
from tune.suite.catalog import LOOP
from tune.suite.suites import Rung, apply_changes
from tune.trial.row import Proposal, TrialRow
from tune.trial.run import StopRule, TrialRequest, run

pytestmark = pytest.mark.gpu

pretended = pytest.mark.skipif("PRETENDED_GPU" not in os.environ, reason="needs a GPU whose kernels do nothing")
LIMIT = 3 * 10**9


@pytest.fixture
def config(small_shards: Path) -> ResolvedConfig:
    model = ModelConfig(layers=2, heads=2, width=64, context_length=32, vocab_size=257, padded_vocab_size=320)
    return ResolvedConfig.of(
        data=str(small_shards), model=model, micro_batch=4, global_batch=8, steps=6, cycle=Cycle(3, 0), warmup_steps=2,
        device="cuda", precision="bf16", attention="auto", allocator="expandable",
    )  # fmt: skip


def trial(config: ResolvedConfig, limit: int) -> TrialRow:
    proposal = Proposal(Candidate(config.batch.micro_batch), "probe")
    values = config.replace(steps=30, cycle=Cycle(1, 0), keep_checkpoints=0)
    try:
        row, trace = run(TrialRequest("m4", 1, "m4", proposal, values, "here", limit, StopRule(60.0, 0.001)))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert row.outcome != "failed", trace or row.reason
    return row


def test_a_trial_is_judged_by_the_memory_of_its_process(config: ResolvedConfig) -> None:
    row = trial(config, LIMIT)
    kernel = "cudnn" if torch.cuda.get_device_capability()[0] == 9 else "flash"
    assert row.result
    assert (row.outcome, row.result.memory.process_source, row.result.attention) == ("ok", "nvml", kernel)
    assert row.speed
    memory = row.result.memory
    assert memory.reserved
    assert memory.reserved < memory.process <= LIMIT
    state = read_gpu()
    assert state
    assert state.memory_used
    assert row.result.device == state.name
    telemetry = row.result.telemetry
    assert telemetry["system/gpu_memory_gb"] == pytest.approx(state.memory_used / 1e9, rel=0.5)
    assert telemetry["system/gpu_power_watts"] > 0


def test_a_trial_above_its_limit_is_no_failure(config: ResolvedConfig) -> None:
    wide = config.replace(model=replace(config.model, padded_vocab_size=2**20))
    assert trial(wide.replace(micro_batch=8), LIMIT).outcome == "oom"


@pytest.mark.parametrize("rung", [rung for rung in LOOP.rungs if "max-autotune" not in rung.changes.values()], ids=str)
def test_a_rung_of_the_loop_trains(config: ResolvedConfig, rung: Rung) -> None:
    """What the suite ``loop`` compares differs in speed, not in losses."""

    def losses(changes: dict) -> list[float]:
        kept = {name: value for name, value in changes.items() if name not in ("model", "batch", "micro_batch")}
        result = make_trainer(
            resolve_local(apply_changes(config, {**kept, "micro_batch": changes.get("micro_batch", 8) // 4 or 1}))
        ).run()
        return [loss for _, loss, _ in result.loss_curve]

    assert losses({**LOOP.base, **rung.changes}) == pytest.approx(losses({**LOOP.base}), abs=2e-3)


REPLAYS = """
import json, sys, torch
from train.config import config_from_json
from train.data.sources import source_of
from train.loop.trainer import Trainer
from train.resolved import resolve_local
replayed, replay = [], torch.cuda.CUDAGraph.replay
torch.cuda.CUDAGraph.replay = lambda graph: (replayed.append(id(graph)), replay(graph))
config = resolve_local(config_from_json(json.loads(sys.argv[1]), "here"))
data = source_of(config.dataset).open(config.model, config.batch, config.duration.cycle)
print(Trainer(config, data).run().outcome)
print(len(replayed), len(set(replayed)))
"""


def test_the_steps_after_the_first_replay_cuda_graphs(config: ResolvedConfig) -> None:
    """In a process that compiles; a call that a capture forbids would end it."""
    steps, micro = 6, resolve_local(config).batch.accumulation
    values = json.dumps(config.replace(compile="reduce-overhead", steps=steps).to_json())
    done = subprocess.run([sys.executable, "-c", REPLAYS, values], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    outcome, *counts = done.stdout.split()
    replays, graphs = map(int, counts)
    assert outcome == "finished"
    assert graphs >= 2, "of the forward and the backward pass"
    assert replays >= 2 * micro * (steps - 2)


def run_idle(shards: Path, *flags: str, **environment: str) -> tuple[dict[str, Any], str]:
    """The result of GPT-2 124M in a process whose kernels do nothing, and what it printed."""
    command = [sys.executable, "-m", "train.run", "--data", str(shards), "--model", "gpt2-124m", "--name", "idle"]
    done = subprocess.run(
        [*command, "--compile", "off", "--keep-checkpoints", "0", *flags],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(Path("runs/idle/result.json").read_text()), done.stdout


@pretended
@pytest.mark.usefixtures("working_folder")
def test_kernels_that_do_nothing_have_no_speed(small_shards: Path) -> None:
    flags = "--precision fp32 --micro-batch 4 --global-batch 4 --steps 8 --cycle 4+0"
    result, printed = run_idle(small_shards, *flags.split())
    assert (result["throughput"], result["mfu"]) == (None, None), printed
    assert "the measurement is invalid" in " ".join(printed.split())
    assert result["memory"]["process_source"] == "nvml"


@pretended
@pytest.mark.parametrize(("gpu", "kernel"), [("A100", "flash"), ("H100", "cudnn")])
@pytest.mark.usefixtures("working_folder")
def test_the_header_names_the_kernel(small_shards: Path, gpu: str, kernel: str) -> None:
    flags = "--micro-batch 1 --global-batch 1 --steps 2 --cycle 2+0"
    result, printed = run_idle(small_shards, *flags.split(), PRETENDED_GPU=gpu)
    assert gpu in result["device"]
    assert result["attention"] == kernel
    assert f"attention {kernel}" in printed


@pretended
def test_the_doctor_examines_the_gpu(working_folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "infra.doctor", "--quick"], capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert torch.cuda.get_device_name() in done.stdout
    assert "flash available" in done.stdout
