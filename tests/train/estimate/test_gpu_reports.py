"""Predictions are checked against the reports of GPUs in infra/device/reports."""

import json
from pathlib import Path
from typing import Any

import pytest

from infra.device import gpu_report
from infra.device.gpu_report import GpuReport, parse_report
from train.config import Cycle, ResolvedConfig, TrainConfig
from train.estimate.gpu_rates import load_gpu_rates
from train.estimate.memory import predict_peak
from train.estimate.prediction import predict
from train.model_config import parse_model
from train.resolved import resolve

REPORTS = sorted((Path(gpu_report.__file__).parent / "reports").glob("*.json"))
MAX_MEMORY_ERROR = 0.03
"""Goal of the project for the predicted memory of a process."""


def read(path: Path) -> tuple[GpuReport, dict[str, Any]]:
    report = parse_report(json.loads(path.read_text(encoding="utf-8")), path.name)
    values = next(step.values for step in report.steps if step.name == "train")
    assert values, "the report has ten steps of training"
    return report, values


def config_of(report: GpuReport, settings: dict[str, Any]) -> ResolvedConfig:
    """The ten steps of the report, resolved as they would be now."""
    model = parse_model(settings["model"])
    changes = {name: value for name, value in settings.items() if name != "model"}
    requested = TrainConfig.of(
        data="", model=model, steps=10, cycle=Cycle(10, 0), keep_checkpoints=0, global_batch=settings["micro_batch"],
        **changes,
    )  # fmt: skip
    return resolve(requested, report.facts)


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: path.stem)
def test_the_predicted_memory_is_what_the_gpu_needed(path: Path) -> None:
    """Also that of a simulated GPU, whose allocations are those of torch's allocator."""
    report, values = read(path)
    predicted = predict_peak(config_of(report, values["config"]).step).total
    assert predicted == pytest.approx(values["process_bytes"], rel=MAX_MEMORY_ERROR)


@pytest.mark.parametrize("path", [path for path in REPORTS if "simulated" not in path.stem], ids=lambda path: path.stem)
def test_the_predicted_speed_contains_what_the_gpu_reached(path: Path) -> None:
    report, values = read(path)
    speed = predict("", config_of(report, values["config"]).step, load_gpu_rates(str(path))).speed
    assert speed
    assert speed.low <= values["tokens_per_second"] <= speed.high
