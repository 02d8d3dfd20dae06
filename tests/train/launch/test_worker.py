"""The worker's part of a run, in this process: it trains into the run's folder, from where that stands."""

import json
import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infra.storage import write_json
from pipeline.shards import checksum
from train.checkpoint import progress
from train.checkpoint.find import find_run
from train.checkpoint.progress import newest
from train.checkpoint.run_folder import RunFolder
from train.config import Cycle, TrainConfig
from train.launch import worker
from train.loop.trainer import Trainer
from train.model_config import ModelConfig


@pytest.fixture
def home(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


@pytest.fixture
def config(small_shards: Path, small_model: ModelConfig) -> TrainConfig:
    return TrainConfig(
        data=str(small_shards), model=small_model, global_batch=4, micro_batch=4, steps=12, cycle=Cycle(5, 1),
        precision="fp32", device="cpu", checkpoint_every=7,
    )  # fmt: skip


def cycles(home: RunFolder) -> list[dict[str, Any]]:
    return [json.loads(line) for line in home.cycles.read_text().splitlines()]


def test_a_worker_trains_into_its_folder(home: RunFolder, config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "closing_sample", lambda trainer, result: f"a text after {trainer.state.step} steps")
    result = worker.train(home, config, None, True)
    assert (result.outcome, result.steps, result.sample) == ("finished", 12, "a text after 12 steps")
    assert [cycle["step"] for cycle in cycles(home)] == [5, 10, 12]
    assert result.checkpoint == str(home.checkpoints / "step-00000012")


def test_a_resumed_run_reads_its_checkpoint_once_to_check_it(
    home: RunFolder, config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver does; the worker takes that over for files that are still the same, and looks at others itself."""
    worker.train(home, replace(config, steps=7, schedule="constant"), None, True)
    write_json(home.config, config.to_json())
    progress._checksums.clear()
    checked: list[str] = []

    def counted(path: Path) -> str:
        checked.append(path.name)
        return checksum(path)

    monkeypatch.setattr(progress, "checksum", counted)
    found = find_run(str(home.path), home.path.parent).newest()
    known = progress.known_checksums()
    progress._checksums.clear()  # the worker is another process
    progress.trust(known)
    with ExitStack() as held:
        assert worker.begin(home, held, worker.Start("again", 7)) == (found, None)
        assert worker.train(home, replace(config, schedule="constant"), found, True).steps == 12
    assert sorted(checked) == ["model.safetensors", "state.pt"]
    os.utime(found / "state.pt", ns=(1, 1))
    assert progress.damage(found) is None
    assert len(checked) == 3, "a file that was touched is read again"


def test_a_worker_that_begins_again_repeats_no_cycle(home: RunFolder, config: TrainConfig) -> None:
    """It was killed behind a report that its checkpoint does not know, and behind half of another."""
    worker.train(home, replace(config, steps=7, schedule="constant"), None, True)
    config = replace(config, schedule="constant")
    before = home.cycles.read_text()
    assert [cycle["step"] for cycle in cycles(home)] == [5, 7]
    with home.cycles.open("a") as log:
        log.write(before.splitlines()[-1].replace('"step": 7', '"step": 10') + '\n{"step": 1')
    worker.train(home, config, newest(home.checkpoints), True)
    straight = Trainer(config)
    straight.run()
    assert [(c["step"], c["step_losses"]) for c in cycles(home) if c["step"] > 7] == [
        (10, straight.spent.reports[1].step_losses[2:]), (12, straight.spent.reports[2].step_losses),
    ]  # fmt: skip
    assert [c["step"] for c in cycles(home)] == [5, 7, 10, 12]


def test_a_worker_ends_when_its_folder_says_so(home: RunFolder, config: TrainConfig) -> None:
    home.stop.touch()
    result = worker.train(home, config, None, True)
    assert (result.outcome, result.steps) == ("interrupted", 1)
    assert newest(home.checkpoints) == home.checkpoints / "step-00000001"
