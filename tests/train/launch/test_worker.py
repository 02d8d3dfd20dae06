"""The worker's part of a run, in this process: it trains into the run's folder, from where that stands."""

import json
import math
import os
import re
import socket
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from infra.device.gpu import GpuReading
from infra.device.telemetry import Telemetry
from infra.errors import UserError
from infra.storage.files import write_json
from pipeline.shards import checksum, read_manifest
from train.config import Cycle, ResolvedConfig
from train.launch import worker
from train.launch.channel import Channel, DriverConnection, EarlierWorkers
from train.launch.job import WorkerJob
from train.loop.memory_limit import MemoryLimit
from train.loop.trainer import Trainer
from train.model_config import ModelConfig
from train.models.gpt2 import GPT
from train.resolved import next_smaller_micro_batch
from train.result import RunResult
from train.run_files import progress
from train.run_files.lookup import find_run
from train.run_files.progress import newest
from train.run_files.run_folder import RunFolder


@pytest.fixture
def home(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


@pytest.fixture
def config(small_shards: Path, small_model: ModelConfig) -> ResolvedConfig:
    return ResolvedConfig.of(
        data=str(small_shards), model=small_model, global_batch=4, micro_batch=4, steps=12, cycle=Cycle(5, 1),
        precision="fp32", device="cpu", checkpoint_every=7,
    )  # fmt: skip


class Told:
    """A line to a driver that wants the run to stop after ``steps``."""

    def __init__(self, steps: int | None = None, last: int = 0) -> None:
        self.sent: list[int] = []
        self.failed: list[tuple[int, str]] = []
        self.steps = steps
        self.last = last

    @property
    def channel(self) -> "Told":
        return self

    def catch_up(self, cycles: Iterable[dict[str, Any]]) -> None:
        self.sent += [cycle["step"] for cycle in cycles if cycle["step"] > self.last]

    def cycle(self, cycle: dict[str, Any]) -> None:
        self.sent.append(cycle["step"])

    def too_large(self, micro_batch: int, text: str) -> None:
        self.failed.append((micro_batch, text))

    def stopping(self) -> bool:
        self.steps = self.steps and self.steps - 1
        return self.steps == 0


def train(home: RunFolder, config: ResolvedConfig, resume: Path | None, told: Told | None = None) -> RunResult:
    """What the first worker makes of its config."""
    return worker.train_with_retries(home, config, resume, cast(DriverConnection, told or Told()))


def assigned(home: RunFolder, config: ResolvedConfig, step: int = 0) -> WorkerJob:
    return WorkerJob(config, home.location, read_manifest(config.dataset.data).fingerprint, step)


def cycles(home: RunFolder) -> list[dict[str, Any]]:
    return [json.loads(line) for line in home.cycles.read_text().splitlines()]


def test_a_worker_trains_into_its_folder(
    home: RunFolder, config: ResolvedConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "closing_sample", lambda trainer, result: f"a text after {trainer.state.step} steps")
    result = train(home, config, None)
    assert (result.outcome, result.steps, result.sample) == ("finished", 12, "a text after 12 steps")
    assert [cycle["step"] for cycle in cycles(home)] == [5, 10, 12]
    assert result.checkpoint == str(home.checkpoints / "step-00000012")


def test_a_resumed_run_reads_its_checkpoint_once_to_check_it(
    home: RunFolder, config: ResolvedConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver and the worker are one process; a file that has changed is looked at again."""
    train(home, config.replace(steps=7, schedule="constant"), None)
    write_json(home.config, config.to_json())
    progress._checksums.clear()
    checked: list[str] = []

    def counted(path: Path) -> str:
        checked.append(path.name)
        return checksum(path)

    monkeypatch.setattr(progress, "checksum", counted)
    found = find_run(str(home.path), home.path.parent)[1]
    with ExitStack() as locks:
        assert worker.lock_and_find_checkpoint(home, locks, assigned(home, config, step=7), EarlierWorkers()) == (
            found,
            None,
        )
        assert train(home, config.replace(schedule="constant"), found).steps == 12
    assert sorted(checked) == ["model.safetensors", "state.pt"]
    os.utime(found / "state.pt", ns=(1, 1))
    assert progress.find_damage(found) is None
    assert len(checked) == 3, "a file that was touched is read again"


def test_a_worker_that_begins_again_repeats_no_cycle(home: RunFolder, config: ResolvedConfig) -> None:
    """It was killed behind a report that its checkpoint does not know, and behind half of another."""
    train(home, config.replace(steps=7, schedule="constant"), None)
    config = config.replace(schedule="constant")
    before = home.cycles.read_text()
    assert [cycle["step"] for cycle in cycles(home)] == [5, 7]
    with home.cycles.open("a") as log:
        log.write(before.splitlines()[-1].replace('"step": 7', '"step": 10') + '\n{"step": 1')
    told = Told(last=5)
    train(home, config, newest(home.checkpoints), told)
    assert told.sent == [7, 10, 12], "the cycle that did not arrive is sent again"
    straight = Trainer(config)
    straight.run()
    assert [(c["step"], c["step_losses"]) for c in cycles(home) if c["step"] > 7] == [
        (10, straight.times.reports[1].step_losses[2:]), (12, straight.times.reports[2].step_losses),
    ]  # fmt: skip
    assert [c["step"] for c in cycles(home)] == [5, 7, 10, 12]


@pytest.fixture
def room_for_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward passes of more than two sequences run out of memory, by an allocation that really fails."""
    stream = GPT.hidden_states

    def with_little_room(self: GPT, tokens: torch.Tensor) -> torch.Tensor:
        torch.empty(2**60 if len(tokens) > 2 else 1, dtype=torch.uint8)
        return stream(self, tokens)

    monkeypatch.setattr(GPT, "hidden_states", with_little_room)


@pytest.mark.usefixtures("room_for_two")
def test_a_micro_batch_that_nobody_gave_is_made_smaller_until_it_fits(home: RunFolder, config: ResolvedConfig) -> None:
    """And the run is that of the size which fits: the same losses, bit for bit, of the same global batch."""
    config = config.replace(global_batch=8, micro_batch=8, compile="off", loss="plain")
    told = Told()
    result = worker.train_with_retries(home, config, None, cast(DriverConnection, told), tries_smaller=True)
    assert (result.outcome, result.steps, result.too_large) == ("finished", 12, (8, 4))
    assert [size for size, _ in told.failed] == [8, 4]
    assert "out of memory in the forward pass of step 1" in told.failed[0][1]
    assert [cycle["step"] for cycle in cycles(home)] == told.sent == [5, 10, 12]
    straight = Trainer(config.replace(micro_batch=2))
    straight.run()
    assert [c["step_losses"] for c in cycles(home)] == [report.step_losses for report in straight.times.reports]
    kept = newest(home.checkpoints)
    assert kept
    assert progress.read_progress(kept).config["micro_batch"] == 2, "with which it is continued"
    driver = next_smaller_micro_batch(config, result.too_large)
    assert driver
    assert driver.batch.micro_batch == 2


@pytest.mark.usefixtures("room_for_two")
def test_a_micro_batch_that_was_given_is_not_changed(home: RunFolder, config: ResolvedConfig) -> None:
    told = Told()
    result = worker.train_with_retries(home, config, None, cast(DriverConnection, told))
    assert (result.outcome, result.steps, result.too_large, told.failed) == ("oom", 0, (), [])


@pytest.mark.parametrize(("steps", "outcome", "small"), [(0, "oom", True), (1, "oom", True), (2, "oom", False)])
def test_only_the_first_steps_tell_whether_a_size_fits(
    make_result: Callable[..., RunResult], steps: int, outcome: Any, small: bool
) -> None:
    """The second is the first in which the optimizer's state is there."""
    assert worker.did_not_fit(make_result(outcome=outcome, steps=5 + steps), 5) is small
    assert worker.did_not_fit(make_result(outcome="over_limit", steps=5 + steps), 5)
    assert not worker.did_not_fit(make_result(outcome="diverged", steps=5 + steps), 5)


def test_workers_all_start_again_with_the_smaller_size(home: RunFolder, config: ResolvedConfig) -> None:
    """What one of them found is told to all, by the channel, which outlives them."""
    channel = Channel(0, 0)
    channel.too_large(8, "8 does not fit")
    channel.too_large(8, "8 does not fit here either")
    assert channel.earlier_workers().too_large == channel.earlier_workers().too_large == (8,)
    assert [content for _, content in channel.take_updates().messages] == ["8 does not fit"]
    with ExitStack() as locks:
        past = replace(channel.earlier_workers(), starts=(0, 0, 0))
        assert worker.lock_and_find_checkpoint(home, locks, assigned(home, config), past) == (None, None), (
            "one of the starts was for that"
        )
    with ExitStack() as locks:
        past = replace(past, starts=(0, 0, 0, 0))
        assert "crashed 4 times" in str(worker.lock_and_find_checkpoint(home, locks, assigned(home, config), past)[1])


def test_a_worker_that_was_killed_for_memory_is_started_again_only_from_a_later_step(
    home: RunFolder, config: ResolvedConfig
) -> None:
    """From the same one it would be killed again; a leak of days is survived by the checkpoints."""
    with ExitStack() as locks:
        past = EarlierWorkers((0,), out_of_memory=True)
        checkpoint, refusal = worker.lock_and_find_checkpoint(home, locks, assigned(home, config), past)
    assert checkpoint is None
    assert re.search(r"Memory ran out .*step 0.*--micro-batch", refusal or "")
    worker.check_crash_loop([0, 15], out_of_memory=True)
    worker.check_crash_loop([15], out_of_memory=True)


def test_a_worker_ends_when_its_driver_says_so(home: RunFolder, config: ResolvedConfig) -> None:
    result = train(home, config, None, Told(steps=1))
    assert (result.outcome, result.steps) == ("interrupted", 1)
    assert newest(home.checkpoints) == home.checkpoints / "step-00000001"


def test_a_model_that_cannot_be_built_is_a_result_that_names_the_machine(
    home: RunFolder, config: ResolvedConfig
) -> None:
    """Of one worker; one of several ends them all, and is told apart when Ray has started them again."""
    vast = config.replace(model=replace(config.model, padded_vocab_size=2**31, width=2**19))
    result = train(home, vast, None)
    assert (result.outcome, result.machine, result.checkpoint) == ("oom", socket.gethostname(), None)
    assert result.shortage
    train(home, config.replace(steps=7, schedule="constant"), None)
    told = worker.with_checkpoint(result, home)
    assert told == replace(result, checkpoint=str(home.checkpoints / "step-00000007"))


def test_energy_is_told_for_the_steps_after_the_first(
    config: ResolvedConfig, make_result: Callable[..., RunResult]
) -> None:
    """A card that draws 500 W; the loop began at second 10, and its first step took 5 s."""
    config = config.replace(steps=9)
    trainer, watched = Trainer(config), Telemetry(lambda second, metrics: None)
    trainer.started = 10.0
    with watched:
        for second in range(60):
            watched._energy.add(second, GpuReading(None, None, None, None, None, None, 500.0 * second))
            watched._energy.checkpoint()
        on_gpu = make_result(device="NVIDIA H100", steps=9, first_step_seconds=5.0, seconds=20.0)
        tokens = (9 - 2 - 1) * config.step_tokens
        assert worker.energy(watched, trainer, on_gpu, start_step=2) == pytest.approx(500 * 20 / tokens * 1e6)
        trainer.elapsed_before, resumed = 300.0, replace(on_gpu, seconds=320.0)
        assert worker.energy(watched, trainer, resumed, start_step=2) == pytest.approx(500 * 20 / tokens * 1e6), (
            "of this part of a resumed run alone, as its tokens are"
        )
        assert worker.energy(watched, trainer, on_gpu, start_step=8) is None, "the first step alone compiles"
        assert worker.energy(watched, trainer, replace(on_gpu, device="cpu"), start_step=2) is None
        assert worker.energy(watched, trainer, replace(on_gpu, first_step_seconds=None), start_step=2) is None


def test_a_result_has_what_the_machine_did_after_the_first_step(home: RunFolder, config: ResolvedConfig) -> None:
    with Telemetry(lambda second, metrics: None) as watched:
        watched._points = [(-math.inf, {"system/gpu_sm_clock_mhz": [1000.0, 1]})]
        watched._points += [(math.inf, {"system/gpu_sm_clock_mhz": [3000.0, 2]})]
        result = worker.train_with_retries(
            home, config.replace(steps=2), None, cast(DriverConnection, Told()), telemetry=watched
        )
    assert result.telemetry["system/gpu_sm_clock_mhz"] == 1500.0


def test_a_worker_refuses_data_that_its_driver_did_not_see(config: ResolvedConfig, tmp_path: Path) -> None:
    known = assigned(RunFolder(tmp_path), config)
    assert worker.load_data(known).manifest.fingerprint == known.fingerprint
    with pytest.raises(UserError, match="and on the driver's machine 0000"):
        worker.load_data(replace(known, fingerprint="0" * 64))
    with pytest.raises(UserError, match=r"absent is not on .*, where Ray placed the worker: give object storage"):
        worker.load_data(replace(known, config=config.replace(data=str(tmp_path / "absent"))))


@pytest.mark.parametrize("workers", [1, 2])
def test_energy_is_of_this_workers_share_of_the_tokens(
    config: ResolvedConfig, make_result: Callable[..., RunResult], workers: int
) -> None:
    """Its own GPU alone is watched: it draws 500 W for 20 s, in which each of two workers trains half of the tokens."""
    trainer, watched = Trainer(config), Telemetry(lambda second, metrics: None)
    trainer.config = config.replace(workers=workers, micro_batch=2)
    trainer.started = 0.0
    with watched:
        for second in range(60):
            watched._energy.add(second, GpuReading(None, None, None, None, None, None, 500.0 * second))
            watched._energy.checkpoint()
        on_gpu = make_result(device="NVIDIA H100", steps=9, first_step_seconds=5.0, seconds=20.0)
        own_tokens = 8 * config.step_tokens / workers
        assert worker.energy(watched, trainer, on_gpu, start_step=0) == pytest.approx(500 * 20 / own_tokens * 1e6)


def test_every_size_that_is_tried_has_the_limit(
    home: RunFolder, config: ResolvedConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which nothing meets here, so that the smallest ends the run as the largest did."""
    limits: list[int | None] = []

    class Watched(Trainer):
        def __init__(self, config: ResolvedConfig, **how: Any) -> None:
            super().__init__(config, **how)
            limits.append(self.limit and self.limit.size)

    monkeypatch.setattr(worker, "Trainer", Watched)
    config = config.replace(global_batch=4, micro_batch=4, compile="off", loss="plain")
    limit = MemoryLimit.apply(10**6, "cpu")
    result = worker.train_with_retries(home, config, None, cast(DriverConnection, Told()), limit, tries_smaller=True)
    assert (result.outcome, result.too_large, limits) == ("over_limit", (4, 2), [10**6] * 3)
