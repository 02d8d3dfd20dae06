"""A limit on a process's memory: what the process took at its peak, and what becomes of a run that takes more."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from mlflow.tracking import MlflowClient
from trainers import make_trainer

from infra.device.gpu import GpuState
from infra.tracking.store import store_uri
from train import run
from train.config import Cycle, ResolvedConfig
from train.loop import memory, memory_limit
from train.loop.memory import AllocatorStats
from train.loop.memory_limit import MemoryLimit
from train.model_config import ModelConfig
from train.run_files.progress import checkpoints_in

GPU = torch.device("cuda", 0)
ROOT = Path(__file__).parents[3]


@pytest.fixture
def config(small_shards: Path, small_model: ModelConfig) -> ResolvedConfig:
    return ResolvedConfig.of(
        data=str(small_shards), model=small_model, global_batch=8, micro_batch=4, steps=9, cycle=Cycle(3, 1),
        device="cpu",
    )  # fmt: skip


def test_a_run_over_its_limit_ends_and_keeps_what_it_trained(config: ResolvedConfig, tmp_path: Path) -> None:
    result = make_trainer(config, checkpoints=tmp_path, limit=MemoryLimit.apply(10**6, "cpu")).run()
    assert (result.outcome, result.steps) == ("over_limit", 1)
    assert re.fullmatch(r"the process used \d+\.\d\d GB \(rss\), more than the limit of 0\.00 GB", result.reason)
    assert [path.name for path in checkpoints_in(tmp_path)] == ["step-00000001"]
    resumed = make_trainer(config, resume=tmp_path / "step-00000001", limit=MemoryLimit.apply(10**12, "cpu")).run()
    assert (resumed.outcome, resumed.steps) == ("finished", 9)


def test_what_only_the_end_takes_counts_too(config: ResolvedConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(config, limit=MemoryLimit.apply(10**12, "cpu"))
    steps = trainer._steps

    def then_much() -> object:
        ended = steps()
        trainer.limit = MemoryLimit.apply(10**6, "cpu")
        return ended

    monkeypatch.setattr(trainer, "_steps", then_much)
    assert trainer.run().outcome == "over_limit"


UNDERESTIMATED = (
    "import sys; from train.estimate import memory; memory.MARGIN['cpu'] = -0.5; from train import run; run.main()"
)
"""The command with an estimate that promises too much."""


@pytest.mark.parametrize(
    "workers", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(0, marks=pytest.mark.slow, id="stream")]
)
def test_the_command_takes_a_smaller_micro_batch_than_it_has_chosen_and_keeps_it(
    command: Callable[..., int], small_shards: Path, working_folder: Path, workers: int,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Also with several workers, and on a stream of books. In a process of its own, whose memory is the run's alone."""
    flags = ["--data", str(small_shards)] if workers else ["--stream", "sample"]
    flags += ["--workers", str(workers or 1), "--global-batch", str(8 * (workers or 1)), "--memory-limit", "1100MB"]
    flags += ["--model", "tiny", "--loss", "plain", "--name", "one", "--steps", "3", "--cycle", "3+0"]
    done = subprocess.run(
        [sys.executable, "-P", "-c", UNDERESTIMATED, *flags], env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    text, stored_json = done.stdout, json.loads(Path("runs/one/result.json").read_text())
    assert " = micro-batch 8 (auto) x accumulation 1 " in text
    (line,) = (line for line in text.splitlines() if "retrying with" in line)
    reason = r"the process used 1\.\d\d GB \(rss\), more than the limit of 1\.10 GB"
    assert re.match(rf"micro-batch 8 did .*\({reason}\); retrying with 4$", line)
    assert (stored_json["outcome"], stored_json["steps"], stored_json["failed_micro_batches"]) == ("finished", 3, [8])
    assert stored_json["memory"]["process"] < 1.1e9
    requested = json.loads(Path("runs/one/config.json").read_text())
    assert requested["micro_batch"] == requested["compile"] == "auto", "as it was asked for"
    (mlflow_run,) = MlflowClient(store_uri()).search_runs(["1"])
    assert (mlflow_run.data.params["micro_batch"], mlflow_run.data.tags["micro_batch.failed_micro_batches"]) == (
        "8",
        "8",
    )
    assert command(run.main, "--resume", "one", "--steps", "5") == 0
    assert " = micro-batch 4 (auto) x accumulation 2 " in capfd.readouterr().out
    stored_json = json.loads(Path("runs/one/result.json").read_text())
    assert (stored_json["steps"], stored_json["failed_micro_batches"]) == (5, [])


def test_the_peak_is_this_process_own_and_not_that_of_the_one_that_started_it() -> None:
    """Such as the kernel of a notebook."""
    child = "from train.loop.memory import peak_rss; print(peak_rss())"
    parent = (
        "import subprocess, sys; held = b'1' * 10**9; subprocess.run([sys.executable, '-c', sys.argv[1]], check=True)"
    )
    done = subprocess.run([sys.executable, "-c", parent, child], cwd=ROOT, capture_output=True, text=True, check=True)
    assert 5e7 < int(done.stdout) < 9e8


@pytest.mark.parametrize(("reported_bytes", "expected"), [(5 * 10**9, 13 * 10**9), (None, 12 * 10**9)])
def test_segments_given_back_before_the_end_count(reported_bytes: int | None, expected: int) -> None:
    """NVML says 5 GB, of which torch's allocator has 4; it had 12 before its cache was emptied."""
    state = GpuState("H200", "570", 140 * 10**9, 7 * 10**9, reported_bytes, (), None, None, None, None)
    stats = AllocatorStats(reserved=4 * 10**9, max_reserved=12 * 10**9, max_allocated=11 * 10**9)
    assert memory.gpu_peak(stats, state).process == expected
    # Where NVML hides processes, the card's growth since 2 GB stands in for the process's 5.
    assert memory.peak_process(7 * 10**9 - 2 * 10**9, stats) == 13 * 10**9


@pytest.mark.gpu
def test_memory_given_back_is_in_a_gpus_peak() -> None:
    memory.reset_peak(GPU)
    peak_before = memory.peak(GPU).process
    torch.empty(2**30, dtype=torch.uint8, device=GPU)
    torch.cuda.empty_cache()
    assert memory.peak(GPU).process >= peak_before + 2**30


@pytest.mark.gpu
def test_a_gpu_is_capped(config: ResolvedConfig) -> None:
    capped = MemoryLimit.apply(3 * 2**30, "cuda")
    try:
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(3 * 2**30 - memory_limit.RESERVED_OUTSIDE_ALLOCATOR, dtype=torch.uint8, device=GPU)
        assert not capped.excess_message()
        result = make_trainer(config.replace(device="cuda"), limit=replace(capped, size=10**6)).run()
        assert (result.outcome, result.steps) == ("over_limit", 3), "asked when a cycle ends"
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, GPU)
