"""A run that is slower than its search found: which causes are named, and that none is without evidence."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infra.cli.table import Table
from infra.errors import UserError
from infra.schema import to_json
from infra.storage.directory import StorageDir
from pipeline.shards import read_manifest
from train.config import ResolvedConfig
from train.intervals import Estimate
from train.launch.driver import diagnose, loss_prediction
from train.launch.job import ResolvedRun
from train.reporting.report import run_report
from train.result import LossPrediction, Memory, MemoryShortage, RunResult, Throughput
from train.run import RunOptions, plan_run
from train.run_files.run_folder import RunFolder
from train.search_reference import (
    SPEED_SETTINGS,
    SearchReference,
    diagnose_slowdown,
    read_measured_speeds,
    read_search_reference,
)

Make = Callable[..., RunResult]

MACHINE = {"system/processors": 8.0, "system/machine_cpu_percent": 95.0, "system/worker_cpu_percent": 500.0}
CARD = MACHINE | {"system/gpu_sm_clock_mhz": 1755.0, "system/gpu_memory_gb": 20.0}
CONFIRMED = SearchReference(
    "fast", 1000.0, 980.0, 1020.0, 20 * 2**30, 3, [], "NVIDIA H100", ["w1"], 0.01,
    CARD | {"system/machine_cpu_percent": 70.0},
)  # fmt: skip
BARE = replace(CONFIRMED, machines=["w1", "w2"], data_wait_fraction=None, telemetry={})
"""Of trials that were too short for telemetry."""


EAGER = ResolvedConfig.of(compile="off")


def ran(make_result: Make, speed: float = 850.0, retries: int = 0, **changes: Any) -> RunResult:
    """A run on the search's card, with all as it was but the speed."""
    memory = Memory(18 * 2**30, 19 * 2**30, 20 * 2**30, "nvml", retries)
    base: dict[str, Any] = {
        "throughput": Throughput(speed, 0.99 * speed, 1.01 * speed, 20, 3), "device": "NVIDIA H100", "machine": "w1",
        "memory": memory, "data_wait_fraction": 0.01, "telemetry": CARD | {"system/machine_cpu_percent": 70.0},
    }  # fmt: skip
    return make_result(**base | changes)


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"data_wait_fraction": 0.12}, "12.0% .*1.0%"),
        (
            {"telemetry": CARD | {
                "system/gpu_sm_clock_mhz": 1400.0, "system/gpu_throttled_by_power_percent": 97.0,
                "system/gpu_throttled_by_heat_percent": 0.0, "system/machine_cpu_percent": 70.0,
            }},
            "1,400 MHz .*1,755.* power 97%",
        ),
        ({"telemetry": MACHINE | {"system/machine_cpu_percent": 99.0}}, "processes used 2.9 .* 8 .*0.6"),
        ({"telemetry": {"system/gpu_memory_gb": 30.0}}, "processes used 8.53 GB"),
        ({"retries": 3}, "3 times in 10 steps"),
        ({"device": "NVIDIA A100"}, "A100.*H100"),
        ({"machine": "w2"}, "w2.*w1"),
    ],
    ids=["loader", "clock", "processors", "neighbor", "allocator", "device", "machine"],
)  # fmt: skip
def test_a_cause_that_the_records_show_is_named_and_no_other(
    make_result: Make, changes: dict[str, Any], cause: str
) -> None:
    diagnosis = diagnose_slowdown(ran(make_result, **changes), CONFIRMED, EAGER.execution.compile)
    assert diagnosis
    speed, (_, text) = diagnosis.rows
    assert re.search("15.0%.*1,000 .*980 to 1,020.* tokens/s", speed[1])
    assert re.search(cause, text), text
    assert not text.startswith("unknown")
    assert not diagnosis.command


@pytest.mark.parametrize("confirmed", [CONFIRMED, BARE])
def test_without_evidence_no_cause_is_named(make_result: Make, confirmed: SearchReference) -> None:
    """Nothing but the speed is other than it was, as far as the search recorded it; all that was compared is told."""
    diagnosis = diagnose_slowdown(ran(make_result), confirmed, EAGER.execution.compile)
    assert diagnosis
    ((_, text),) = diagnosis.rows[1:]
    assert text.startswith("unknown")
    assert all(number in text for number in ("1.0%", "1,755 MHz", "0.6", "0 times in 10 steps"))
    compiled = diagnose_slowdown(ran(make_result), confirmed, EAGER.replace(compile="whole").execution.compile)
    assert compiled
    assert "TORCH_LOGS=recompiles" in compiled.rows[1][1]
    on_cpu = ran(make_result, telemetry={}, device="cpu", memory=Memory(None, None, 2**30, "rss"))
    diagnosis = diagnose_slowdown(on_cpu, replace(BARE, device="cpu"), EAGER.execution.compile)
    assert diagnosis
    assert diagnosis.rows[1][1].endswith("1.0% of the time"), "of a CPU no more is known"


@pytest.mark.parametrize("changes", [{"retries": 30, "steps": 10_000}, {"retries": 2}, {"data_wait_fraction": 0.04}])
def test_what_is_usual_is_no_cause(make_result: Make, changes: dict[str, Any]) -> None:
    """Few retries in many steps, those of the first steps, and waits for data that the search's trials had, too."""
    diagnosis = diagnose_slowdown(
        ran(make_result, **changes), replace(CONFIRMED, data_wait_fraction=0.03), EAGER.execution.compile
    )
    assert diagnosis
    assert diagnosis.rows[1][1].startswith("unknown")


def test_a_power_limit_is_no_cause_and_heat_is_one_where_the_searchs_clock_is_not_known(make_result: Make) -> None:
    """A healthy GPU runs at its power limit."""
    limited = CARD | {"system/machine_cpu_percent": 70.0, "system/gpu_throttled_by_power_percent": 97.0}
    diagnosis = diagnose_slowdown(ran(make_result, telemetry=limited), BARE, EAGER.execution.compile)
    assert diagnosis
    assert diagnosis.rows[1][1].startswith("unknown")
    hot = diagnose_slowdown(
        ran(make_result, telemetry=limited | {"system/gpu_throttled_by_heat_percent": 40.0}),
        BARE,
        EAGER.execution.compile,
    )
    assert hot
    assert re.search("^GPU clock 1,755 MHz.* power 97%.* heat 40%", hot.rows[1][1])


@pytest.mark.parametrize("speed", [975.0, 980.0, 1000.0, 1200.0])
def test_a_run_whose_interval_reaches_the_searchs_is_not_slower(make_result: Make, speed: float) -> None:
    assert (
        diagnose_slowdown(ran(make_result, speed, data_wait_fraction=0.5), CONFIRMED, EAGER.execution.compile) is None
    )
    assert diagnose_slowdown(ran(make_result, throughput=None), CONFIRMED, EAGER.execution.compile) is None


@pytest.fixture
def best(tmp_path: Path) -> Path:
    file = tmp_path / "fast" / "best.json"
    file.parent.mkdir()
    file.write_text(json.dumps({"space": "s", "config": ResolvedConfig().to_json(), "measured": to_json(CONFIRMED)}))
    return file


def test_speeds_of_other_candidates_are_read_from_its_file(tmp_path: Path) -> None:
    winner = ResolvedConfig.of(global_batch=64, micro_batch=16)
    small, large = winner.replace(global_batch=16), winner.replace(global_batch=128, micro_batch=32)
    reference = CONFIRMED.with_speeds(winner, [(small, Estimate(700.0, 690.0, 710.0))])
    file = tmp_path / "best.json"
    file.write_text(json.dumps({"config": winner.to_json(), "measured": to_json(reference)}))
    configs = [winner, small, large, small.replace(learning_rate=1e-3), small.replace(precision="bf16")]
    speeds = read_measured_speeds(str(file), CONFIRMED.device, configs)
    own, other = CONFIRMED.speed, Estimate(700.0, 690.0, 710.0)
    assert speeds == [own, other, None, other, None], "the speed does not depend on the learning rate"
    assert read_measured_speeds(str(file), "NVIDIA A100", configs) == [None] * 5
    assert read_measured_speeds(str(tmp_path / "none.json"), CONFIRMED.device, configs) == [None] * 5


def test_what_a_search_found_is_read_from_its_file(best: Path) -> None:
    assert read_search_reference(str(best), ResolvedConfig().flat()) == CONFIRMED
    assert (
        read_search_reference(
            str(best), ResolvedConfig.of(learning_rate=1e-4, steps=7, data="elsewhere", seed=3).flat()
        )
        == CONFIRMED
    )


def test_it_is_also_read_from_object_storage(best: Path, bucket: str) -> None:
    directory = StorageDir.of(f"s3://places/fast/{bucket}")
    directory.upload(best, "best.json")
    assert read_search_reference(str(directory / "best.json"), ResolvedConfig().flat()) == CONFIRMED
    assert read_search_reference(str(directory / "absent.json"), ResolvedConfig().flat()) is None


def test_a_run_that_is_executed_in_another_way_is_not_compared(best: Path) -> None:
    for changes in ({"micro_batch": 16}, {"compile": "whole"}, {"loss": "fused"}, {"device": "cuda"}):
        assert read_search_reference(str(best), ResolvedConfig().replace(**changes).flat()) is None
    run = best.with_name("config.json")
    run.write_text(json.dumps(ResolvedConfig().to_json()))
    assert read_search_reference(str(run), ResolvedConfig().flat()) is None
    assert read_search_reference(str(best.with_name("absent.json")), ResolvedConfig().flat()) is None


def test_the_command_compares_with_the_file_that_it_was_given(best: Path, small_shards: Path, tmp_path: Path) -> None:
    model = replace(ResolvedConfig().model, vocab_size=257)
    config = ResolvedConfig.of(data=str(small_shards), model=model, global_batch=8)
    values = json.loads(best.read_text())
    best.write_text(json.dumps(values | {"config": config.to_json()}))
    options = RunOptions(training=config, config=str(best), out=str(tmp_path))
    assert plan_run(options).confirmed == CONFIRMED
    assert plan_run(replace(options, config=None)).confirmed is None


def test_it_is_in_the_result_of_the_run_and_after_memory(make_result: Make, small_shards: Path, tmp_path: Path) -> None:
    config = ResolvedConfig.of(
        data=str(small_shards), precision="fp32", device="cpu", attention="sdpa", micro_batch=32, compile="off",
        loss="plain",
    )  # fmt: skip
    manifest, run_folder = read_manifest(small_shards), RunFolder(tmp_path)
    run = ResolvedRun(config, manifest, run_folder, confirmed=CONFIRMED, config=config)
    result = ran(make_result, data_wait_fraction=0.12)
    diagnosis = diagnose(run, result)
    assert diagnosis == diagnose_slowdown(result, CONFIRMED, EAGER.execution.compile)
    assert diagnosis
    diagnosed = replace(result, diagnosis=diagnosis)
    findings, *_ = run_report(config.step, config.dataset, config.duration, diagnosed, run_folder.location).sections
    assert isinstance(findings, Table)
    assert diagnosis.rows[1] in findings.rows
    assert diagnose(replace(run, confirmed=None), result) is None
    over = replace(
        result, outcome="over_limit", shortage=MemoryShortage("checking memory after step 1", None, 10**9, {})
    )
    diagnosis = diagnose(run, over)
    assert diagnosis
    assert "predicted to fit" in diagnosis.advice


LEARNING = {
    "data", "reading", "seed", "learning_rate", "schedule", "warmup_steps", "weight_decay", "beta1", "beta2",
    "max_loss_spike", "steps", "tokens", "time_budget", "speed_tolerance", "cycle", "checkpoint_every",
    "keep_checkpoints",
}  # fmt: skip
"""Settings of what a run learns and when it ends, by which no step is slower."""


def test_every_setting_is_one_of_the_speed_or_of_what_is_learnt() -> None:
    """A new one has to be put on a side."""
    settings = set(ResolvedConfig().flat())
    assert settings - LEARNING == set(SPEED_SETTINGS)
    assert settings > LEARNING


def test_storage_that_fails_is_not_taken_for_a_search_that_left_nothing(
    s3: tuple[str, Callable[[float], None]],
) -> None:
    query, set_rate = s3
    file = f"s3://places/fast/best.json{query}"
    assert read_search_reference(file, EAGER.flat()) is None
    set_rate(1.0)
    with pytest.raises(UserError, match=r"s3://places/fast/best.json"):
        read_search_reference(file, EAGER.flat())


PREDICTION = LossPrediction(3.52, 3.49, 3.55, 1_000_000, -0.2, 64, "ab12")
LEARNED = replace(CONFIRMED, loss_prediction=PREDICTION)


def summary_of(result: RunResult) -> dict[str, str]:
    step, dataset, duration = EAGER.step, EAGER.dataset, EAGER.duration
    return dict(run_report(step, dataset, duration, result, StorageDir.of("runs/one")).summary)


def learned(make_result: Make, **changes: Any) -> RunResult:
    """A run of a learning search's config that saw all tokens and windows that were predicted."""
    base = {"val_loss": 3.53, "train_tokens": 1_000_000, "val_windows": 64, "loss_prediction": PREDICTION}
    return make_result(**base | changes)


def test_a_run_compares_its_loss_with_the_prediction(make_result: Make) -> None:
    text = summary_of(learned(make_result))["Prediction"]
    assert "3.520 (95% CI 3.490 to 3.550), measured 3.530, within" in text
    assert ";" not in text
    assert "above" in summary_of(learned(make_result, val_loss=3.6))["Prediction"]
    assert "below" in summary_of(learned(make_result, val_loss=3.4))["Prediction"]
    assert "Prediction" not in summary_of(learned(make_result, loss_prediction=None))
    assert "Prediction" not in summary_of(learned(make_result, val_loss=None))


def test_the_prediction_is_for_the_tokens_that_the_run_saw(make_result: Make) -> None:
    text = summary_of(learned(make_result, train_tokens=900_000, val_windows=32))["Prediction"]
    assert "3.541 (95% CI 3.511 to 3.571), measured 3.530" in text
    assert "+0.021" in text
    assert "90.0%" in text
    assert re.search("32 windows.*64", text)


def test_the_predicted_loss_is_that_of_equal_settings_only(tmp_path: Path) -> None:
    best = tmp_path / "best.json"
    config = ResolvedConfig().replace(time_budget=60.0, learning_rate=1e-3)
    best.write_text(json.dumps({"config": config.to_json(), "measured": to_json(LEARNED)}))
    assert read_search_reference(str(best), config.flat()) == LEARNED
    for changes in ({"time_budget": 120.0}, {"learning_rate": 2e-3}, {"schedule": "constant"}):
        assert read_search_reference(str(best), config.replace(**changes).flat()) == CONFIRMED
    assert read_search_reference(str(best), config.replace(global_batch=4, micro_batch=4).flat()) is None


def test_only_a_finished_run_on_the_same_data_is_the_predicted_one(
    make_result: Make, small_shards: Path, tmp_path: Path
) -> None:
    config = ResolvedConfig.of(data=str(small_shards))
    run = ResolvedRun(config, read_manifest(small_shards), RunFolder(tmp_path), confirmed=LEARNED, config=config)
    assert loss_prediction(run, make_result(data_fingerprint="ab12")) == PREDICTION
    assert loss_prediction(run, make_result(data_fingerprint="cd34")) is None
    assert loss_prediction(run, make_result(data_fingerprint="ab12", outcome="interrupted")) is None
    for reference in (CONFIRMED, None):
        assert loss_prediction(replace(run, confirmed=reference), make_result(data_fingerprint="ab12")) is None
