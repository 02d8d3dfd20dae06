"""The search's children in MLflow: one a trial, complete whatever happened to the store meanwhile."""

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient

from infra.hardware import cpu_facts
from infra.tracking import tracker
from pipeline.shards import read_manifest
from train.config import TrainConfig
from train.model_config import ModelConfig
from train.resolve import resolve
from tune.space import Candidate, make_space
from tune.tracking import Evidence, metrics, open_parent, summary_metrics
from tune.trial.row import Proposal, Row
from tune.trial.run import Request

SPACE = make_space(resolve(TrainConfig(global_batch=8, micro_batch=2), cpu_facts()), ())


def finished(size: int, speed: float, **more: Any) -> Row:
    """A trial that measured ``speed``."""
    return Row(
        key=f"m{size}", number=1, stage="probe", round=0, candidate=Candidate(size), accumulation=8 // size,
        outcome="ok", reason="", seconds=10.0, tokens_per_second=speed, low=0.99 * speed, high=1.01 * speed, **more,
    )  # fmt: skip


def test_numbers_have_the_units_of_their_names() -> None:
    found = metrics(finished(2, 100.0, memory=2**31, reserved=2**30, allocated=2**29, predicted_memory=3.0 * 2**30))
    assert {name: value for name, value in found.items() if name.endswith("_gib")} == {
        "memory/process_gib": 2.0, "memory/reserved_gib": 1.0, "memory/allocated_gib": 0.5,
        "prediction/memory_gib": 3.0,
    }  # fmt: skip
    assert found["time/trial_seconds"] == 10.0
    assert found["result/tokens_per_second_low"] == 99.0


def test_a_search_is_summed_up() -> None:
    failed = replace(finished(8, 1.0), outcome="failed", tokens_per_second=None)
    found = summary_metrics([finished(2, 100.0), finished(4, 150.0, memory=2**30), failed], SPACE)
    assert found["result/speedup_over_control"] == pytest.approx(1.5)
    assert found["result/tokens_per_second"] == pytest.approx(150.0)
    assert found["memory/process_gib"] == 1.0
    assert (found["trials/all"], found["trials/ok"], found["trials/failed"], found["trials/oom"]) == (3, 2, 1, 0)
    assert found["time/device_seconds"] == 30.0
    assert summary_metrics([failed], SPACE)["result/tokens_per_second"] is None


def test_a_store_that_goes_away_between_trials_gets_them_later(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mlflow_server: Callable,
    free_port: int,
    small_shards: Path,
    small_model: ModelConfig,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tracker, "RETRY_SECONDS", 0.1)
    config = TrainConfig(data=small_shards, model=small_model, global_batch=4, micro_batch=1, steps=5)
    space = make_space(resolve(config, cpu_facts()), ("checkpointing",))
    candidates = space.candidates()
    first, second = (
        Row(
            key=f"trial-{number}", number=number, stage="probe", round=0, candidate=candidate, outcome="ok",
            accumulation=1, reason="ran its 3 steps", seconds=1.0, tokens_per_second=100.0 * number,
            step_seconds=[0.1, 0.1, 0.1],
        )
        for number, candidate in enumerate(candidates[:2], 1)
    )  # fmt: skip

    def request(row: Row) -> Request:
        proposal = Proposal(row.candidate, "probe")
        return Request(row.key, row.number, proposal, {}, 10**9, 5, 1.0, 0.1, str(tmp_path), 0.0)

    with mlflow_server(tmp_path, free_port) as process:
        parent = open_parent("search", f"http://127.0.0.1:{free_port}", {}, space, lambda key: None)
        evidence = Evidence(parent, read_manifest(small_shards), small_shards, space)
        evidence.start(request(first))
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        evidence.catch_up([first])
        evidence.start(request(second))
        assert "The search goes on" in " ".join(capfd.readouterr().err.split())
    with mlflow_server(tmp_path, free_port):
        evidence.catch_up([first, second])
        evidence.catch_up([first, replace(second, outcome="failed")])  # complete: not told again
        client = MlflowClient(parent.store)
        found = client.search_runs([parent.experiment_id], "tags.kind = 'trial'")
        assert sorted(run.data.tags["trial"] for run in found) == ["trial-1", "trial-2"]
        assert {run.info.status for run in found} == {"FINISHED"}
        assert {run.data.metrics["result/tokens_per_second"] for run in found} == {100.0, 200.0}
        assert {run.data.params["checkpointing"] for run in found} == {"none"}
