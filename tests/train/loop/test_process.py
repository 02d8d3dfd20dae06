"""Runs in a process that a program uses for other things too: none of them sees what another has chosen."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import train
from infra.errors import UserError
from train.config import Cycle, ResolvedConfig
from train.estimate.memory import predict_peak
from train.loop import memory
from train.loop.process import borrowed_process
from train.model_config import ModelConfig
from train.reporting.report import memory_table
from train.result import Memory, RunResult

CPU = ResolvedConfig.of(device="cpu", micro_batch=1, global_batch=1, precision="fp32", compile="off", loss="plain")


@pytest.fixture
def config(small_shards: Path, small_model: ModelConfig, working_folder: Path) -> ResolvedConfig:
    return CPU.replace(
        data=str(small_shards), model=small_model, micro_batch=4, global_batch=4, steps=1, cycle=Cycle(1, 0),
        keep_checkpoints=0, precision="tf32", seed=5,
    )  # fmt: skip


def test_a_run_of_a_program_has_a_peak_of_its_own_and_leaves_no_settings(config: ResolvedConfig) -> None:
    """A gigabyte that the program had before is not the run's; the next random number is as without the run."""
    torch.ones(2**28)
    high = memory.peak_rss()
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    environment = dict(os.environ)
    result = train.train(config, "first")
    assert result.memory.process_source == "rss"
    assert result.memory.process < high - 5 * 10**8
    assert torch.get_float32_matmul_precision() == "highest"
    assert torch.equal(torch.rand(3), expected)
    for name in ("THP_MEM_ALLOC_ENABLE", "PYTORCH_ALLOC_CONF", "PYTHONPATH"):
        assert os.environ.get(name) == environment.get(name)


def test_what_torch_reads_once_is_not_changed_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    on_gpu = CPU.replace(device="cuda")
    for first, other, flag in (
        (CPU, CPU.replace(ablate=("large-pages",)), "--ablate"),
        (on_gpu.replace(allocator="expandable"), on_gpu.replace(allocator="split"), "--allocator"),
    ):
        for _ in range(2):
            with borrowed_process(first.execution):
                pass
        with pytest.raises(UserError, match=f"{flag}: .*another process"), borrowed_process(other.execution):
            pass
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "backend:native")
    with borrowed_process(on_gpu.replace(allocator="split").execution):
        assert os.environ["PYTORCH_ALLOC_CONF"] == "backend:native"


def test_a_peak_that_cannot_be_the_runs_is_not_called_so(make_result: Callable[..., RunResult]) -> None:
    result = make_result(memory=Memory(None, None, 3 * 10**9, "rss-of-process"))
    assert any("before this run" in line[0] for line in memory_table(predict_peak(CPU.step), result).rows)
