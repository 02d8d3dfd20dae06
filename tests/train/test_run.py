"""The command: one run from flags to folder and MLflow, and one sentence with exit code 2 for every mistake."""

import dataclasses
import json
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from infra.storage import write_json
from infra.tracking import store_uri
from train import run, worker
from train.config import ModelConfig, TrainConfig, config_from_json
from train.folder import RunFolder, find_checkpoint
from train.loop import Trainer
from train.result import CycleReport

pytestmark = pytest.mark.usefixtures("working_folder")
ROOT = Path(__file__).parents[2]
FLAGS = [
    "--model", "tiny,layers=2,heads=2,width=32,context_length=32,vocabulary=257,padded_vocabulary=320",
    "--global-batch", "8", "--micro-batch", "4", "--cycle", "10+2", "--learning-rate", "3e-3", "--device", "cpu",
]  # fmt: skip


def command(monkeypatch: pytest.MonkeyPatch, *flags: str) -> int:
    """The exit code of ``python -m train.run`` with these flags."""
    monkeypatch.setattr(sys, "argv", ["train.run", *flags])
    with pytest.raises(SystemExit) as leaving:
        run.main()
    return int(leaving.value.code or 0)


@pytest.mark.usefixtures("shared_ray")
def test_one_run(monkeypatch: pytest.MonkeyPatch, small_shards: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code = command(monkeypatch, "--data", str(small_shards), "--name", "one", "--steps", "25", *FLAGS)
    printed = capfd.readouterr().out
    assert code == 0, printed
    result = json.loads(Path("runs/one/result.json").read_text())
    assert result["outcome"] == "finished"
    assert result["steps"] == 25
    assert Path(result["checkpoint"]).is_dir()
    assert printed.count("tok/sec") == 3
    (found,) = MlflowClient(store_uri()).search_runs(["1"])
    assert found.info.status == "FINISHED"
    client = MlflowClient(store_uri())
    steps = [metric.step for metric in client.get_metric_history(found.info.run_id, "loss/step")]
    assert steps == list(range(1, 26))
    predicted = found.data.metrics["memory/predicted_gib"] * 2**30
    assert found.data.metrics["memory/prediction_error"] == pytest.approx(
        predicted / result["memory"]["process"] - 1, rel=1e-6
    )
    assert found.data.metrics["result/flops_per_token_PaLM"] == result["flops_per_token"]
    assert found.data.metrics["result/flops_per_token_causal"] < result["flops_per_token"]
    assert found.inputs
    assert found.inputs.dataset_inputs[0].dataset.digest == result["data_fingerprint"][:36]

    assert command(monkeypatch, "--data", str(small_shards), "--name", "one", "--steps", "25", *FLAGS) == 2
    assert "--resume one" in capfd.readouterr().err
    assert command(monkeypatch, "--resume", "one") == 2
    assert "is at step 25 of 25: give a larger --steps" in capfd.readouterr().err
    assert command(monkeypatch, "--resume", "one", "--steps", "30", "--model", "tiny") == 2
    assert "vocabulary=257 and not 50257" in capfd.readouterr().err
    assert command(monkeypatch, "--resume", "one", "--steps", "30", "--global-batch", "4") == 2
    assert "was trained with --global-batch 8 and not 4" in capfd.readouterr().err
    shutil.copytree(small_shards, "other")
    manifest = Path("other/manifest.json")
    manifest.write_text(manifest.read_text().replace(result["data_fingerprint"], "0" * 64))
    assert command(monkeypatch, "--resume", "one", "--steps", "30", "--data", "other") == 2
    assert "was trained on other data" in capfd.readouterr().err


@pytest.mark.usefixtures("shared_ray")
def test_two_workers(monkeypatch: pytest.MonkeyPatch, small_shards: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Through Ray Train they compute what one loop does here, and what one refuses ends both."""
    shard = shutil.copytree(small_shards, Path("broken")) / "train/00000.arrow"
    shard.rename("taken away")
    flags = ["--data", "broken", "--name", "two", "--workers", "2", "--steps", "12", *FLAGS]
    assert command(monkeypatch, *flags) == 2
    assert "00000.arrow" in " ".join(capfd.readouterr().err.split()), "they gave up, and were started again to say so"
    Path("taken away").rename(shard)
    assert command(monkeypatch, *flags) == 0, capfd.readouterr().err
    home = RunFolder(Path("runs/two"))
    found = [json.loads(line) for line in home.cycles.read_text().splitlines()]
    config = config_from_json(json.loads(home.config.read_text()), "test")
    alone: list[CycleReport] = []
    Trainer(dataclasses.replace(config, workers=1), on_cycle=alone.append).run()
    for cycle, report in zip(found, alone, strict=True):
        assert cycle["step_losses"] == pytest.approx(report.step_losses, rel=1e-4)
        assert cycle["val_loss"] == pytest.approx(report.val_loss, rel=1e-4)


def test_the_first_signal_asks_and_the_second_leaves(tmp_path: Path) -> None:
    flag = tmp_path / "STOP"
    signalled = """
import os, signal, sys, time
from pathlib import Path
from train.launch import stop_on_signal
flag = Path(sys.argv[1])
if os.fork():  # to a process each, of which the second has nobody to tell
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 130
    flag.unlink()
    reader, writer = os.pipe()
    os.close(reader)  # as of `2>&1 | tee log`, which ends by the same Ctrl-C
    os.dup2(writer, 2)
with stop_on_signal(flag):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.1)
    if flag.exists():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(10)
"""
    command = [sys.executable, "-c", signalled, str(flag)]
    left = subprocess.run(command, timeout=60, cwd=ROOT, check=False, stderr=subprocess.PIPE, text=True)
    assert left.returncode == 130, left.stderr
    assert left.stderr.count("once more to leave at once") == 1, "the second says it to nobody"
    assert flag.exists()


def test_what_one_worker_refused_ends_all_when_they_start_again(tmp_path: Path) -> None:
    home = RunFolder(tmp_path)
    home.refused.write_text("the disk is full")
    with ExitStack() as held:
        assert worker.begin(home, held) == (None, "the disk is full")
    with ExitStack() as held:
        assert worker.begin(home, held) == (None, None)
    (tmp_path / "starts").write_text("0\n0\n0\n")
    with ExitStack() as held:
        assert "died 3 times without getting from step 0" in (worker.begin(home, held)[1] or "")
    with ExitStack() as held:
        assert "cannot be used" in (worker.begin(RunFolder(tmp_path / "gone"), held)[1] or "")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--data", "nowhere"], "python -m pipeline.tokenize"),
        (["--data", "."], "there are no token shards at"),
        (["--global-batch", "7", "--micro-batch", "2"], "--global-batch 7"),
        (["--model", "huge"], "gpt2-124m"),
        (["--config", "none.json"], "none.json"),
        (["--config", ""], "--config is empty"),
        (["--resume="], "--resume is empty"),
        (["--resume", "never"], "--resume never"),
        (["--resume", "one", "--name", "two"], "--name two: a run that goes on keeps its name"),
        (["--steps", "3", "--tokens", "70000000"], "--tokens"),
        (["--time-budget", "5"], "5m"),
        (["--text-field", "content"], "--text-field is about books and this run reads none: name them with --stream"),
        (["--stream", "books", "--steps", "3", "--doc-separator", ""], "--doc-separator is empty"),
    ],
)
def test_a_mistake_gets_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], flags: list[str], named: str
) -> None:
    assert command(monkeypatch, *flags) == 2
    message = capfd.readouterr().err
    assert named in message
    assert "Traceback" not in message


def test_a_damaged_checkpoint_is_named_before_the_run_goes_on_from_an_older_one(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], small_shards: Path, small_model: ModelConfig
) -> None:
    home = RunFolder(Path("runs/one"))
    config = TrainConfig(
        data=small_shards, model=small_model, micro_batch=4, global_batch=4, steps=6, checkpoint_every=2, device="cpu",
        keep_checkpoints=3,
    )  # fmt: skip
    Trainer(config, checkpoints=home.checkpoints).run()
    write_json(home.config, config.to_json())
    (home.checkpoints / "step-00000004" / "progress.json").unlink()
    (home.checkpoints / "step-00000006" / "model.safetensors").write_bytes(b"")
    assert command(monkeypatch, "--resume", "one", "--seed", "1") == 2
    unreadable, emptied, refusal = capfd.readouterr().err.splitlines()
    assert "step-00000004 is no checkpoint that can be read" in unreadable
    assert "step-00000006 is damaged: model.safetensors is not what was written; " in emptied
    assert all(line.endswith("; step-00000002 is taken instead.") for line in (unreadable, emptied))
    assert ".;" not in unreadable
    assert "step-00000002 was trained with --seed 0 and not 1" in refusal
    assert find_checkpoint("one", Path("runs")).name == "step-00000002"
    assert capfd.readouterr().err.splitlines() == [unreadable, emptied]


def test_damaged_shards_are_named(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], small_shards: Path, tmp_path: Path
) -> None:
    shutil.copytree(small_shards, tmp_path / "tokens")
    manifest = tmp_path / "tokens" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format_version": 1', '"format_version": 9'))
    assert command(monkeypatch, "--data", "tokens") == 2
    assert "format version 9" in capfd.readouterr().err


def test_what_ray_trains_controller_unpickles_imports_no_torch() -> None:
    """Two seconds before the worker would even be started."""
    program = "import sys, train.controller; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0
