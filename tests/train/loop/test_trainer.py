"""The loop trains: the loss falls along a known curve, however steps are executed, and continues where it stopped."""

import dataclasses
import itertools
import json
import math
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from trainers import make_trainer

from train.config import Cycle, ResolvedConfig
from train.data.shards import ShardData
from train.loop import result_builder
from train.loop.memory import is_oom_error
from train.loop.trainer import Trainer
from train.model_config import ModelConfig
from train.result import TRAINING, CycleReport, RunResult
from train.run_files.progress import checkpoints_in, read_progress

GOLDEN = [5.7706, 5.7397, 5.7076, 5.7358, 5.6804, 5.6705, 5.6786, 5.6430, 5.6498, 5.6454]
"""Losses of the first ten steps: whatever changes the mathematics of a step moves them."""


@pytest.fixture
def config(small_shards: Path, small_model: ModelConfig) -> ResolvedConfig:
    return ResolvedConfig.of(
        data=str(small_shards), model=small_model, global_batch=8, micro_batch=8, steps=40, cycle=Cycle(20, 2),
        learning_rate=3e-3, warmup_steps=10, precision="fp32", device="cpu",
    )  # fmt: skip


def train(config: ResolvedConfig, **options: Any) -> tuple[RunResult, list[float]]:
    reports: list[CycleReport] = []
    result = make_trainer(config, on_cycle=reports.append, **options).run()
    return result, [loss for report in reports for loss in report.step_losses]


def stop_at(step: int) -> Any:
    """A ``should_stop`` that the loop asks once after every step."""
    calls = itertools.count(1)
    return lambda: next(calls) >= step


def test_what_the_loop_does_can_be_watched(config: ResolvedConfig) -> None:
    seen: list[str] = []
    trainer = make_trainer(
        config.replace(steps=4, cycle=Cycle(2, 0)), on_cycle=lambda report: seen.append(trainer.activity)
    )
    assert trainer.activity == "loading the first batch"
    trainer.run()
    assert seen == [TRAINING, TRAINING]
    assert trainer.activity == "saving the checkpoint"


def test_the_loss_falls(config: ResolvedConfig) -> None:
    result, losses = train(config.replace(steps=300, cycle=Cycle(50, 2)))
    assert result.outcome == "finished"
    assert result.steps == 300
    assert len(losses) == 300
    assert losses[0] == pytest.approx(5.77, abs=0.05)  # ln(320)
    assert result.train_loss is not None
    assert result.train_loss < 4.0
    assert result.loss_curve[0][1] > result.loss_curve[3][1] > result.loss_curve[5][1]


def test_the_loss_follows_its_golden_curve(config: ResolvedConfig) -> None:
    _, losses = train(config.replace(steps=10))
    assert losses == pytest.approx(GOLDEN, rel=2e-4)


def test_the_parts_of_a_step_make_no_more_than_the_step(config: ResolvedConfig) -> None:
    reports: list[CycleReport] = []
    result = make_trainer(config, on_cycle=reports.append).run()
    assert all(0 < r.optimizer_seconds < r.train_seconds - r.data_wait_seconds for r in reports)
    assert result.optimizer_fraction is not None
    assert 0 < result.optimizer_fraction < 1


def test_a_pause_is_named_and_in_no_share(config: ResolvedConfig) -> None:
    """The machine sleeps for seconds in the optimizer's part of a step that takes milliseconds."""
    pause = 1.2 * result_builder.MIN_PAUSE_SECONDS
    trainer = make_trainer(config)
    trainer.optimizer.register_step_post_hook(lambda *_: time.sleep(pause * (trainer.state.step == 30)))
    result = trainer.run()
    with_pause = sum(trainer.times.optimizer) / sum(trainer.times.steps)
    assert result.optimizer_fraction
    assert 0 < result.optimizer_fraction < 0.8 * with_pause
    assert 0.95 * pause < result.paused_seconds < 2 * pause, "on a busy machine a sleep takes longer, and counts once"


def test_the_same_seed_gives_the_same_run(config: ResolvedConfig) -> None:
    assert train(config)[1] == train(config)[1]
    assert train(config)[1] != train(config.replace(seed=1))[1]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_resumed_run_continues_bit_for_bit(config: ResolvedConfig, tmp_path: Path, dropout: float) -> None:
    config = config.replace(model=dataclasses.replace(config.model, dropout=dropout))
    straight, expected = train(config)
    first, initial = train(config, checkpoints=tmp_path, should_stop=stop_at(13))
    assert first.outcome == "interrupted"
    assert first.steps == 13
    assert first.checkpoint
    second, after = train(config, checkpoints=tmp_path, resume=Path(first.checkpoint))
    assert initial + after == expected
    assert second.val_loss == straight.val_loss
    assert second.train_tokens == straight.train_tokens
    assert second.val_tokens == straight.val_tokens == 2 * 2 * 8 * 32
    assert second.loss_curve == straight.loss_curve


def test_a_resumed_run_counts_the_validation_before_it(config: ResolvedConfig, tmp_path: Path) -> None:
    """Cycles of two steps and of one validation batch of eight sequences, which are read two at a time."""
    config = config.replace(micro_batch=2, steps=6, cycle=Cycle(2, 1))
    first, _ = train(config, checkpoints=tmp_path, should_stop=stop_at(3))
    assert first.checkpoint
    second, _ = train(config, checkpoints=tmp_path, resume=Path(first.checkpoint))
    assert second.val_tokens == 3 * 8 * 32


class PositionData(ShardData):
    """Shards whose state is the number of windows before it."""

    def state_dict(self, position: int) -> Any:
        return {"position": position}


def test_a_checkpoint_asks_for_its_place_by_the_windows_before_it(config: ResolvedConfig, tmp_path: Path) -> None:
    config = config.replace(steps=3, cycle=Cycle(3, 0))
    data = PositionData(config.dataset, config.model, config.duration.cycle)
    trainer = make_trainer(config, data=data, checkpoints=tmp_path)
    checkpoint = trainer.run().checkpoint
    assert checkpoint
    assert read_progress(Path(checkpoint)).data_state == {"position": 3 * 8}


def test_what_ends_within_a_cycle_is_reported_too(config: ResolvedConfig) -> None:
    trainer = make_trainer(config.replace(steps=25, cycle=Cycle(10, 1)))
    result = trainer.run()
    assert [(r.step, len(r.step_losses)) for r in trainer.times.reports] == [(10, 10), (20, 10), (25, 5)]
    assert len(trainer.times.steps) == 25
    assert result.val_tokens == 3 * 8 * 32


def test_an_interrupted_cycle_counts_in_the_speed(config: ResolvedConfig) -> None:
    trainer = make_trainer(config.replace(cycle=Cycle(10, 0)), should_stop=stop_at(17))
    assert trainer.run().outcome == "interrupted"
    assert len(trainer.times.steps) == 17
    assert len(trainer.times.data_wait) == len(trainer.times.optimizer) == 17
    assert sum(trainer.times.data_wait) > trainer.times.reports[0].data_wait_seconds


def test_without_an_end_an_epoch_is_trained(config: ResolvedConfig) -> None:
    trainer = make_trainer(config.replace(steps=None, global_batch=128, micro_batch=64, cycle=Cycle(20, 0)))
    result = trainer.run()
    windows = trainer.data.epoch_windows
    assert windows
    assert result.steps * 128 <= windows < (result.steps + 1) * 128
    assert result.books_seen == pytest.approx(11, abs=1.1), (
        "all of the training books, but for a rest of less than a step"
    )


def test_the_rate_of_each_step_is_the_schedules(config: ResolvedConfig) -> None:
    trainer = make_trainer(config.replace(steps=20, warmup_steps=2, schedule="wsd", cycle=Cycle(1, 0)))
    rates: list[float] = []
    trainer.optimizer.register_step_pre_hook(lambda *_: rates.append(trainer.optimizer.param_groups[1]["lr"]))
    trainer.run()
    assert rates == pytest.approx([r.learning_rate for r in trainer.times.reports])
    assert rates == pytest.approx([1.5e-3, *[3e-3] * 16, 2.25e-3, 1.5e-3, 0.75e-3])


def test_no_time_budget_is_for_compiling(config: ResolvedConfig) -> None:
    trainer = make_trainer(config.replace(steps=None, time_budget=0.3, cycle=Cycle(1, 0)))
    forward, pauses = trainer.forward, iter([0.6])

    def compiling(*batch: torch.Tensor) -> torch.Tensor:
        time.sleep(next(pauses, 0.0))
        return forward(*batch)

    trainer.forward = compiling
    result = trainer.run()
    assert result.first_step_seconds
    assert result.first_step_seconds > 0.6
    assert result.steps > 1


def test_a_resumed_run_knows_what_a_spike_is(config: ResolvedConfig, tmp_path: Path) -> None:
    """The mean loss of the last cycle, which is lowered here so that the losses behind it are a spike."""
    first, _ = train(config, checkpoints=tmp_path, should_stop=stop_at(25))
    assert first.checkpoint
    progress = Path(first.checkpoint) / "progress.json"
    stored_json = json.loads(progress.read_text())
    assert stored_json["reference_loss"] == first.train_loss
    progress.write_text(json.dumps(stored_json | {"reference_loss": 1.0}))
    again = make_trainer(config, resume=Path(first.checkpoint)).run()
    assert again.outcome == "diverged"
    assert "1.000" in again.reason
    assert "at step 21" in again.reason, "one of the steps before the interruption"


@pytest.fixture
def known_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device has a peak of 1 TFLOP/s in fp32."""
    monkeypatch.setattr(result_builder, "peak_flops", lambda name, precision: {"fp32": 1e12}[precision])


@pytest.mark.usefixtures("known_peak")
def test_the_result_is_of_the_hardware_and_the_text(config: ResolvedConfig) -> None:
    """Utilization counts every worker's device; data without a tokenizer have no known bytes or characters."""
    trainer = make_trainer(config.replace(steps=8, cycle=Cycle(8, 1)))
    alone = trainer.run()
    assert alone.throughput
    assert alone.val_loss
    expected = alone.throughput.tokens_per_second * alone.flops_per_token / 1e12
    assert alone.mfu == pytest.approx(expected)
    assert alone.hfu is None, "nothing is computed again"
    again = trainer.config.replace(checkpointing="full")
    checkpointed = result_builder.build_result(
        again, trainer.data, trainer.device, trainer.state, trainer.times, ("finished", "")
    )  # fmt: skip
    assert checkpointed.mfu == alone.mfu
    assert checkpointed.hfu is not None
    assert checkpointed.hfu / expected == pytest.approx(
        cast(ModelConfig, config.model).hardware_flops(recomputed=cast(ModelConfig, config.model).layers)
        / alone.flops_per_token
    )
    two = trainer.config.replace(workers=2, micro_batch=4)
    together = result_builder.build_result(
        two, trainer.data, trainer.device, trainer.state, trainer.times, ("finished", "")
    )  # fmt: skip
    assert together.mfu == pytest.approx(expected / 2)
    assert (alone.val_bits_per_byte, alone.val_bits_per_character) == (None, None)
    assert alone.val_perplexity == pytest.approx(math.exp(alone.val_loss))
    assert alone.val_tokens == 8 * 32


def test_a_time_budget_ends_the_run(config: ResolvedConfig) -> None:
    result, _ = train(config.replace(steps=None, time_budget=0.5))
    assert result.outcome == "finished"
    assert "time budget" in result.reason
    assert 0.4 < result.train_seconds < 5


def test_a_resumed_run_has_what_is_left_of_its_time(config: ResolvedConfig, tmp_path: Path) -> None:
    timed = config.replace(steps=None, time_budget=3600.0, warmup_steps=0)
    first, _ = train(timed, checkpoints=tmp_path, should_stop=stop_at(3))
    assert first.checkpoint
    progress = Path(first.checkpoint) / "progress.json"
    progress.write_text(json.dumps(json.loads(progress.read_text()) | {"train_seconds": 3599.99}))
    reports: list[CycleReport] = []
    result = make_trainer(
        timed, resume=Path(first.checkpoint), on_cycle=reports.append, should_stop=stop_at(1000)
    ).run()
    assert (result.outcome, result.reason) == ("finished", "time budget reached")
    assert 3599.99 <= result.train_seconds < 3660
    assert reports[-1].elapsed == result.train_seconds
    assert reports[-1].learning_rate == pytest.approx(0.1 * config.optimization.learning_rate, rel=1e-3), (
        "the schedule's end"
    )


@pytest.mark.parametrize(("batches", "windows"), [(2, 16), (15, 120), (16, 125), (100, 125)])
def test_validation_is_of_the_batches_asked_for_or_of_the_whole_split(
    config: ResolvedConfig, batches: int, windows: int
) -> None:
    """The split has 125 windows, and a batch eight."""
    trainer = make_trainer(config.replace(steps=2, cycle=Cycle(2, batches)))
    assert trainer.data.validation
    assert trainer.data.validation.count == 125
    assert trainer.run().val_tokens == windows * 32


def test_validation_is_without_dropout_and_disturbs_nothing(config: ResolvedConfig) -> None:
    config = config.replace(steps=10, model=dataclasses.replace(config.model, dropout=0.2))
    trainer = make_trainer(config.replace(cycle=Cycle(5, 1)))
    result = trainer.run()
    assert [loss for r in trainer.times.reports for loss in r.step_losses] == train(config.replace(cycle=Cycle(5, 0)))[
        1
    ]
    windows = trainer.data.validation
    assert windows
    rows = np.empty((8, 33), dtype=np.int64)
    windows.read(windows.window_ids(np.arange(8)), rows)
    batch = torch.from_numpy(rows)
    with torch.no_grad():
        expected = trainer.model.eval()(batch[:, :-1], batch[:, 1:]).item()
    assert result.val_loss == pytest.approx(expected, rel=1e-6)


def test_dropout_differs_between_steps_and_workers(config: ResolvedConfig) -> None:
    """The random states from which a worker's forward passes draw are new ones, and the same when it starts again."""
    config = config.replace(steps=4, model=dataclasses.replace(config.model, dropout=0.2))

    class Enough(Exception):
        """Ends a worker that is not the first, which only the first could end."""

    def states(rank: int) -> list[bytes]:
        trainer, seen = make_trainer(config), list[bytes]()
        trainer.workers.rank = rank

        def see(*_: Any) -> None:
            if len(seen) == config.duration.steps:
                raise Enough
            seen.append(torch.get_rng_state().numpy().tobytes())

        trainer.model.register_forward_pre_hook(see)
        with suppress(Enough):
            trainer.run()
        return seen

    actual = [states(rank) for rank in (0, 1, 2)]
    assert len({state for seen in actual for state in seen}) == 3 * 4
    assert states(1) == actual[1]


def gradients_at_the_optimizer(trainer: Trainer) -> list[float]:
    """The gradients' norm as the optimizer finds it, to be filled with every step that ``trainer`` takes."""
    norms: list[float] = []

    def look(*_: object) -> None:
        gradients = [p.grad for p in trainer.model.parameters() if p.grad is not None]
        norms.append(torch.nn.utils.get_total_norm(gradients).item())

    trainer.optimizer.register_step_pre_hook(look)
    return norms


@pytest.mark.parametrize("clip", [1e-3, 1e3, 0.0])
def test_gradients_are_clipped_to_the_norm(config: ResolvedConfig, clip: float) -> None:
    trainer = make_trainer(config.replace(steps=3, clip_norm=clip, cycle=Cycle(1, 0)))
    norms = gradients_at_the_optimizer(trainer)
    trainer.run()
    if clip == 1e-3:
        assert norms == pytest.approx([1e-3] * 3, rel=1e-4)
        assert all(report.gradient_norm > 0.1 for report in trainer.times.reports), "as they were before"
    else:
        assert all(norm > 0.1 for norm in norms)
        assert [report.gradient_norm for report in trainer.times.reports] == pytest.approx(norms if clip else [0.0] * 3)


def test_a_scaled_loss_is_clipped_by_its_true_gradients(
    config: ResolvedConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fp16's loss scaling, which a config for the CPU refuses: the scaler itself works there, in fp32 exactly."""
    config = config.replace(steps=5, clip_norm=1e-3, cycle=Cycle(1, 0), micro_batch=4)
    plain = make_trainer(config)
    expected = gradients_at_the_optimizer(plain)
    plain.run()
    made = torch.amp.GradScaler
    monkeypatch.setattr(torch.amp, "GradScaler", lambda kind, enabled: made(kind, init_scale=2.0**16))
    scaled = make_trainer(config)
    actual_gradients = gradients_at_the_optimizer(scaled)
    scaled.run()
    assert scaled.scaler.get_scale() == 2.0**16
    assert actual_gradients == pytest.approx(expected, rel=1e-4)
    for ours, reference in zip(scaled.times.reports, plain.times.reports, strict=True):
        assert ours.gradient_norm == pytest.approx(reference.gradient_norm, rel=1e-4)
        assert ours.train_loss == pytest.approx(reference.train_loss, rel=1e-5)


def test_memory_that_ran_out_is_known_by_its_words() -> None:
    for text in (
        "CUDA out of memory. Tried to allocate 2.00 GiB.", "CUDA error: out of memory",
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "/pytorch/c10/cuda/CUDACachingAllocator.cpp":1500, please report',
    ):  # fmt: skip
        assert is_oom_error(RuntimeError(text))
    of_peers = (
        'NVML_SUCCESS == DriverAPI::get()->nvmlInit_v2_() INTERNAL ASSERT FAILED at "c10/cuda/PeerToPeerAccess.cpp"'
    )
    assert not is_oom_error(RuntimeError(of_peers))
    assert not is_oom_error(RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"))


@pytest.mark.gpu
def test_the_gpu_trains(config: ResolvedConfig) -> None:
    result, losses = train(config.replace(device="cuda", precision="bf16"))
    assert result.outcome == "finished"
    assert losses[-1] < losses[0] - 0.1
    assert result.device == torch.cuda.get_device_name()


@pytest.mark.gpu
def test_fp16_is_clipped_and_resumed_with_its_loss_scale(config: ResolvedConfig, tmp_path: Path) -> None:
    config = config.replace(device="cuda", precision="fp16", clip_norm=1e-3, steps=20)
    trainer = make_trainer(config, checkpoints=tmp_path, should_stop=stop_at(8))
    norms = gradients_at_the_optimizer(trainer)
    saved = trainer.run().checkpoint
    assert saved
    assert norms == pytest.approx([1e-3] * len(norms), rel=0.02)
    assert make_trainer(config, resume=Path(saved)).scaler.state_dict() == trainer.scaler.state_dict()


def test_a_resumed_run_has_its_data_go_to_where_its_checkpoint_was(config: ResolvedConfig, tmp_path: Path) -> None:
    """As a stream of books needs it; shards find their windows by the position alone."""

    class Watched(ShardData):
        went: object = None

        def load_state_dict(self, state_dict: dict[str, Any] | None) -> None:
            self.went = state_dict

    first, _ = train(config, checkpoints=tmp_path, should_stop=stop_at(3))
    assert first.checkpoint
    progress = Path(first.checkpoint) / "progress.json"
    progress.write_text(json.dumps(json.loads(progress.read_text()) | {"data_state": {"book": 7}}))
    data = Watched(config.dataset, config.model, config.duration.cycle)
    trainer = make_trainer(config, data=data, resume=Path(first.checkpoint))
    assert (data.went, trainer.state.windows_consumed) == ({"book": 7}, 3 * 8)


def test_a_step_that_spikes_is_in_no_checkpoint(config: ResolvedConfig, tmp_path: Path) -> None:
    """Also before its cycle is reported: each step is saved here, and the loss of the last cycle is lowered."""
    first, _ = train(config, checkpoints=tmp_path, should_stop=stop_at(25))
    assert first.checkpoint
    progress = Path(first.checkpoint) / "progress.json"
    progress.write_text(json.dumps(json.loads(progress.read_text()) | {"reference_loss": 1.0}))
    again = config.replace(checkpoint_every=1, keep_checkpoints=9)
    result = make_trainer(again, checkpoints=tmp_path, resume=Path(first.checkpoint)).run()
    assert (result.outcome, result.checkpoint) == ("diverged", first.checkpoint)
    assert [path.name for path in checkpoints_in(tmp_path)] == ["step-00000025"]


@pytest.mark.usefixtures("known_peak")
def test_all_arithmetic_is_of_every_workers_device(config: ResolvedConfig) -> None:
    """Also that which is done a second time."""
    trainer = make_trainer(config.replace(steps=8, cycle=Cycle(8, 0), checkpointing="full"))
    alone = trainer.run()
    two = trainer.config.replace(workers=2, micro_batch=4)
    together = result_builder.build_result(
        two, trainer.data, trainer.device, trainer.state, trainer.times, ("finished", "")
    )  # fmt: skip
    assert alone.hfu
    assert alone.mfu
    assert together.hfu == pytest.approx(alone.hfu / 2)
    assert together.mfu == pytest.approx(alone.mfu / 2)


def test_a_result_names_the_kernel_that_was_used(config: ResolvedConfig) -> None:
    trainer = make_trainer(config.replace(steps=1))
    trainer.attention = "the kernel that was tried first"
    assert trainer.run().attention == "the kernel that was tried first"
