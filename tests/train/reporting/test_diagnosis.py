"""Why a run did not fit, part by part, and the change that is predicted to fit, as a command that runs."""

import json
import shlex
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infra.cli import flags
from infra.device.hardware import A100
from infra.schema import from_json, to_json
from infra.storage.directory import StorageDir
from train.config import ResolvedConfig, Step, TrainConfig, load_config
from train.estimate.memory import predict_peak
from train.model_config.custom import CustomModel
from train.reporting.diagnosis import diagnose_oom, of_losses
from train.resolved import resolve
from train.result import BUILDING, Memory, MemoryShortage, RunResult
from train.run import RunOptions

Make = Callable[..., RunResult]

GB = 10**9
HOME = StorageDir.of("runs/one")
SAID = "CUDA out of memory. Tried to allocate 6.14 GiB. GPU 0 has a total capacity of 79.11 GiB"


@pytest.fixture
def step() -> Step:
    """GPT-2 124M, predicted to take 36.9 GB."""
    return resolve(TrainConfig.of(micro_batch=32, precision="bf16", compile="off", loss="plain"), A100).step


def failed(make_result: Make, room: int, *, process: int = 0, **changes: Any) -> RunResult:
    """A run that ran out of memory on a GPU in its first backward pass."""
    held = {"weights": 498_000_000, "gradients": 0, "optimizer": 0}
    shortage = MemoryShortage("running the backward pass of step 1", 6_600_000_000, room, held, SAID)
    process = process or room - 6 * 10**8
    memory = Memory(process - 21 * 10**8, process - 6 * 10**8, process, "nvml")
    return make_result(**{"outcome": "oom", "checkpoint": None, "memory": memory, "shortage": shortage} | changes)


def test_what_is_predicted_to_fit_counts_what_was_not_predicted(step: Step, make_result: Make) -> None:
    result = failed(make_result, 30 * GB)
    diagnosis = diagnose_oom(step, result, HOME, 30 * GB)
    assert diagnosis
    assert diagnosis.rows == [
        ("torch error", SAID),
        ("prediction", "underestimated by 0.07 GB, which the predictions below include"),
        ("available", "30.00 GB to the process; predicted with changes that fit:"),
        ("--loss fused", "18.35 GB; no additional FLOPs"),
        ("--micro-batch 24", "28.46 GB; the same FLOPs in 20 micro-batches instead of 15"),
        ("--checkpointing full", "27.14 GB; 24% more FLOPs"),
    ]
    assert "--loss fused, predicted to need 18.35 GB" in diagnosis.advice
    diagnosed = replace(result, diagnosis=diagnosis)
    assert from_json(RunResult, to_json(diagnosed), "it") == diagnosed


def test_what_the_optimizer_held_already_is_not_needed_once_more(step: Step, make_result: Make) -> None:
    """In a later step than the first."""
    full = {"weights": 498_000_000, "gradients": 0, "optimizer": predict_peak(step).optimizer}
    result = failed(make_result, 34 * GB)
    assert result.shortage
    diagnosis = diagnose_oom(step, replace(result, shortage=replace(result.shortage, bytes_by_part=full)), HOME, None)
    assert diagnosis
    assert dict(diagnosis.rows)["prediction"].startswith("underestimated by 3.08 GB")


def test_a_run_needed_at_least_what_it_could_use(step: Step, make_result: Make) -> None:
    """CUDA's libraries do not say how much they asked for."""
    shortage = MemoryShortage("running the backward pass of step 2", None, 40 * GB, {}, "CUBLAS_STATUS_ALLOC_FAILED")
    diagnosis = diagnose_oom(step, failed(make_result, 40 * GB, process=35 * GB, shortage=shortage), HOME, None)
    assert diagnosis
    assert dict(diagnosis.rows)["prediction"].startswith("underestimated by 3.08 GB")


@pytest.mark.parametrize("room", [1, 3, 5, 10, 15, 20, 25, 30, 33, 34, 80])
def test_what_is_advised_is_predicted_to_fit_and_nothing_that_failed_is(
    step: Step, make_result: Make, room: int
) -> None:
    """Also where the prediction said that the run itself would fit."""
    diagnosis = diagnose_oom(step, failed(make_result, room * GB), HOME, None)
    assert diagnosis
    assert bool(diagnosis.command) == (room > 3)
    if diagnosis.command:
        words = shlex.split(diagnosis.command)[5:]
        assert (len(words) > 2) == (room < 5), "of several changes where none alone is enough"
        changed: Any = {
            flag[2:].replace("-", "_"): int(value) if value.isdigit() else value
            for flag, value in zip(words[::2], words[1::2], strict=True)
        }
        assert predict_peak(step.replace(**changed)).total < min(room * GB, predict_peak(step).total)
    else:
        assert f"no change is predicted to fit the available {room}.00 GB" in diagnosis.advice
        assert "--micro-batch 1 --checkpointing full" in diagnosis.advice


def test_a_smaller_batch_is_no_advice_where_the_model_itself_did_not_fit(step: Step, make_result: Make) -> None:
    """Neither where the weights alone are too large, nor where something else had taken the room for them."""
    held: dict[str, int] = dict.fromkeys(["weights", "gradients", "optimizer"], 0)
    for room, process in ((80 * GB, 6 * 10**8), (GB // 2, 4 * 10**8)):
        shortage = MemoryShortage(f"{BUILDING} on worker 1 of 2", 154_000_000, room, held, SAID)
        result = failed(make_result, room, process=process, shortage=shortage)
        diagnosis = diagnose_oom(step, result, HOME, None)
        assert diagnosis
        assert diagnosis.advice.startswith(f"no change is predicted to fit the available {room / GB:.2f} GB; ")


def test_when_nothing_can_be_changed_it_is_said(step: Step, make_result: Make) -> None:
    least = step.replace(micro_batch=1, loss="fused", checkpointing="full")
    diagnosis = diagnose_oom(least, failed(make_result, 3 * GB), HOME, 3 * GB)
    assert diagnosis
    assert "3.00 GB" in diagnosis.advice
    assert "without further changes" in diagnosis.advice
    assert not diagnosis.command
    assert diagnose_oom(step, make_result(), HOME, None) is None


def test_the_command_can_be_copied(
    step: Step, make_result: Make, tmp_path: Path, command_line: Callable[..., AbstractContextManager[None]]
) -> None:
    """It is read by the command's own flags, and gives the run with the one change."""
    home = tmp_path / "my runs" / "one"
    home.mkdir(parents=True)
    (home / "config.json").write_text(json.dumps(ResolvedConfig().to_json()))
    for directory in (StorageDir.of(home), HOME):
        diagnosis = diagnose_oom(step, failed(make_result, 12 * GB), directory, 12 * GB)
        assert diagnosis
        words = shlex.split(diagnosis.command)
        assert words[:5] == ["python", "-m", "train.run", "--config", str(directory / "config.json")]
        assert words[-4:] == ["--micro-batch", "8", "--memory-limit", "12GB"]
        if directory is not HOME:
            assert words[5:7] == ["--out", str(home.parent)]
            first_options = RunOptions(training=load_config(words[4]))
            with command_line(*words[3:]):
                parsed = flags.parse_flags(RunOptions, "train.run", first_options)
            assert parsed.training == first_options.training.replace(micro_batch=8)
            assert (parsed.memory_limit, parsed.out) == (12 * GB, str(home.parent))
    diagnosis_with_checkpoint = diagnose_oom(
        step, failed(make_result, 12 * GB, checkpoint="runs/one/checkpoints/step-00000200"), HOME, None
    )
    assert diagnosis_with_checkpoint
    assert diagnosis_with_checkpoint.command == "python -m train.run --resume one --micro-batch 8"


def flat(*losses: float) -> list[tuple[int, float, float | None]]:
    """Mean losses of cycles of a hundred steps."""
    return [(100 * number, loss, None) for number, loss in enumerate(losses, 1)]


CUSTOM = ResolvedConfig.of(model=CustomModel("models:make", vocab_size=257), micro_batch=1, global_batch=1)
GUESS = 5.549
"""The loss of a guess among 257 ids."""


@pytest.mark.parametrize(
    ("changes", "row"),
    [
        ({"first_loss": 1633.0}, ("first loss", "1,633.0")),
        ({"first_loss": 2 * GUESS - 0.1}, None),
        ({"loss_curve": flat(5.6, 5.55, 5.5)}, ("no progress", "5.50")),
        ({"loss_curve": flat(3.9, 3.16, 3.15, 3.16), "unigram_loss": 3.15}, ("no progress", "3.15")),
        ({"loss_curve": flat(3.9, 3.16, 3.15, 3.0), "unigram_loss": 3.15}, None),
        ({"loss_curve": flat(3.9, 3.6, 3.4, 3.2), "unigram_loss": 3.15}, None),
        ({"loss_curve": flat(3.0, 3.0, 3.0), "unigram_loss": 3.15}, None),
        ({"loss_curve": flat(5.6, 5.6)[:1]}, None),
        ({"loss_curve": []}, None),
        ({"val_loss": float("nan")}, ("evaluation", "nan")),
        ({"val_loss": None}, None),
    ],
)
def test_what_losses_say_of_a_custom_models_code(
    make_result: Make, changes: dict[str, Any], row: tuple[str, str] | None
) -> None:
    actual = of_losses(CUSTOM.model, make_result(**changes))
    assert bool(actual) == bool(row)
    if actual and row:
        ((name, text),) = actual.rows
        assert name == row[0]
        assert row[1] in text
        assert "models:make" in text
    assert of_losses(ResolvedConfig.of(micro_batch=1).model, make_result(**changes)) is None, (
        "of a GPT-2 its code is ours"
    )
