"""What a step launches is what the formulas count, and CUDA graphs launch it at once, in as much memory."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from train.estimate.gpt2_speed import FUSED_CHUNK_KERNELS, FUSED_LOSS_KERNELS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("PRETENDED_GPU" not in os.environ, reason="needs a GPU that counts launches"),
]

FOLDER = Path(__file__).parent

FUSED_LOSS = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from compute import DEVICE
from step_time import StepTime
from train.estimate.gpu_rates import load_gpu_rates
from train.models.loss import fused
counted = StepTime(load_gpu_rates("A100"), "tf32")
hidden = torch.zeros(1, 96, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
head = torch.zeros(128, 64, device="cuda", requires_grad=True)
targets = torch.zeros(1, 96, dtype=torch.long, device="cuda")
for chunks in (1, 3):
    loss = torch.compile(lambda: fused(hidden, head, targets, chunks), dynamic=False)
    loss()
    before = DEVICE.pretended_launches() + counted.launches
    with counted:
        loss()
    print(DEVICE.pretended_launches() + counted.launches - before)
"""


def test_the_kernels_of_the_fused_loss_are_counted() -> None:
    command = [sys.executable, "-c", FUSED_LOSS, str(FOLDER)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    counts = [int(line) for line in done.stdout.split()]
    assert counts == [FUSED_LOSS_KERNELS + FUSED_CHUNK_KERNELS * chunks for chunks in (1, 3)]


def counted(**settings: Any) -> dict[str, Any]:
    """The counts of one step in a fresh process."""
    command = [sys.executable, "-P", str(FOLDER / "launches.py"), "--row", json.dumps(settings)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.timeout(600)
def test_cuda_graphs_launch_the_kernels_of_both_passes_at_once() -> None:
    """And so without a copy of the gradients, which the optimizer uses before the next replay overwrites them."""
    step = {"model": "tiny", "micro_batch": 8}
    whole, graphs = (counted(**step, compile=mode) for mode in ("whole", "reduce-overhead"))
    assert whole["auto"] == graphs["auto"] == "reduce-overhead"
    assert whole["launches"] - graphs["launches"] > 0.9 * whole["micro_batch_kernels"]
    assert graphs["launches"] < 30
    assert graphs["predicted_bytes"] == whole["predicted_bytes"]
    assert graphs["process_bytes"] < 1.03 * graphs["predicted_bytes"]
