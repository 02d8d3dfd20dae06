"""The command: one run from flags to folder and MLflow, and one sentence with exit code 2 for every mistake."""

import dataclasses
import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.image import imread
from mlflow.tracking import MlflowClient
from trainers import make_trainer

from infra.cli.interrupts import SIGNALS
from infra.errors import UserError
from infra.storage.directory import StorageDir
from infra.storage.files import write_json
from infra.tracking.store import store_uri
from pipeline.encoding.tokenizer import gpt2
from pipeline.shards import MANIFEST_FILE, TOKENIZER_FILE, read_manifest
from train import Callback, TrainStep, run, train
from train.config import Cycle, TrainConfig, config_from_json
from train.launch.job import ResolvedRun
from train.loop.sampling import load_model
from train.model_config import ModelConfig
from train.resolved import resolve_local
from train.result import CycleReport
from train.run_files.progress import checkpoints_in
from train.run_files.run_folder import RunFolder

pytestmark = pytest.mark.usefixtures("working_folder")
ROOT = Path(__file__).parents[2]
FLAGS = [
    "--model", "tiny,layers=2,heads=2,width=32,context_length=32,vocab_size=257,padded_vocab_size=320",
    "--global-batch", "8", "--micro-batch", "4", "--cycle", "10+2", "--learning-rate", "3e-3", "--device", "cpu",
]  # fmt: skip


def test_a_copied_run_is_recorded_anew_where_a_store_is_named(tmp_path: Path, empty_store: Path) -> None:
    first, second = (RunFolder(tmp_path / name) for name in ("first", "second"))
    first.path.mkdir()
    store = f"sqlite:///{shutil.copy(empty_store, tmp_path / 'named.db')}"
    key, _ = run.open_mlflow_run(first, store, starts=True)
    same_key, logged = run.open_mlflow_run(first, store, starts=False)
    assert (same_key, logged and logged.params) == (key, set())
    shutil.copytree(first.path, second.path)
    with pytest.raises(UserError, match=f"{second.path} was copied or moved from {first.path}.*--tracking-uri"):
        run.open_mlflow_run(second, None, starts=False)
    other, logged = run.open_mlflow_run(second, store, starts=False)
    assert logged is None
    assert second.run_ref() == other != key


@pytest.mark.usefixtures("shared_ray")
def test_one_run(
    command: Callable[..., int], refused: Callable[..., str], small_shards: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = command(run.main, "--data", str(small_shards), "--name", "one", "--steps", "25", *FLAGS)
    printed = capfd.readouterr().out
    assert code == 0, printed
    result = json.loads(Path("runs/one/result.json").read_text())
    assert result["outcome"] == "finished"
    assert result["steps"] == 25
    assert Path(result["checkpoint"]).is_dir()
    assert printed.count("tok/sec") == 3
    (mlflow_run,) = MlflowClient(store_uri()).search_runs(["1"])
    assert mlflow_run.info.status == "FINISHED"
    client = MlflowClient(store_uri())
    steps = [metric.step for metric in client.get_metric_history(mlflow_run.info.run_id, "loss/step")]
    assert steps == list(range(1, 26))
    assert mlflow_run.data.metrics["system/worker_memory_gb"] > 0.1
    assert not any(name.startswith("system/gpu") for name in mlflow_run.data.metrics)
    predicted = mlflow_run.data.metrics["detail/memory/predicted_gb"] * 1e9
    assert mlflow_run.data.metrics["detail/memory/prediction_error"] == pytest.approx(
        predicted / result["memory"]["process"] - 1, rel=1e-6
    )
    assert mlflow_run.data.metrics["detail/result/flops_per_token_PaLM"] == result["flops_per_token"]
    assert mlflow_run.data.metrics["detail/result/flops_per_token_causal"] < result["flops_per_token"]
    assert mlflow_run.inputs
    assert mlflow_run.inputs.dataset_inputs[0].dataset.digest == result["data_fingerprint"][:36]
    assert Path("runs/one/summary.md").read_text() == mlflow_run.data.tags["mlflow.note.content"]
    height, width, _ = imread("runs/one/curves.png").shape
    assert width > height > 500
    assert "curves.png" in {file.path for file in client.list_artifacts(mlflow_run.info.run_id)}

    shutil.copytree(small_shards, "other")
    manifest = Path("other/manifest.json")
    manifest.write_text(manifest.read_text().replace(result["data_fingerprint"], "0" * 64))
    for again, named in (
        (["--data", str(small_shards), "--name", "one", *FLAGS], "--resume one"),
        (["--resume", "one"], "step 25 of 25"),
        (["--resume", "one", "--steps", "30", "--model", "tiny"], "vocab_size=257, not 50257"),
        (["--resume", "one", "--steps", "30", "--data", "other"], "different data"),
    ):
        assert named in refused(run.main, *again)


@pytest.mark.usefixtures("shared_ray")
@pytest.mark.slow
def test_two_workers(
    command: Callable[..., int], refused: Callable[..., str], small_shards: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Through Ray Train they compute what one loop does here, and what one refuses ends both."""
    flags = ["--data", str(small_shards), "--name", "two", "--workers", "2", "--steps", "12", *FLAGS]
    assert command(run.main, *flags) == 0, capfd.readouterr().err
    home = RunFolder(Path("runs/two"))
    logged_cycles = [json.loads(line) for line in home.cycles.read_text().splitlines()]
    config = config_from_json(json.loads(home.config.read_text()), "test")
    alone: list[CycleReport] = []
    make_trainer(resolve_local(config.replace(workers=1)), on_cycle=alone.append).run()
    for cycle, report in zip(logged_cycles, alone, strict=True):
        assert cycle["step_losses"] == pytest.approx(report.step_losses, rel=1e-4)
        assert cycle["val_loss"] == pytest.approx(report.val_loss, rel=1e-4)

    shard = shutil.copytree(small_shards, Path("broken")) / "train/000000-000.arrow"
    shard.rename("taken away")
    flags = ["--data", "broken", "--name", "three", "--workers", "2", "--steps", "12", *FLAGS]
    assert shard.name in refused(run.main, *flags), "they gave up, and were started again to say so"
    Path("taken away").rename(shard)
    assert command(run.main, *flags) == 0, capfd.readouterr().err


@pytest.mark.usefixtures("shared_ray")
@pytest.mark.slow
def test_no_worker_waits_for_what_has_no_part_in_the_loss(
    command: Callable[..., int], small_shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "models"))
    model = [
        "--model",
        "wrong_models:Idle,context_length=32,vocab_size=257",
        "--global-batch",
        "4",
        "--micro-batch",
        "2",
    ]
    for workers in ("1", "2"):
        flags = ["--data", str(small_shards), "--steps", "3", "--cycle", "3+1", "--device", "cpu", "--name", workers]
        assert command(run.main, *flags, *model, "--workers", workers) == 0
    one, two = (json.loads(Path(f"runs/{name}/cycles.jsonl").read_text())["step_losses"] for name in "12")
    assert one == pytest.approx(two, rel=1e-5)


@pytest.mark.usefixtures("shared_ray")
@pytest.mark.slow
def test_memory_that_runs_out_in_one_of_two_workers_ends_the_run_with_the_reason(
    command: Callable[..., int], small_shards: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sizes = f"padded_vocab_size={2**31},width={2**19}"
    vast = [flag.replace("width=32,", "").replace("padded_vocab_size=320", sizes) for flag in FLAGS]
    code = command(run.main, "--data", str(small_shards), "--name", "vast", "--workers", "2", "--steps", "2", *vast)
    printed = capfd.readouterr()
    assert code == 1, printed.err
    result = json.loads(Path("runs/vast/result.json").read_text())
    assert result["outcome"] == "oom"
    assert re.match(r"out of memory while building the model on worker [12] of 2, allocating", result["reason"])
    assert "no change is predicted to fit" in printed.out
    assert "resuming on" not in printed.out, "it is not tried again"


def test_a_step_that_is_too_large_is_refused_with_both_numbers(refused: Callable[..., str], small_shards: Path) -> None:
    tokens = read_manifest(small_shards).splits["train"]["tokens"]
    Path("book.txt").write_text("It was a book of some length, which nobody had read. " * 20)
    vast = ["--model", "tiny,context_length=32", "--micro-batch", "1", "--steps", "1", "--cycle", "1+0"]
    for source, batch, numbers in (
        (["--data", str(small_shards), *FLAGS[:2]], tokens // 32 + 1, (f"{(tokens // 32 + 1) * 32:,}", f"{tokens:,}")),
        (["--stream", "book.txt"], 10**9, ("1,000,000,000", "1,000,000.")),
    ):
        message = refused(run.main, *vast, *source, "--global-batch", str(batch))
        assert all(number in message for number in numbers), message


@pytest.mark.parametrize(
    ("model", "named"),
    [
        ("tiny,vocab_size=200,padded_vocab_size=256", "vocab_size=257"),
        ("tiny,context_length=90000,vocab_size=257", "a window needs 90,001"),
    ],
)
def test_data_that_do_not_fit_the_model_are_refused(
    refused: Callable[..., str], small_shards: Path, model: str, named: str
) -> None:
    flags = ["--data", str(small_shards), "--model", model, "--global-batch", "1", "--steps", "1", "--cycle", "1+1"]
    assert named in refused(run.main, *flags, "--device", "cpu")


def test_data_whose_vocabulary_is_another_than_their_manifests_are_refused(
    refused: Callable[..., str], small_shards: Path
) -> None:
    shutil.copytree(small_shards, "other")
    Path("other", TOKENIZER_FILE).write_text(gpt2().tokenizer_json())
    message = refused(run.main, "--data", "other", "--steps", "1", *FLAGS)
    assert TOKENIZER_FILE in message
    assert "--overwrite" in message
    Path("other", TOKENIZER_FILE).unlink()
    manifest = Path("other", MANIFEST_FILE)
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"config": {"tokenizer": "another"}}))
    assert TOKENIZER_FILE in refused(run.main, "--data", "other", "--steps", "1", *FLAGS), "which is lost"


class Recorder(Callback):
    """Records what the loop calls, and stops the run after step ``last``, or after the first cycle."""

    def __init__(self, last: int = 0) -> None:
        self.last = last
        self.steps: list[tuple[int, float, float]] = []
        self.reports: list[CycleReport] = []
        self.weights: torch.Tensor | None = None

    def on_step_end(self, step: TrainStep) -> bool | None:
        self.steps.append((step.step, float(step.loss), step.learning_rate))
        self.weights = next(step.model.parameters()).detach().clone()
        return step.step == self.last

    def on_cycle_end(self, report: CycleReport) -> bool | None:
        self.reports.append(report)
        return not self.last


def small_run(data: Path, model: ModelConfig, **settings: Any) -> TrainConfig:
    defaults: dict[str, Any] = {"micro_batch": 2, "global_batch": 2, "steps": 9, "cycle": Cycle(2, 1), "device": "cpu"}
    return TrainConfig.of(data=str(data), model=model, **(defaults | settings))


def test_callbacks_see_each_step_and_cycle_and_stop_the_run(
    small_shards: Path, small_model: ModelConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    config, recorder, silent = small_run(small_shards, small_model), Recorder(last=5), Callback()
    result = train(config, name="five", callbacks=[silent, recorder])
    assert (result.outcome, result.steps) == ("finished", 5)
    assert "Recorder" in result.reason
    assert [step for step, _, _ in recorder.steps] == [1, 2, 3, 4, 5]
    assert [loss for _, loss, _ in recorder.steps] == [
        loss for report in recorder.reports for loss in report.step_losses
    ]
    assert all(rate > 0 for _, _, rate in recorder.steps)
    assert [report.step for report in recorder.reports] == [2, 4, 5]
    checkpoint = RunFolder(Path("runs/five").resolve()).newest_checkpoint()[0]
    assert checkpoint
    trained, _ = load_model(checkpoint)
    assert recorder.weights is not None
    assert torch.equal(next(trained.parameters()), recorder.weights)
    result = train(config, name="one", callbacks=[Recorder()])
    assert result.steps == 3, "a report arrives one step after its cycle"
    assert not any(capfd.readouterr()), "a program prints nothing unless it wants to"


def test_a_program_prints_a_run_if_it_is_verbose(
    small_shards: Path, small_model: ModelConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    train(small_run(small_shards, small_model, steps=1), name="loud", verbose=True)
    assert "batches:" in capsys.readouterr().out


def test_an_exception_of_a_callback_is_raised_as_it_is(small_shards: Path, small_model: ModelConfig) -> None:
    class Broken(Callback):
        def on_step_end(self, step: TrainStep) -> None:
            raise ZeroDivisionError(step.step)

    with pytest.raises(ZeroDivisionError, match="1"):
        train(small_run(small_shards, small_model), name="broken", callbacks=[Broken()])


def test_callbacks_are_refused_where_other_processes_train(small_shards: Path, small_model: ModelConfig) -> None:
    with pytest.raises(UserError, match=r"Callbacks run in this process.*Remove callbacks"):
        train(small_run(small_shards, small_model, micro_batch=1, workers=2), callbacks=[Callback()])


def test_a_program_continues_after_a_run_of_its_own_was_interrupted(
    small_shards: Path, small_model: ModelConfig, interrupt_when: Callable[[Callable[[], object]], None]
) -> None:
    """Its next Ctrl-C is its own, and does not exit at once as the second one of a command."""
    config = TrainConfig.of(
        data=str(small_shards), model=small_model, micro_batch=2, global_batch=2, steps=10**6, cycle=Cycle(1, 0),
        device="cpu",
    )  # fmt: skip

    handlers_before = list(map(signal.getsignal, SIGNALS))
    interrupt_when(Path("runs/one/cycles.jsonl").absolute().exists)
    assert train(config, name="one").outcome == "interrupted"
    assert list(map(signal.getsignal, SIGNALS)) == handlers_before


@pytest.mark.usefixtures("shared_ray")
@pytest.mark.slow
def test_a_run_whose_checkpoint_the_worker_does_not_find_is_not_trained_anew(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, small_shards: Path, small_model: ModelConfig
) -> None:
    """As on a machine without the driver's disk: the folder that Ray's worker is told has another run's start."""
    home, elsewhere = RunFolder(Path("runs/one").resolve()), Path("elsewhere").resolve()
    config = TrainConfig.of(
        data=str(small_shards), model=small_model, micro_batch=4, global_batch=4, steps=6, device="cpu"
    )
    make_trainer(resolve_local(config), checkpoints=home.checkpoints).run()
    write_json(home.config, config.to_json())
    shutil.copytree(home.path, elsewhere, ignore=shutil.ignore_patterns("step-*"))
    make_job, run_dir = ResolvedRun.job, StorageDir.of(elsewhere)
    monkeypatch.setattr(ResolvedRun, "job", lambda self: dataclasses.replace(make_job(self), run_dir=run_dir))
    message = refused(run.main, "--resume", "one", "--steps", "8")
    assert "should resume at step 6" in message
    assert not (elsewhere / "cycles.jsonl").exists()
    assert not checkpoints_in(elsewhere / "checkpoints")
    (mlflow_run,) = MlflowClient(store_uri()).search_runs(["1"])
    assert mlflow_run.info.status == "FAILED"


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--data", "nowhere"], "python -m pipeline.tokenize"),
        (["--config", "none.json"], "none.json"),
        (["--resume", "never"], "--resume never"),
        (["--resume", "one", "--name", "two"], "--name two"),
    ],
)
def test_a_mistake_gets_one_sentence(refused: Callable[..., str], flags: list[str], named: str) -> None:
    assert named in refused(run.main, *flags)


def test_what_ray_trains_controller_unpickles_imports_no_torch() -> None:
    """Two seconds before the worker would even be started; nor does the link's actor, which starts meanwhile."""
    program = "import sys, train.launch.job, train.launch.link; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0


def test_what_a_limit_has_decided_is_recorded_and_kept_by_the_run_that_continues(
    command: Callable[..., int], small_shards: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of a run in this process whose micro-batch and loss are left open; nothing fits its limit.

    The telemetry of the part that follows counts on, as its steps do.
    """
    flags = ["--data", str(small_shards), *FLAGS[:4], "--cycle", "2+1", "--device", "cpu", "--steps", "200"]
    assert command(run.main, *flags, "--memory-limit", "50MB", "--name", "one") == 1
    printed = capfd.readouterr().out
    assert "global batch 8 = micro-batch 1 (auto) x accumulation 8 " in printed
    (loss,) = re.findall(r"loss (\w+) \(auto\)", printed)
    stored_json = json.loads(Path("runs/one/config.json").read_text())
    assert (stored_json["micro_batch"], stored_json["loss"], stored_json["precision"]) == ("auto", "auto", "auto"), (
        "as they were asked for"
    )
    result = json.loads(Path("runs/one/result.json").read_text())
    assert (result["outcome"], result["steps"], result["shortage"]["available_bytes"]) == ("over_limit", 1, 50 * 10**6)
    assert re.match(r"no change .* 0\.05 GB", result["diagnosis"]["advice"])
    assert "over_limit: the process used" in " ".join(printed.split())
    client = MlflowClient(store_uri())
    (mlflow_run,) = client.search_runs(["1"])
    assert (mlflow_run.data.params["micro_batch"], mlflow_run.data.params["loss"]) == ("1", loss)
    assert (mlflow_run.info.status, mlflow_run.data.tags["outcome"]) == ("FAILED", "over_limit")
    assert "of 0.05 GB" in mlflow_run.data.tags["memory"]
    assert "of 0.05 GB" in mlflow_run.data.tags["mlflow.note.content"]

    assert command(run.main, "--resume", "one") == 0
    printed = capfd.readouterr().out
    assert "global batch 8 = micro-batch 1 (auto) x accumulation 8 " in printed, "8 and the plain loss would fit"
    assert f"loss {loss} (auto)" in printed
    (mlflow_run,) = client.search_runs(["1"])
    assert (mlflow_run.info.status, mlflow_run.data.tags["resumed_at_step"], mlflow_run.data.tags.get("reason")) == (
        "FINISHED",
        "1",
        None,
    )
    for metric, first in (("loss/step", [1, 2, 3, 4]), ("system/worker_memory_gb", [])):
        steps = [point.step for point in client.get_metric_history(mlflow_run.info.run_id, metric)]
        assert len(steps) == len(set(steps)) > 1
        assert sorted(steps)[: len(first)] == first
