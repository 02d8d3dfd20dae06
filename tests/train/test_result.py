"""The record of a run: a line a cycle, and JSON that gives the same record back."""

import json
from collections.abc import Callable
from dataclasses import replace

from infra.schema import from_json, to_json
from train.intervals import Estimate
from train.result import CycleReport, RunResult, Throughput

REPORT = CycleReport(
    step=10, batches=12, train_loss=4.0, val_loss=0.0, train_tokens=10_000, val_tokens=2_345, books_seen=1,
    cycle_seconds=8.0, train_seconds=4.0, data_wait_seconds=0.1, optimizer_seconds=0.2, elapsed=9.0,
    cycle_tokens=10_000,
    epoch_seconds=5400.0, learning_rate=1e-3, gradient_norm=1.0,
)  # fmt: skip


def test_a_cycle_is_a_line() -> None:
    assert REPORT.format_line() == (
        "batches:12 | loss: 4.000/0.000 | tok-seen: 12,345 | time: 8.00 | tok/sec: 1,250.00 | epoch: 1.50 hrs"
    )
    assert " loss: 4.000/- |" in replace(REPORT, val_loss=None).format_line()


def test_a_result_is_read_back_as_it_was_written(make_result: Callable[..., RunResult]) -> None:
    for result in (make_result(), make_result(throughput=None, matmul_utilization=0.5, sample="text")):
        assert from_json(RunResult, json.loads(json.dumps(to_json(result))), "test") == result


def test_a_speed_is_compared_with_its_interval() -> None:
    assert Throughput(1000.0, 900.0, 1200.0, 7, 3).estimate == Estimate(1000.0, 900.0, 1200.0)
