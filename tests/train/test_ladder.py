"""The command: rungs in fresh processes through Ray Train, a table that says how sure it is, and resuming."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from infra.command import UserError
from infra.tracking import store_uri
from train import ladder
from train.climb import refuse_short
from train.config import ModelConfig, TrainConfig
from train.loop import Trainer

MODEL = "tiny,layers=2,heads=2,width=32,context_length=32,vocabulary=257,padded_vocabulary=320"
SUITE = """
climbs = true
[base]
model = "tiny"
batch = 32
precision = "fp32"
attention = "manual"
naive = ["sync", "copy"]
[[rung]]
name = "tensor cores"
precision = "tf32"
[[rung]]
name = "no synchronisation"
naive = []
[[rung]]
name = "cuDNN"
attention = "cudnn"
"""


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    Path("mine.toml").write_text(SUITE)


def command(monkeypatch: pytest.MonkeyPatch, *flags: str) -> int:
    """The exit code of ``python -m train.ladder`` with these flags."""
    monkeypatch.setattr(sys, "argv", ["train.ladder", *flags])
    with pytest.raises(SystemExit) as leaving:
        ladder.main()
    return int(leaving.value.code or 0)


@pytest.mark.usefixtures("shared_ray")
def test_a_ladder_is_interrupted_and_continued(
    monkeypatch: pytest.MonkeyPatch, small_shards: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    flags = ["--suite", "mine.toml", "--data", str(small_shards), "--model", MODEL, "--cycle", "10+1", "--steps", "20"]
    started = subprocess.Popen(
        [sys.executable, "-m", "train.ladder", *flags, "--name", "one"],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(ladder.__file__).parent.parent)},
    )
    deadline = time.monotonic() + 120
    while not Path("runs/one/02-no-synchronisation").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    started.send_signal(signal.SIGINT)
    printed, _ = started.communicate(timeout=120)
    assert started.returncode == 130, printed
    assert "short form" in printed
    assert "--resume one" in printed
    assert Path("runs/one/control-00/rung.json").exists()

    code = command(monkeypatch, "--resume", "one", "--out", "runs")
    printed = capfd.readouterr().out
    assert code == 0, printed
    assert printed.count("kept from") == 1
    found = json.loads(Path("runs/one/standings.json").read_text())
    base, cores, quick, cudnn = found["rows"]
    assert "a CPU computes the same fp32" in cores["reason"]
    assert "--attention cudnn" in cudnn["reason"]
    assert base["speed"] > 0
    assert quick["low"] <= quick["speed"] <= quick["high"]
    assert quick["total"]["low"] < quick["total"]["ratio"] < quick["total"]["high"]
    assert quick["loss"] == pytest.approx(base["loss"], abs=1e-4), "leaving habits keeps the mathematics"
    assert found["device"] == "cpu"
    assert base["mfu"] is None
    assert Path("runs/one/speed.png").stat().st_size > 5000
    assert Path("runs/one/loss.png").stat().st_size > 5000
    assert "cuDNN: not run" in Path("runs/one/summary.md").read_text()

    client = MlflowClient(store_uri())
    (experiment,) = [e for e in client.search_experiments() if e.name == "ladder"]
    runs = client.search_runs([experiment.experiment_id])
    (parent,) = [run for run in runs if run.data.tags.get("kind") == "ladder"]
    children = [run for run in runs if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    finished = [run.data.tags["kind"] for run in children if run.info.status == "FINISHED"]
    assert sorted(finished) == ["control", "control", "rung"]
    assert {run.info.status for run in runs} == {"FINISHED", "KILLED"}, "the interrupted rung's"
    assert {f.path for f in client.list_artifacts(parent.info.run_id)} >= {"speed.png", "loss.png", "summary.md"}

    assert command(monkeypatch, "--resume", "one", "--compare", "one", "--out", "runs") == 0
    printed = capfd.readouterr().out
    assert printed.count("kept from") == 3
    assert "1.00x" in printed
    assert command(monkeypatch, "--resume", "on", "--out", "runs") == 2
    assert "did you mean one" in " ".join(capfd.readouterr().err.split())


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--suite", "lop"], "loop"),
        (["--suite", "a100", "--rungs", "compil"], "compile"),
        (["--steps", "3"], "needs 8 or more"),
        (["--steps", "10", "--time-budget", "5m"], "give one of them"),
        (["--data", "nowhere"], "pipeline.tokenize"),
        (["--compare", "nothing"], "no finished ladder"),
    ],
)
def test_a_mistake_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, small_shards: Path, capfd: pytest.CaptureFixture[str], flags: list[str], named: str
) -> None:
    data = [] if "--data" in flags else ["--data", str(small_shards)]
    assert command(monkeypatch, *data, *flags) == 2
    error = " ".join(capfd.readouterr().err.replace("│", " ").split())
    assert named in error
    assert "Traceback" not in error


def test_a_budget_that_leaves_no_warm_up_says_how_long_it_needs(small_shards: Path, small_model: ModelConfig) -> None:
    config = TrainConfig(data=small_shards, model=small_model, micro_batch=4, global_batch=4, time_budget=0.001)
    short = Trainer(config).run()
    with pytest.raises(UserError, match=r"a rung needs 8 steps, here --time-budget \d+s or more"):
        refuse_short(short, "")
    refuse_short(Trainer(replace(config, time_budget=None, steps=8)).run(), "")
    with pytest.raises(UserError, match="cannot be run: oom"):
        refuse_short(None, "oom")
