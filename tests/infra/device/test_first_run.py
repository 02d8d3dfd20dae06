"""The first run on a device: it fits the data, and the time that is printed is the time that it takes."""

import shlex
from dataclasses import replace

import pytest

from infra.cli.units import parse_duration
from infra.device.first_run import START_SECONDS, TRAINING_SECONDS, NextCommand, first_run, format_about, global_batch
from infra.device.hardware import KNOWN_GPUS, DeviceInfo, cpu_info
from train.model_config import parse_model

DEVICES = {**KNOWN_GPUS, "small GPU": replace(KNOWN_GPUS["A10"], memory=8 * 10**9), "CPU": cpu_info()}


def flags_of(next_command: NextCommand | None) -> dict[str, str]:
    assert next_command
    python, module_flag, module, *flags = shlex.split(next_command.command)
    assert (python, module_flag, module) == ("python", "-m", "train.run")
    return dict(zip(flags[::2], flags[1::2], strict=True))


@pytest.mark.parametrize("device", DEVICES.values(), ids=list(DEVICES))
@pytest.mark.parametrize("train_tokens", [150, 5_000, 90_000, 300_000, 10**9])
def test_the_data_have_enough_tokens_for_a_step_in_minutes(device: DeviceInfo, train_tokens: int) -> None:
    next_command = first_run(device, "data/tokens", train_tokens, longest_val=10**6)
    flags = flags_of(next_command)
    assert next_command
    model = parse_model(flags.get("--model", "gpt2-124m"))
    assert int(flags.get("--global-batch", "480")) * model.context_length < train_tokens
    assert parse_duration(flags["--time-budget"]) == TRAINING_SECONDS[device.kind]
    assert next_command.seconds == TRAINING_SECONDS[device.kind] + START_SECONDS[device.kind] <= 600
    assert "--cycle" not in flags


def test_the_model_suits_the_device() -> None:
    """The default model and batch on a fast GPU, a small model on a CPU."""
    assert set(flags_of(first_run(KNOWN_GPUS["A100"], "d", 10**9, 10**6))) == {"--data", "--time-budget"}
    assert flags_of(first_run(cpu_info(), "d", 10**9, 10**6))["--model"] == "tiny"


@pytest.mark.parametrize(
    ("gpu", "batch"), [("A100", 480), ("H100", 480), ("L4", 96), ("RTX-4090", 96), ("T4", 96), ("RTX-3060", 32)]
)
def test_the_batch_follows_the_speed_of_the_gpu(gpu: str, batch: int) -> None:
    """By its published rate, so that an optimizer step takes seconds."""
    assert global_batch(KNOWN_GPUS[gpu]) == batch
    assert flags_of(first_run(KNOWN_GPUS[gpu], "d", 10**9, 10**6)).get("--global-batch", "480") == str(batch)


def test_a_gpu_whose_rate_is_not_published_is_judged_by_its_memory() -> None:
    unknown = replace(KNOWN_GPUS["A100"], name="NVIDIA A100-SXM4-40GB MIG 1g.5gb", memory=5 * 10**9)
    assert global_batch(unknown) == 96
    assert global_batch(replace(unknown, memory=80 * 10**9)) == 480


def test_a_gpu_that_torch_cannot_use_is_replaced_by_the_cpu() -> None:
    flags = flags_of(first_run(replace(KNOWN_GPUS["A100"], gpu_blocker="the driver is too old"), "d", 10**9, 10**6))
    assert (flags["--device"], flags["--model"]) == ("cpu", "tiny")


def test_a_validation_split_shorter_than_a_sequence_is_not_used() -> None:
    assert flags_of(first_run(cpu_info(), "d", 10**9, 128))["--cycle"].endswith("+0")
    assert first_run(cpu_info(), "d", 100, 0) is None, "not even for a sequence"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(1, "5 s"), (12, "10 s"), (49, "50 s"), (50, "1 min"), (130, "2 min"), (360, "6 min"), (7_200, "2 h")],
)
def test_times_are_rounded(seconds: float, text: str) -> None:
    assert format_about(seconds) == f"about {text}"
    assert str(NextCommand("make", seconds)) == f"about {text}: `make`"
