"""Predicted memory against a process's resident memory; tests/benchmarks/memory.py measures more combinations."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from train.estimate.memory import predict_peak

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "memory.py"


@pytest.mark.parametrize(
    ("model", "compile", "chunks", "size"),
    [
        pytest.param("tiny", "whole", 1, 20, id="compiled"),
        pytest.param("small,layers=1,context_length=16", "off", 8, 1, id="gradients added in place"),
    ],
)
def test_a_step_takes_the_predicted_memory(model: str, compile: str, chunks: int, size: int, tmp_path: Path) -> None:
    """Beyond weights and optimizer, from between two steps to the second step's peak."""
    point = {"model": model, "precision": "fp32", "compile": compile, "loss_chunks": chunks, "micro_batch": size}
    benchmark = runpy.run_path(str(BENCHMARK))
    done = subprocess.run(
        [sys.executable, "-P", BENCHMARK, "--point", json.dumps(point)],
        env=os.environ | benchmark["ENVIRONMENT"]
        | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[3])},
        check=True, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    measured = json.loads(done.stdout.splitlines()[-1])
    predicted = predict_peak(benchmark["config"](Path(), **point))
    step = predicted.allocated - predicted.weights - predicted.optimizer
    assert step == pytest.approx(measured["peak"] - measured["before"], rel=0.05)
