"""The command: one run from flags to folder and MLflow, and one sentence with exit code 2 for every mistake."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from infra.tracking import store_uri
from train import run

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


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


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


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--data", "nowhere"], "python -m pipeline.tokenize"),
        (["--data", "."], "manifest.json"),
        (["--global-batch", "7", "--micro-batch", "2"], "--global-batch 7"),
        (["--model", "huge"], "gpt2-124m"),
        (["--config", "none.json"], "none.json"),
        (["--resume", "never"], "--resume never"),
        (["--steps", "3", "--tokens", "70000000"], "--tokens"),
        (["--time-budget", "5"], "5m"),
    ],
)
def test_a_mistake_gets_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], flags: list[str], named: str
) -> None:
    assert command(monkeypatch, *flags) == 2
    message = capfd.readouterr().err
    assert named in message
    assert "Traceback" not in message


def test_damaged_shards_are_named(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], small_shards: Path, tmp_path: Path
) -> None:
    shutil.copytree(small_shards, tmp_path / "tokens")
    manifest = tmp_path / "tokens" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format_version": 1', '"format_version": 9'))
    assert command(monkeypatch, "--data", "tokens") == 2
    assert "format version 9" in capfd.readouterr().err
