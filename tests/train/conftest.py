"""Settings for tests that train: one thread, which is faster for models this small, above all on a busy machine."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from train.result import Memory, RunResult, Throughput


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def make_result() -> Callable[..., RunResult]:
    """``make_result(**changes)``: a finished run on a CPU with round numbers, without running one."""
    finished = RunResult(
        outcome="finished", reason="reached 10 steps", steps=10, throughput=Throughput(1000.0, 990.0, 1020.0, 7, 3),
        memory=Memory(None, None, 10**9, "rss"), train_loss=3.25, val_loss=3.5, train_tokens=320, val_tokens=64,
        books_seen=2, train_seconds=2.0, first_step_seconds=1.5, data_wait_fraction=0.01, optimizer_fraction=0.09,
        flops_per_token=2e6, petaflop_days=0.5, flops_formula="PaLM", flops_per_second=2e9, mfu=None,
        device="cpu", machine="w1",
        checkpoint="runs/one/checkpoints/step-00000010", data_fingerprint="0" * 64,
        loss_curve=[(5, 4.0, None), (10, 3.25, 3.5)], val_perplexity=33.1, val_bits_per_byte=1.5,
    )  # fmt: skip

    def changed(**changes: Any) -> RunResult:
        return replace(finished, **changes)

    return changed
