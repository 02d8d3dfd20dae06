"""The session of one worker, in this process: it trains into the run's folder, from where that stands."""

import json
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from trainers import make_trainer

from infra.device.gpu import GpuReading
from infra.device.telemetry import Telemetry
from infra.errors import UserError
from pipeline.shards import read_manifest
from train.config import Cycle, ResolvedConfig
from train.launch import session
from train.launch.job import WorkerJob
from train.launch.link import Activity, CycleDone, Message, MicroBatchTooLarge, SystemMetrics
from train.launch.session import Driver, WorkerSession, did_not_fit, energy
from train.loop.trainer import Trainer
from train.models.gpt2 import GPT
from train.result import RunResult
from train.run_files import progress
from train.run_files.progress import newest
from train.run_files.run_folder import RunFolder


class DriverDouble(Driver):
    """A driver that records messages, and wants the run to stop after ``steps``."""

    def __init__(self, steps: int | None = None) -> None:
        self.messages: list[Message] = []
        self.steps = steps

    def post(self, message: Message) -> None:
        self.messages.append(message)

    def should_stop(self) -> bool:
        self.steps = self.steps and self.steps - 1
        return self.steps == 0

    @property
    def cycles(self) -> list[int]:
        """The steps of the cycles that it was told."""
        return [message.cycle["step"] for message in self.messages if isinstance(message, CycleDone)]

    @property
    def failed_micro_batches(self) -> list[MicroBatchTooLarge]:
        return [message for message in self.messages if isinstance(message, MicroBatchTooLarge)]


def train(
    folder: RunFolder, config: ResolvedConfig, resume: Path | None = None, driver: Driver | None = None, **job: Any
) -> RunResult:
    """The result of the first worker's session."""
    returned = WorkerSession(WorkerJob(config, **job), folder, driver or DriverDouble()).run(resume)
    assert returned.result
    return returned.result


def cycles(home: RunFolder) -> list[dict[str, Any]]:
    return [json.loads(line) for line in home.cycles.read_text().splitlines()]


def test_a_worker_trains_into_its_folder(
    home: RunFolder, config: ResolvedConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_step(trainer: Trainer, result: RunResult) -> RunResult:
        return replace(result, sample=f"a text after {trainer.state.step} steps")

    monkeypatch.setattr(session, "closing_sample", write_step)
    result = train(home, config)
    assert (result.outcome, result.steps, result.sample) == ("finished", 12, "a text after 12 steps")
    assert [cycle["step"] for cycle in cycles(home)] == [5, 10, 12]
    assert cycles(home)[-1]["val_bits_per_byte"] is result.val_bits_per_byte is None, "the data have no tokenizer"
    assert result.checkpoint == str(home.checkpoints / "step-00000012")


def test_a_worker_that_begins_again_repeats_no_cycle(home: RunFolder, config: ResolvedConfig) -> None:
    """It was killed behind a report that its checkpoint does not know, and behind half of another."""
    train(home, config.replace(steps=7, schedule="constant"))
    config = config.replace(schedule="constant")
    logged_cycles = home.cycles.read_text()
    assert [cycle["step"] for cycle in cycles(home)] == [5, 7]
    with home.cycles.open("a") as log:
        log.write(logged_cycles.splitlines()[-1].replace('"step": 7', '"step": 10') + '\n{"step": 1')
    driver = DriverDouble()
    train(home, config, newest(home.checkpoints), driver)
    assert driver.cycles == [5, 7, 10, 12], "cycles that may not have arrived are sent again"
    straight = make_trainer(config)
    straight.run()
    assert [(c["step"], c["step_losses"]) for c in cycles(home) if c["step"] > 7] == [
        (10, straight.times.reports[1].step_losses[2:]), (12, straight.times.reports[2].step_losses),
    ]  # fmt: skip
    assert [c["step"] for c in cycles(home)] == [5, 7, 10, 12]


@pytest.fixture
def room_for_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward passes of more than two sequences run out of memory, by an allocation that really fails."""
    stream = GPT.hidden_states

    def with_little_room(self: GPT, tokens: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
        torch.empty(2**60 if len(tokens) > 2 else 1, dtype=torch.uint8)
        return stream(self, tokens, embeddings)

    monkeypatch.setattr(GPT, "hidden_states", with_little_room)


@pytest.mark.usefixtures("room_for_two")
def test_a_micro_batch_that_nobody_gave_is_made_smaller_until_it_fits(home: RunFolder, config: ResolvedConfig) -> None:
    """And the run is that of the size which fits: the same losses, bit for bit, of the same global batch."""
    config = config.replace(global_batch=8, micro_batch=8, compile="off", loss="plain")
    driver = DriverDouble()
    result = train(home, config, driver=driver, retries_smaller_batch=True)
    assert (result.outcome, result.steps, result.failed_micro_batches) == ("finished", 12, (8, 4))
    assert [message.micro_batch for message in driver.failed_micro_batches] == [8, 4]
    assert "out of memory while running the forward pass of step 1" in driver.failed_micro_batches[0].text
    assert [cycle["step"] for cycle in cycles(home)] == driver.cycles == [5, 10, 12]
    straight = make_trainer(config.replace(micro_batch=2))
    straight.run()
    assert [c["step_losses"] for c in cycles(home)] == [report.step_losses for report in straight.times.reports]
    checkpoint = newest(home.checkpoints)
    assert checkpoint
    assert progress.read_progress(checkpoint).config["micro_batch"] == 2, "with which it is continued"
    fitted = config.with_smaller_micro_batch(result.failed_micro_batches)
    assert fitted
    assert fitted.batch.micro_batch == 2


@pytest.mark.usefixtures("room_for_two")
def test_a_micro_batch_that_was_given_is_not_changed(home: RunFolder, config: ResolvedConfig) -> None:
    driver = DriverDouble()
    result = train(home, config, driver=driver)
    assert (result.outcome, result.steps) == ("oom", 0)
    assert (result.failed_micro_batches, driver.failed_micro_batches) == ((), [])


@pytest.mark.parametrize(("steps", "outcome", "small"), [(0, "oom", True), (1, "oom", True), (2, "oom", False)])
def test_only_the_first_steps_tell_whether_a_size_fits(
    make_result: Callable[..., RunResult], steps: int, outcome: Any, small: bool
) -> None:
    """The second is the first in which the optimizer's state is there."""
    assert did_not_fit(make_result(outcome=outcome, steps=5 + steps), 5) is small
    assert did_not_fit(make_result(outcome="over_limit", steps=5 + steps), 5)
    assert not did_not_fit(make_result(outcome="diverged", steps=5 + steps), 5)


def test_a_worker_ends_when_its_driver_says_so(home: RunFolder, config: ResolvedConfig) -> None:
    result = train(home, config, driver=DriverDouble(steps=1))
    assert (result.outcome, result.steps) == ("interrupted", 1)
    assert newest(home.checkpoints) == home.checkpoints / "step-00000001"


def test_a_model_that_cannot_be_built_is_a_result_that_names_the_machine(
    home: RunFolder, config: ResolvedConfig
) -> None:
    """Of one worker; one of several ends them all, and is told apart when Ray has started them again."""
    vast = config.replace(model=replace(config.model, padded_vocab_size=2**31, width=2**19))
    result = train(home, vast)
    assert (result.outcome, result.machine, result.checkpoint) == ("oom", socket.gethostname(), None)
    assert result.shortage


def test_energy_is_told_for_the_steps_after_the_first(
    config: ResolvedConfig, make_result: Callable[..., RunResult]
) -> None:
    """A card that draws 500 W; the loop began at second 10, and its first step took 5 s."""
    config = config.replace(steps=9)
    trainer, watched = make_trainer(config), Telemetry(lambda second, metrics: None)
    trainer.started = 10.0
    with watched:
        for second in range(60):
            watched._energy.add(second, GpuReading(None, None, None, None, None, None, 500.0 * second))
            watched._energy.checkpoint()
        on_gpu = make_result(device="NVIDIA H100", steps=9, first_step_seconds=5.0, train_seconds=20.0)
        tokens = (9 - 2 - 1) * config.step_tokens
        assert energy(watched, trainer, on_gpu, start_step=2) == pytest.approx(500 * 20 / tokens * 1e6)
        trainer.elapsed_before, resumed = 300.0, replace(on_gpu, train_seconds=320.0)
        assert energy(watched, trainer, resumed, start_step=2) == pytest.approx(500 * 20 / tokens * 1e6), (
            "of this part of a resumed run alone, as its tokens are"
        )
        assert energy(watched, trainer, on_gpu, start_step=8) is None, "the first step alone compiles"
        assert energy(watched, trainer, replace(on_gpu, device="cpu"), start_step=2) is None
        assert energy(watched, trainer, replace(on_gpu, first_step_seconds=None), start_step=2) is None


def test_a_result_has_what_the_machine_did_after_the_first_step(home: RunFolder, config: ResolvedConfig) -> None:
    """Once a second: of a run of seconds."""
    driver = DriverDouble()
    result = train(home, config.replace(steps=None, time_budget=5.0, cycle=Cycle(5, 0)), driver=driver)
    assert result.telemetry["system/worker_memory_gb"] > 0.05
    assert any(isinstance(message, SystemMetrics) for message in driver.messages)


def test_data_that_the_driver_did_not_see_are_refused(config: ResolvedConfig, tmp_path: Path) -> None:
    fingerprint = read_manifest(config.dataset.data).fingerprint
    job = WorkerJob(config, fingerprint=fingerprint)
    assert job.open_data(print).manifest.fingerprint == fingerprint
    with pytest.raises(UserError, match=r"fingerprint .* 0000.* on the driver"):
        replace(job, fingerprint="0" * 64).open_data(print)
    with pytest.raises(UserError, match=r"absent is not on .*object storage"):
        replace(job, config=config.replace(data=str(tmp_path / "absent"))).open_data(print)


@pytest.mark.parametrize("workers", [1, 2])
def test_energy_is_of_this_workers_share_of_the_tokens(
    config: ResolvedConfig, make_result: Callable[..., RunResult], workers: int
) -> None:
    """Its own GPU alone is watched: it draws 500 W for 20 s, in which each of two workers trains half of the tokens."""
    trainer, watched = make_trainer(config), Telemetry(lambda second, metrics: None)
    trainer.config = config.replace(workers=workers, micro_batch=2)
    trainer.started = 0.0
    with watched:
        for second in range(60):
            watched._energy.add(second, GpuReading(None, None, None, None, None, None, 500.0 * second))
            watched._energy.checkpoint()
        on_gpu = make_result(device="NVIDIA H100", steps=9, first_step_seconds=5.0, train_seconds=20.0)
        own_tokens = 8 * config.step_tokens / workers
        assert energy(watched, trainer, on_gpu, start_step=0) == pytest.approx(500 * 20 / own_tokens * 1e6)


def test_every_size_that_is_tried_has_the_limit(home: RunFolder, config: ResolvedConfig) -> None:
    """Which nothing meets here, so that the smallest ends the run as the largest did."""
    config = config.replace(global_batch=4, micro_batch=4, compile="off", loss="plain")
    driver = DriverDouble()
    result = train(home, config, driver=driver, memory_limit=10**6, retries_smaller_batch=True)
    assert (result.outcome, result.failed_micro_batches) == ("over_limit", (4, 2))
    assert all("of 0.00 GB" in message.text for message in driver.failed_micro_batches)
    assert "of 0.00 GB" in result.reason


def test_the_activity_of_a_session_is_that_of_its_loop(config: ResolvedConfig) -> None:
    worker_session = WorkerSession(WorkerJob(config), None, None)
    assert worker_session.activity == Activity("loading the data", 0)
    worker_session.run()
    assert worker_session.activity == Activity("saving the checkpoint", 12)
