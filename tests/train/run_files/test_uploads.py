"""Runs in object storage: checkpoints are copied as they are written, and every machine continues from them."""

import json
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import psutil
import pytest
import torch
from mlflow.tracking import MlflowClient
from trainers import make_trainer

from infra.errors import UserError
from infra.storage.directory import StorageDir
from infra.storage.files import write_json
from infra.storage.lease import LEASE_FILE
from infra.storage.local_directory import LocalDir
from infra.tracking.run_ref import RunRef
from train.config import Cycle, ResolvedConfig
from train.model_config import ModelConfig
from train.result import CycleReport
from train.run_files import checkpoint, uploads
from train.run_files.checkpoint import Checkpoints
from train.run_files.lookup import find_checkpoint, find_run, load_run_config
from train.run_files.progress import Progress, checkpoints_in, find_damage, newest, read_progress
from train.run_files.run_folder import RunFolder, new_run


@pytest.fixture
def config(small_shards: Path, small_model: ModelConfig) -> ResolvedConfig:
    return ResolvedConfig.of(
        data=str(small_shards), model=small_model, global_batch=4, micro_batch=4, steps=30, cycle=Cycle(10, 1),
        precision="fp32", device="cpu", warmup_steps=5, checkpoint_every=5,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def scratch(
    monkeypatch: pytest.MonkeyPatch, set_scratch: Callable[[Path], None], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """A machine's scratch, for each test. Its path is short, because Ray names sockets in it."""
    tmp_path_factory.getbasetemp()  # before, because pytest would make it there for the whole session
    with tempfile.TemporaryDirectory(prefix="t-", ignore_cleanup_errors=True) as folder:
        set_scratch(Path(folder))
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


def test_a_run_continues_from_its_copy(config: ResolvedConfig, bucket: str, tmp_path: Path) -> None:
    directory = StorageDir.of(f"s3://places/kept/run1{bucket}")
    directory.write_json("config.json", config.to_json())
    straight: list[CycleReport] = []
    make_trainer(config, on_cycle=straight.append).run()
    checkpoints = tmp_path / "here" / "checkpoints"
    stopping = iter([False] * 16 + [True]).__next__
    result = make_trainer(config, checkpoints=checkpoints, upload_dir=directory, should_stop=stopping).run()
    assert result.checkpoint == f"s3://places/kept/run1/checkpoints/step-00000017{bucket}"
    assert result.checkpoint is not None
    assert uploads.list_uploaded(directory) == ["step-00000015", "step-00000017"]
    with pytest.raises(UserError, match=r"there is no run .*--out runs"):
        find_run(f"s3://places/kept/other{bucket}", "runs")
    for text, out in ((directory.address, "runs"), (result.checkpoint, "runs"), ("run1", f"s3://places/kept{bucket}")):
        run, progress = find_run(text, out)
        assert run.location == directory
        assert read_progress(progress).step == 17
        assert load_run_config(text, out).to_json() == config.to_json()
        run, checkpoint = find_checkpoint(text, out)
        assert run.location == directory
        assert (checkpoint.name, find_damage(checkpoint)) == ("step-00000017", None)
    _, older = find_checkpoint(f"s3://places/kept/run1/checkpoints/step-00000015{bucket}", "runs")
    assert (older.name, find_damage(older)) == ("step-00000015", None)
    with pytest.raises(UserError, match=r"is not the newest checkpoint .* delete .* step-00000017"):
        find_run(f"s3://places/kept/run1/checkpoints/step-00000015{bucket}", "runs")
    resumed: list[CycleReport] = []
    resume, _ = RunFolder(tmp_path / "there", directory).newest_checkpoint()
    make_trainer(config, on_cycle=resumed.append, resume=resume).run()
    assert [(r.step, r.step_losses) for r in resumed] == [(r.step, r.step_losses) for r in straight[1:]]


def test_a_worker_takes_from_storage_what_it_lacks_and_nothing_else(
    config: ResolvedConfig, bucket: str, tmp_path: Path
) -> None:
    """What its scratch has of another run or a later step is removed; a damaged copy is passed over and named."""
    directory = StorageDir.of(f"s3://places/kept/run2{bucket}")
    home = RunFolder(tmp_path / "one", directory)
    make_trainer(config.replace(steps=10), checkpoints=home.checkpoints, upload_dir=directory).run()
    fifth, tenth = checkpoints_in(home.checkpoints)
    modified_before = (tenth / "state.pt").stat().st_mtime_ns
    shutil.copytree(tenth, home.checkpoints / "step-00000099")
    assert uploads.download_newest(directory, home.checkpoints) == (tenth, [])
    assert checkpoints_in(home.checkpoints) == [tenth]
    assert (tenth / "state.pt").stat().st_mtime_ns == modified_before
    directory.write("checkpoints/step-00000010/state.pt", b"cut short")
    shutil.rmtree(tenth)
    checkpoints, damaged = uploads.download_newest(directory, home.checkpoints)
    assert checkpoints == fifth
    assert "step-00000010" in damaged[0]
    assert "state.pt does not match its checksum. Using the previous one" in damaged[0]
    directory.remove(directory.list_files())
    assert uploads.download_newest(directory, home.checkpoints) == (None, [])
    assert checkpoints_in(home.checkpoints) == [], "a new run of that name"


def test_a_new_run_takes_no_name_that_is_taken(bucket: str) -> None:
    home = new_run(f"s3://places/kept{bucket}", "run3")
    with home.create():
        home.config.write_text("{}")
    home.push(home.config, home.result)
    assert home.location.list_files() == {"config.json": 2}
    with pytest.raises(UserError, match=r"s3://places/kept/\w+.* already exists. .*--name"):
        new_run(f"s3://places/kept{bucket}", "run3")
    home.location.write("checkpoints/step-00000005.progress.json", b"{}")
    with pytest.raises(UserError, match=r"s3://places/kept/\w+.* already exists.*--resume run3"):
        new_run(f"s3://places/kept{bucket}", "run3")
    with home.command_lock(), pytest.raises(UserError, match="is training in s3://places/kept/run3"):
        home.newest_progress()
    with pytest.raises(UserError, match=r"run3\S* already exists.*--name"), home.create():
        pass
    with pytest.raises(UserError, match=r"Cannot write to --out s3://absent/"):
        new_run(f"s3://absent{bucket}", "run3")


@pytest.mark.slow
def test_mlflow_has_the_whole_curve_of_a_run_whose_machine_was_lost(
    config: ResolvedConfig, bucket: str, tmp_path: Path, scratch: Path
) -> None:
    first_machine, second_machine = tmp_path / "here", tmp_path / "there"
    first_machine.mkdir()
    second_machine.mkdir()
    write_json(first_machine / "config.json", config.replace(checkpoint_every=7, steps=40_000).to_json())
    flags = ["--config", "config.json", "--out", f"s3://places/kept{bucket}", "--name", "run4"]
    lost = subprocess.Popen([sys.executable, "-m", "train.run", *flags], cwd=first_machine)
    directory = StorageDir.of(f"s3://places/kept/run4{bucket}")
    deadline = time.monotonic() + 240
    while not any(copy >= "step-00000056" for copy in uploads.list_uploaded(directory)):  # only the newest are kept
        assert lost.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.3)  # each look is a request to the storage that the run writes to
    for process in (psutil.Process(lost.pid), *psutil.Process(lost.pid).children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            process.kill()
    lost.wait()
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(exist_ok=True)
    (first_machine / "mlflow.db").unlink()
    directory.remove([LEASE_FILE])  # else it would be waited for until it is stale

    progress = read_progress(find_run(directory.address, "runs")[1])
    reported_step, end = progress.last_reported_step, progress.step + 30
    resumed = [sys.executable, "-m", "train.run", "--resume", directory.address, "--steps", str(end)]
    printed = subprocess.run(
        resumed, cwd=second_machine, capture_output=True, text=True, timeout=240, check=True
    ).stdout
    assert printed.count("tok/sec") == -((reported_step - end) // 10), "of the cycles, those that are new"
    client = MlflowClient(f"sqlite:///{second_machine}/mlflow.db")
    (run,) = client.search_runs(["1"])
    assert run.data.params["seed"] == "0", "a run that is new in its store is recorded whole"
    assert run.inputs is not None
    assert run.inputs.dataset_inputs
    assert run.data.tags["resumed_at_step"] == str(end - 30)
    assert "worker" not in run.data.tags, "it is this machine"
    curve = [point.step for point in client.get_metric_history(run.info.run_id, "loss/step")]
    assert curve == list(range(1, end + 1))
    logged = [json.loads(line) for line in directory.read("cycles.jsonl").splitlines()]
    assert sum(len(cycle["step_losses"]) for cycle in logged) == end
    result = json.loads(directory.read("result.json"))
    assert result["checkpoint"] == str(directory / f"checkpoints/step-{end:08d}")
    assert not list(scratch.glob("*/runs/*/*/checkpoints")), "nothing is left on the worker"


def test_unreachable_storage_is_retried(
    config: ResolvedConfig, bucket: str, s3: tuple[str, Callable[[float], None]], tmp_path: Path
) -> None:
    _, set_rate = s3
    set_rate(0.9999)
    back = threading.Timer(3.0, set_rate, [0.0])
    away = time.monotonic()
    back.start()
    directory = StorageDir.of(f"s3://places/kept/run5{bucket}")
    done = make_trainer(
        config.replace(steps=6), checkpoints=tmp_path / "here" / "checkpoints", upload_dir=directory
    ).run()
    assert done.outcome == "finished"
    assert time.monotonic() - away > 3.0
    assert uploads.list_uploaded(directory)[-1] == "step-00000006"


def test_a_copy_that_is_fetched_twice_is_complete_and_taken_from_storage_once(
    config: ResolvedConfig, bucket: str, tmp_path: Path
) -> None:
    """Its cycles too, which are not kept with the checkpoint on this machine."""
    directory = StorageDir.of(f"s3://places/kept/run7{bucket}")
    written = tmp_path / "one" / "checkpoints"
    written.mkdir(parents=True)
    (tmp_path / "one" / "cycles.jsonl").write_text(cycles := '{"step": 5}\n{"step": 10}\n')
    make_trainer(config.replace(steps=10), checkpoints=written, upload_dir=directory).run()

    def fetch() -> tuple[Path | None, list[str], str, dict[str, int]]:
        checkpoints, damaged = uploads.download_newest(directory, tmp_path / "two" / "checkpoints")
        assert checkpoints
        times = {file.name: file.stat().st_mtime_ns for file in checkpoints.iterdir()}
        return checkpoints, damaged, (tmp_path / "two" / "cycles.jsonl").read_text(), times

    first = fetch()
    assert first[:3] == (tmp_path / "two" / "checkpoints" / "step-00000010", [], cycles)
    assert set(first[3]) == {"model.safetensors", "state.pt", "progress.json"}
    assert fetch() == first


def test_a_run_whose_storage_does_not_answer_is_named(
    bucket: str, s3: tuple[str, Callable[[float], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, set_rate = s3
    set_rate(1.0)
    with pytest.raises(UserError, match=r"s3://places/kept/run6.* cannot be (read|listed)"):
        find_run(f"s3://places/kept/run6{bucket}", "runs")


def test_a_storage_that_refuses_is_named_at_once(config: ResolvedConfig, bucket: str, tmp_path: Path) -> None:
    """Its client has repeated what may help, for as long as the README says, and nothing repeats that."""
    directory = StorageDir.of(f"s3://absent/kept{bucket}")
    began = time.monotonic()
    with pytest.raises(UserError, match=r"Cannot write .* or s3://absent/kept"):
        make_trainer(config, checkpoints=tmp_path / "one" / "checkpoints", upload_dir=directory).run()
    assert time.monotonic() - began < 10
    assert newest(tmp_path / "one" / "checkpoints")


def test_training_does_not_wait_for_storage_that_does_not_respond(
    config: ResolvedConfig, s3: tuple[str, Callable[[float], None]], tmp_path: Path
) -> None:
    """What is being copied stays beside the newest checkpoint, and the failure is told once the copy has ended."""
    s3[1](1.0)  # Requests are not retried.
    trainer = make_trainer(config)
    taken = checkpoint.take_snapshot(trainer.model, trainer.optimizer, trainer.scaler, torch.zeros(0))
    progress = Progress(data_fingerprint="", tokenizer_sha256="", config=config.to_json())
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"endpoint=http://127.0.0.1:{silent.getsockname()[1]}&region=us-east-1"
        checkpoints = Checkpoints(tmp_path, 1, StorageDir.of(f"s3://places/kept?{endpoint}"))
        began = time.monotonic()
        for step in (1, 2, 3):
            checkpoints.save(taken, replace(progress, step=step), lambda losses: True)
        while [path.name for path in checkpoints_in(tmp_path)] != ["step-00000001", "step-00000003"]:
            assert time.monotonic() - began < 20
            time.sleep(0.01)
    with pytest.raises(UserError, match=r"Cannot write .* or s3://places/kept"):
        checkpoints.wait()
    assert [path.name for path in checkpoints_in(tmp_path)] == ["step-00000003"]


class RecordingDir(LocalDir, schemes=()):
    """A directory that records what is uploaded and removed."""

    uploaded: ClassVar[list[str]] = []
    removed: ClassVar[list[list[str]]] = []

    def upload(self, file: Path, name: str) -> None:
        self.uploaded.append(name)
        super().upload(file, name)

    def remove(self, names: Iterable[str]) -> None:
        self.removed.append(sorted(names))
        super().remove(self.removed[-1])


def test_what_has_progress_in_the_storage_is_whole(tmp_path: Path) -> None:
    """At every moment: it comes last and goes first, and alone, because files of one removal go in any order."""
    directory = RecordingDir(str(tmp_path / "kept"))
    for old in ("checkpoints/step-00000005", "checkpoints/step-00000020"):  # one is older, the other damaged
        for name in ("model.safetensors", "progress.json", "state.pt"):
            directory.write(f"{old}/{name}", b"")
    made = tmp_path / "one" / "checkpoints" / "step-00000010"
    made.mkdir(parents=True)
    for name in ("model.safetensors", "progress.json", "state.pt"):
        (made / name).write_text(name)
    (tmp_path / "one" / "cycles.jsonl").write_text("a cycle")
    uploads.upload(made, tmp_path / "one" / "cycles.jsonl", directory, keep=1)
    new = [f"checkpoints/step-00000010/{name}" for name in ("cycles.jsonl", "model.safetensors", "state.pt")]
    assert sorted(directory.uploaded[:3]) == new
    assert directory.uploaded[3:] == ["checkpoints/step-00000010/progress.json"]
    assert directory.removed == [
        names
        for old in ("checkpoints/step-00000005", "checkpoints/step-00000020")
        for names in ([f"{old}/progress.json"], [f"{old}/model.safetensors", f"{old}/state.pt"])
    ]
    assert uploads.list_uploaded(directory) == ["step-00000010"]


def test_a_copy_is_as_far_as_its_checkpoint(config: ResolvedConfig, bucket: str, tmp_path: Path) -> None:
    """Cycles that were reported while it was copied are left out."""
    directory = StorageDir.of(f"s3://places/kept/run9{bucket}")
    checkpoints = tmp_path / "one" / "checkpoints"
    lines = [json.dumps({"step": step}) + "\n" for step in (10, 12, 20)]
    checkpoints.mkdir(parents=True)
    (tmp_path / "one" / "cycles.jsonl").write_text("".join(lines))
    make_trainer(config.replace(steps=12), checkpoints=checkpoints, upload_dir=directory).run()
    directory.write_json("config.json", config.to_json())
    run, progress = find_run(directory.address, "runs")
    assert read_progress(progress).last_reported_step == 12
    assert run.cycles.read_text() == "".join(lines[:2])


def test_the_mlflow_run_of_a_run_in_storage_is_known_where_its_store_is(bucket: str, tmp_path: Path) -> None:
    home = new_run(f"s3://places/kept{bucket}", "run10")
    key = RunRef("http://127.0.0.1:5000", "1", "abc")
    home.save_run_ref(key)
    home.newest_progress()
    stored_ref = home.run_ref()
    assert stored_ref
    assert (stored_ref.store, stored_ref.run_id) == (key.store, "abc")
    home.save_run_ref(replace(key, store=f"sqlite:///{tmp_path}/gone.db"))
    assert home.run_ref() is None
    named = home.run_ref("http://127.0.0.1:5001")
    assert named
    assert (named.store, named.run_id) == ("http://127.0.0.1:5001", "abc")
