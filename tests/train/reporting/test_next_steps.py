"""The next command after a run and after a comparison: its length gives a result in minutes at the measured speed."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infra.device.first_run import START_SECONDS, TRAINING_SECONDS
from infra.storage.directory import StorageDir
from pipeline.shards import Manifest, read_manifest
from train.config import DurationConfig, ResolvedConfig
from train.reporting.next_steps import MAX_TRAINING_SECONDS, after_comparison, after_run, longer_run
from train.result import RunResult, Throughput

HOME = StorageDir.of("runs/one")
NOISE = "the loss is too high"


@pytest.fixture
def config(small_shards: Path) -> ResolvedConfig:
    return ResolvedConfig.of(data=str(small_shards), global_batch=1, micro_batch=1, device="cpu", precision="fp32")


@pytest.fixture
def manifest(small_shards: Path) -> Manifest:
    return read_manifest(small_shards)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"sample": "It was"}, "train.generate --checkpoint one"), ({}, "train.export --checkpoint one"),
        ({"no_sample_reason": NOISE}, "train.run --resume one --steps"), ({"checkpoint": None}, "runs/one/config.json"),
    ],
)  # fmt: skip
def test_a_model_writes_or_is_trained_longer(
    config: ResolvedConfig, make_result: Callable[..., RunResult], changes: dict[str, Any], expected: str
) -> None:
    text = after_run(config.step, config.duration, make_result(**changes), HOME)
    assert expected in text
    assert "about" in text.partition("`")[0]


def test_a_run_is_resumed_for_minutes_by_the_flag_that_ended_it(
    config: ResolvedConfig, make_result: Callable[..., RunResult]
) -> None:
    step, minutes = config.step, TRAINING_SECONDS["cpu"]
    speed = Throughput(2 * step.step_tokens, 1.0, 2.0, 7, 3)
    result = make_result(throughput=speed, no_sample_reason=NOISE)
    for duration, flag in (
        (DurationConfig(), f"--steps {10 + round(2 * minutes)}"),
        (DurationConfig(steps=10), f"--steps {10 + round(2 * minutes)}"),
        (DurationConfig(tokens=10_240), f"--tokens {(10 + round(2 * minutes)) * step.step_tokens}"),
        (DurationConfig(time_budget=2.0), f"--time-budget {round(2 + minutes)}s"),
    ):
        longer = longer_run(step, duration, result, HOME)
        assert longer.command.endswith(flag)
        assert longer.seconds == minutes + START_SECONDS["cpu"]
    longer = longer_run(step, DurationConfig(time_budget=300.0), make_result(train_seconds=301.0), HOME)
    assert longer.command.endswith("--time-budget 602s"), "twice as long"
    longer = longer_run(step, DurationConfig(time_budget=9e3), make_result(train_seconds=9e3), HOME)
    assert longer.command.endswith("--time-budget 9600s"), "but for minutes"
    slow = longer_run(step, DurationConfig(), make_result(throughput=None, train_seconds=9998.5), HOME)
    assert slow.command.endswith("--steps 11"), "one step more"
    assert slow.seconds == 1000 + START_SECONDS["cpu"], "of which one step takes most"


def test_a_winner_is_trained_for_an_epoch_or_for_minutes(config: ResolvedConfig, manifest: Manifest) -> None:
    tokens, best = manifest.splits["train"]["tokens"], StorageDir.of("/runs/found/best.json")
    epoch = after_comparison(config, "cpu", manifest, tokens / 30, best)
    assert epoch.command == "python -m train.run --config /runs/found/best.json"
    assert epoch.seconds == pytest.approx(30 + START_SECONDS["cpu"])
    long = after_comparison(config, "cuda", manifest, tokens / (MAX_TRAINING_SECONDS + 1), best)
    assert long.command.endswith("--time-budget 5m")
    assert long.seconds == TRAINING_SECONDS["cuda"] + START_SECONDS["cuda"]
    steps = after_comparison(config.replace(steps=4), "cpu", manifest, config.step_tokens, best)
    assert steps.seconds == pytest.approx(4 + START_SECONDS["cpu"])
    timed = after_comparison(config.replace(time_budget=7.0), "cpu", manifest, 1.0, best)
    assert timed.seconds == 7 + START_SECONDS["cpu"]
    assert "--time-budget" not in timed.command, "which its config has"


def test_a_winner_on_data_without_validation_trains_without_it(config: ResolvedConfig, manifest: Manifest) -> None:
    alone = replace(manifest, shards=[shard for shard in manifest.shards if shard.split == "train"])
    commands = [after_comparison(config, "cpu", data, 1e4, HOME / "best.json").command for data in (manifest, alone)]
    assert commands[1] == f"{commands[0]} --cycle 20s+0"
