"""What workers exchange, and whether the measured network hides it."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from infra.errors import UserError
from train.config import ResolvedConfig
from train.estimate.network import network_rows, step_exchange
from train.model_config import PRESETS

CONFIG = ResolvedConfig.of(
    model=PRESETS["gpt2-124m"], workers=8, micro_batch=32, global_batch=512, precision="bf16", device="cuda"
)
PARAMETERS = 124_475_904


def saved(file: Path, rate: float) -> str:
    """What the doctor saves of eight workers whose network carries ``rate`` bytes/s."""
    reduced = {
        "workers": 8, "backend": "nccl", "bus_bytes_per_second": {"262144": rate / 9, "67108864": rate},
        "device": "NVIDIA A100", "matmul": {"bf16": 312e12, "fp32": 19.5e12},
    }  # fmt: skip
    file.write_text(json.dumps({"device": "cpu", "matmul": {"fp32": 1e11}, "allreduce": reduced}))
    return str(file)


def test_gradients_cross_the_bus_twice_per_step_and_weights_with_every_micro_batch() -> None:
    """Of 498 MB 7/8 cross each time: gradients twice; with FSDP and two micro-batches weights four times."""
    model, batch = CONFIG.model, CONFIG.batch
    assert step_exchange(model, batch, shard=False).bytes == pytest.approx(2 * 7 / 8 * 4 * PARAMETERS)
    assert step_exchange(model, batch, shard=True).bytes == pytest.approx((4 + 1) * 7 / 8 * 4 * PARAMETERS)
    assert step_exchange(model, replace(batch, workers=2), shard=False).bytes == pytest.approx(4 * PARAMETERS)


def test_the_verdict_follows_from_what_was_measured(tmp_path: Path) -> None:
    """Two thirds of the last 32,768 tokens' FLOPs, 854.7 MFLOP each, are the backward pass's: 59.8 ms at 312 TFLOP/s.

    A step has two micro-batches on each worker, 179.5 ms, and at 1 GB/s takes 871 - 59.8 ms longer.
    """
    slow = dict(network_rows(CONFIG.model, CONFIG.batch, CONFIG.execution, saved(tmp_path / "doctor.json", 1e9)))
    assert slow["network"].startswith("0.871 GB")
    assert slow["bandwidth"].startswith("1 GB/s")
    assert re.findall(r"[\d.]+ s", slow["exchange"]) == ["0.871 s", "0.0598 s"]
    assert re.findall(r"[\d.]+", slow["verdict"]) == ["0.811", "5.52"]
    fast = dict(network_rows(CONFIG.model, CONFIG.batch, CONFIG.execution, saved(tmp_path / "doctor.json", 400e9)))
    assert fast["verdict"].startswith("not network-bound")
    execution = replace(CONFIG.execution, fsdp=True)
    sharded = dict(network_rows(CONFIG.model, CONFIG.batch, execution, str(tmp_path / "doctor.json")))
    assert sharded["verdict"].startswith("not network-bound")


def test_without_a_measurement_it_says_how_to_make_one(tmp_path: Path) -> None:
    file = tmp_path / "doctor.json"
    assert (
        "python -m infra.doctor --workers 8"
        in dict(network_rows(CONFIG.model, CONFIG.batch, CONFIG.execution, str(file)))["bandwidth"]
    )
    of_an_older_version = {"workers": 2, "backend": "gloo", "bus_bytes_per_second": {"1": 2.0}, "verdict": ""}
    file.write_text(json.dumps({"device": "cpu", "allreduce": of_an_older_version}))
    assert (
        "python -m infra.doctor --workers 8"
        in dict(network_rows(CONFIG.model, CONFIG.batch, CONFIG.execution, str(file)))["bandwidth"]
    )
    file.write_text("{")
    with pytest.raises(UserError, match=r"doctor\.json cannot be read as JSON: .*infra\.doctor"):
        network_rows(CONFIG.model, CONFIG.batch, CONFIG.execution, str(file))
