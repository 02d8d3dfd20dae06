"""The five-minute test on pretended GPUs, whose kernels do nothing: every step runs, and the report says so."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from infra.device.gpu_report import REPORT_FILE, parse_report

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("PRETENDED_GPU" not in os.environ, reason="needs a GPU whose kernels do nothing"),
]

SMALL = "tiny,layers=1,width=64,heads=2,context_length=64,vocab_size=257,padded_vocab_size=320"
PROGRAM = """
import sys
from infra.doctor.gpu_test import run_test, verdict
from infra.storage.directory import StorageDir
print(verdict(run_test(StorageDir.of(sys.argv[1]), sys.argv[2])))
"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("gpu", "precision"),
    [("A100", "bf16-activations"), pytest.param("T4", "fp16", marks=pytest.mark.slow),
     pytest.param("RTX3060", "bf16-activations", marks=pytest.mark.slow)],
)  # fmt: skip
def test_every_step_runs(tmp_path: Path, gpu: str, precision: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), SMALL], env=os.environ | {"PRETENDED_GPU": gpu},
        capture_output=True, text=True, timeout=550,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = parse_report(json.loads((tmp_path / REPORT_FILE).read_text()), REPORT_FILE)
    assert report.passed, done.stdout
    assert report.simulated
    assert (report.matmul, report.copy) == ({}, {}), "nobody may plan from them"
    assert "simulated" in done.stdout.splitlines()[-1]
    train = next(step for step in report.steps if step.name == "train").values or {}
    assert train["config"]["precision"] == precision
    assert train["process_bytes"] > 0
    assert train["predicted_bytes"] == pytest.approx(train["process_bytes"], rel=0.3)


def test_a_kernel_that_fails_costs_one_step(tmp_path: Path) -> None:
    """The steps after it run, in processes of their own."""
    program = PROGRAM.replace(
        "print(verdict", "import infra.doctor.gpu_test as test\ntest.STEPS = test.STEPS[:2]\nprint(verdict"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path), "no such model"], capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr
    assert "✓ device" in done.stdout
    assert "✗ attention" in done.stdout
    assert "no such model" in done.stdout
