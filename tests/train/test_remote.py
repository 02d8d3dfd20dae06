"""Checkpoints in object storage: copied as they are written, and the run goes on from them on another machine."""

import dataclasses
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pyarrow.fs
import pytest
from mlflow.tracking import MlflowClient

from infra.command import UserError
from infra.storage import write_json
from pipeline import files
from train import checkpoint
from train.config import Cycle, ModelConfig, TrainConfig
from train.folder import RunFolder, find_run
from train.loop import Trainer
from train.progress import newest, read_progress
from train.result import CycleReport


@pytest.fixture
def bucket(s3: tuple[str, Callable[[float], None]]) -> str:
    """The query of a real S3 server on loopback, with the bucket ``runs``."""
    query, _ = s3
    system, _ = pyarrow.fs.FileSystem.from_uri(f"s3://runs{query}&allow_bucket_creation=true")
    system.create_dir("runs")
    return query


@pytest.fixture
def config(small_shards: Path, small_model: ModelConfig) -> TrainConfig:
    return TrainConfig(
        data=small_shards, model=small_model, global_batch=4, micro_batch=4, steps=30, cycle=Cycle(10, 1),
        precision="fp32", device="cpu", warmup_steps=5, checkpoint_every=5,
    )  # fmt: skip


def test_a_run_goes_on_from_its_copy(config: TrainConfig, bucket: str, tmp_path: Path) -> None:
    config = dataclasses.replace(config, copy_to=f"s3://runs/kept{bucket}")
    straight: list[CycleReport] = []
    Trainer(config, on_cycle=straight.append).run()
    Trainer(
        config, checkpoints=tmp_path / "here" / "one" / "checkpoints", should_stop=iter([False] * 16 + [True]).__next__
    ).run()
    with pytest.raises(UserError, match="there is no checkpoint"):
        find_run(f"s3://runs/kept/other{bucket}", tmp_path / "there")
    run = find_run(f"s3://runs/kept/one{bucket}", tmp_path / "there")
    assert run.path == (tmp_path / "there" / "one").resolve()
    found = newest(run.checkpoints)
    assert found == run.checkpoints / "step-00000017"
    system, _ = pyarrow.fs.FileSystem.from_uri(f"s3://runs/kept{bucket}")
    kept = system.get_file_info(pyarrow.fs.FileSelector("runs/kept/one"))
    assert sorted(info.base_name for info in kept) == ["step-00000015", "step-00000017"]
    rest: list[CycleReport] = []
    Trainer(config, on_cycle=rest.append, resume=found).run()
    assert [(r.step, r.step_losses) for r in rest] == [(r.step, r.step_losses) for r in straight[1:]]


def test_mlflow_has_the_whole_curve_of_a_run_whose_machine_was_lost(
    config: TrainConfig, bucket: str, tmp_path: Path
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    write_json(here / "config.json", dataclasses.replace(config, checkpoint_every=7, steps=40_000).to_json())
    flags = ["--config", "config.json", "--copy-to", f"s3://runs/kept{bucket}", "--name", "one"]
    lost = subprocess.Popen([sys.executable, "-m", "train.run", *flags], cwd=here)
    system, _ = pyarrow.fs.FileSystem.from_uri(f"s3://runs{bucket}")
    deadline = time.monotonic() + 240
    while not system.get_file_info("runs/kept/one/step-00000056/progress.json").is_file:
        assert lost.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for process in (psutil.Process(lost.pid), *psutil.Process(lost.pid).children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            process.kill()
    lost.wait()

    uri = f"s3://runs/kept/one{bucket}"
    copied = newest(find_run(uri, there / "runs").checkpoints)
    assert copied
    known, end = read_progress(copied).reported, read_progress(copied).step + 30
    resumed = [sys.executable, "-m", "train.run", "--resume", uri, "--steps", str(end)]
    printed = subprocess.run(resumed, cwd=there, capture_output=True, text=True, timeout=240, check=True).stdout
    assert printed.count("tok/sec") == -((known - end) // 10), "of the cycles, those that are new"
    client = MlflowClient(f"sqlite:///{there}/mlflow.db")
    (run,) = client.search_runs(["1"])
    assert run.data.params["seed"] == "0", "a run that is new in its store is recorded whole"
    assert run.inputs is not None
    assert run.inputs.dataset_inputs
    assert run.data.tags["resumed_at_step"] == str(end - 30)
    curve = [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, "loss/step")]
    assert [step for step, _ in curve] == list(range(1, end + 1))
    cycles = [json.loads(line) for line in RunFolder(here / "runs" / "one").cycles.read_text().splitlines()]
    before = [loss for cycle in cycles for loss in cycle["step_losses"]]
    assert [loss for _, loss in curve][:known] == before[:known]


def test_a_storage_that_is_away_for_a_while_is_asked_again(
    config: TrainConfig, bucket: str, s3: tuple[str, Callable[[float], None]], tmp_path: Path
) -> None:
    _, set_rate = s3
    set_rate(1.0)
    back = threading.Timer(3.0, set_rate, [0.0])
    back.start()
    away = time.monotonic()
    config = dataclasses.replace(config, copy_to=f"s3://runs/kept{bucket}", steps=6)
    assert Trainer(config, checkpoints=tmp_path / "here" / "one" / "checkpoints").run().outcome == "finished"
    assert time.monotonic() - away > 3.0
    assert newest(find_run(f"s3://runs/kept/one{bucket}", tmp_path / "there").checkpoints)


def test_a_run_whose_storage_does_not_answer_is_named(
    bucket: str, s3: tuple[str, Callable[[float], None]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "ATTEMPTS", 1)
    _, set_rate = s3
    set_rate(1.0)
    with pytest.raises(UserError, match=r"s3://runs/kept/one.* cannot be read, after 1 attempts"):
        find_run(f"s3://runs/kept/one{bucket}", tmp_path / "there")


def test_a_storage_that_refuses_is_named(
    config: TrainConfig, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "PAUSES", (0.1,))
    config = dataclasses.replace(config, copy_to=f"s3://absent/kept{bucket}")
    with pytest.raises(UserError, match=r"or s3://absent/kept.* could not be written"):
        Trainer(config, checkpoints=tmp_path / "one" / "checkpoints").run()
    assert newest(tmp_path / "one" / "checkpoints")
    with pytest.raises(UserError, match=r"--copy-to elsewhere is no object storage"):
        dataclasses.replace(config, copy_to="elsewhere")
