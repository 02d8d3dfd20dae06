"""Checkpoints in object storage: copied as they are written, and the run is continued from them on another machine."""

import dataclasses
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pyarrow.fs
import pytest
from mlflow.tracking import MlflowClient

from infra import storage
from infra.errors import UserError
from infra.storage import write_json
from train.checkpoint import remote, save
from train.checkpoint.find import find_run
from train.checkpoint.progress import newest, read_progress
from train.checkpoint.run_folder import RunFolder
from train.config import Cycle, TrainConfig, load_config
from train.loop.trainer import Trainer
from train.model_config import ModelConfig
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
        data=str(small_shards), model=small_model, global_batch=4, micro_batch=4, steps=30, cycle=Cycle(10, 1),
        precision="fp32", device="cpu", warmup_steps=5, checkpoint_every=5,
    )  # fmt: skip


def test_a_run_continues_from_its_copy(config: TrainConfig, bucket: str, tmp_path: Path) -> None:
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


def test_unreachable_storage_is_retried(
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
    monkeypatch.setattr(storage, "ATTEMPTS", 1)
    _, set_rate = s3
    set_rate(1.0)
    with pytest.raises(UserError, match=r"s3://runs/kept/one.* cannot be read, after 1 attempts"):
        find_run(f"s3://runs/kept/one{bucket}", tmp_path / "there")


def test_a_storage_that_refuses_is_named(
    config: TrainConfig, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save, "PAUSES", (0.1,))
    config = dataclasses.replace(config, copy_to=f"s3://absent/kept{bucket}")
    with pytest.raises(UserError, match=r"or s3://absent/kept.* could not be written"):
        Trainer(config, checkpoints=tmp_path / "one" / "checkpoints").run()
    assert newest(tmp_path / "one" / "checkpoints")
    with pytest.raises(UserError, match=r"--copy-to elsewhere is not object storage"):
        dataclasses.replace(config, copy_to="elsewhere")


class Watched:
    """A storage that is used in an order."""

    def __init__(self, system: pyarrow.fs.FileSystem) -> None:
        self.system = system
        self.did: list[tuple[str, str]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            self.did.append((name, str(arguments[0])))
            return getattr(self.system, name)(*arguments, **named)

        return call


def test_what_has_progress_in_the_storage_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every moment: it comes last and goes first. A folder on the disk stands for the storage."""
    storage = Watched(pyarrow.fs.LocalFileSystem())
    monkeypatch.setattr(remote, "locate", lambda uri: (storage, str(tmp_path / "kept")))
    monkeypatch.setattr(remote, "store", lambda file, system, target: _copy(file, storage, target))
    run = RunFolder(tmp_path / "one")
    for step in (5, 10):
        made = run.checkpoints / f"step-{step:08d}"
        made.mkdir(parents=True)
        for name in ("model.safetensors", "progress.json", "state.pt"):
            (made / name).write_text(f"{name} of {step}")
        run.cycles.write_text("a cycle")
        remote.upload(made, "one", "s3://kept", keep=1)
    stored = [Path(path).name for did, path in storage.did if did == "store"]
    assert [stored[:4], stored[4:]] == [["cycles.jsonl", "model.safetensors", "state.pt", "progress.json"]] * 2
    old = f"{tmp_path}/kept/one/step-00000005"
    removed = [(did, path) for did, path in storage.did if did.startswith("delete")]
    assert removed == [("delete_file", f"{old}/progress.json"), ("delete_dir", old)]
    assert [path.name for path in (tmp_path / "kept" / "one").iterdir()] == ["step-00000010"]


def _copy(file: Path, storage: Watched, target: str) -> None:
    storage.did.append(("store", target))
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(file, target)


def test_a_copy_is_as_far_as_its_checkpoint(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cycles that were reported while it was copied are left out, and a damaged copy is named."""
    kept, here = tmp_path / "kept" / "one", tmp_path / "there"
    monkeypatch.setattr(remote, "locate", lambda uri: (pyarrow.fs.LocalFileSystem(), str(kept)))
    home = RunFolder(kept.parent / "made")
    Trainer(dataclasses.replace(config, steps=12), checkpoints=home.checkpoints).run()
    found = newest(home.checkpoints)
    assert found
    assert read_progress(found).reported == 12
    shutil.copytree(found, kept / found.name)
    lines = [json.dumps({"step": step}) + "\n" for step in (10, 12, 20)]
    (kept / found.name / "cycles.jsonl").write_text("".join(lines))
    run = RunFolder(remote.download("s3://kept/one", here))
    assert run.cycles.read_text() == "".join(lines[:2])
    assert newest(run.checkpoints) == run.checkpoints / found.name
    assert not (run.checkpoints / found.name / "cycles.jsonl").exists()
    assert load_config(run.config) == dataclasses.replace(config, steps=12)
    (kept / found.name / "state.pt").write_bytes(b"cut short")
    with pytest.raises(UserError, match=r"step-00000012 is damaged there; remove it to continue from the one before"):
        remote.download("s3://kept/one", tmp_path / "elsewhere")
