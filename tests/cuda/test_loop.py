"""The loop on a GPU computes what it computes on the CPU, continues where it stopped, and does not wait for the GPU.

On the pretended GPU copies are as late as CUDA allows and new memory holds nonsense, so that a wait that is missing
changes a loss.
"""

import itertools
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from trainers import make_trainer

from train.config import Cycle, Device, TrainConfig
from train.intervals import Estimate
from train.loop.control import Callbacks
from train.loop.cycle import close_cycle, open_cycle
from train.model_config import ModelConfig
from train.noise_scale import NoiseScale
from train.resolved import resolve_local
from train.result import CycleReport, RunResult

pytestmark = pytest.mark.gpu

PRETENDED = "PRETENDED_GPU" in os.environ

EXACT = 1e-6 if PRETENDED else 1e-4
"""A real GPU adds in another order."""

BF16, FP16 = 2e-3, 1e-3
"""Nats: what rounding to 8 and 11 bits leaves of a mean over 256 tokens."""


@pytest.fixture
def config(small_shards: Path) -> TrainConfig:
    model = ModelConfig(layers=2, heads=2, width=64, context_length=32, vocab_size=257, padded_vocab_size=320)
    return TrainConfig.of(
        data=str(small_shards), model=model, micro_batch=4, global_batch=8, steps=12, cycle=Cycle(4, 1),
        learning_rate=3e-3, warmup_steps=2, precision="fp32", device="cuda", compile="off", max_loss_spike=0.0,
        keep_checkpoints=20,
    )  # fmt: skip


def train(config: TrainConfig, **options: Any) -> tuple[RunResult, list[CycleReport]]:
    reports: list[CycleReport] = []
    return make_trainer(resolve_local(config), on_cycle=reports.append, **options).run(), reports


def curve(reports: list[CycleReport]) -> list[float]:
    """All that the reports say of the mathematics: losses of every step, of validation, and the gradients' norms."""
    values = [[*report.step_losses, report.val_loss or 0.0, report.gradient_norm] for report in reports]
    return list(itertools.chain.from_iterable(values))


def step_losses(reports: list[CycleReport]) -> list[float]:
    return [loss for report in reports for loss in report.step_losses]


def stop_at(step: int) -> Callable[[], bool]:
    calls = itertools.count(1)
    return lambda: next(calls) >= step


@pytest.mark.parametrize(
    ("changes", "on_cpu", "tolerance"),
    [
        ({}, {}, EXACT),
        ({"precision": "tf32"}, {}, EXACT if PRETENDED else 1e-2),
        ({"precision": "bf16"}, {"precision": "bf16"}, BF16),
        ({"precision": "bf16-activations"}, {"precision": "bf16-activations"}, BF16),
        ({"precision": "fp16"}, {}, FP16),
        ({"precision": "fp16", "clip_norm": 0.01}, {"clip_norm": 0.01}, FP16),
        ({"loss": "fused"}, {}, EXACT),
        ({"loss": "fused", "loss_chunks": 2, "precision": "bf16"}, {"precision": "bf16"}, BF16),
        ({"micro_batch": 2}, {"micro_batch": 8}, EXACT),
        ({"clip_norm": 0.01}, {"clip_norm": 0.01}, EXACT),
        ({"checkpointing": "full"}, {}, EXACT),
        ({"checkpointing": "selective"}, {}, EXACT),
        ({"attention": "efficient"}, {}, EXACT),
        ({"precision": "bf16", "attention": "flash"}, {"precision": "bf16"}, BF16),
        ({"precision": "bf16", "attention": "cudnn"}, {"precision": "bf16"}, BF16),
        ({"mask_books": True}, {"mask_books": True}, EXACT),
        ({"loader_threads": 2}, {}, EXACT),
        ({"ablate": ("prefetch",)}, {}, EXACT),
        ({"ablate": ("async-loss", "set-to-none", "gc-pause")}, {}, EXACT),
        ({"optimizer": "muon"}, {"optimizer": "muon"}, 1e-3),
        ({"optimizer": "adafactor"}, {"optimizer": "adafactor"}, EXACT),
        ({"optimizer": "lion"}, {"optimizer": "lion"}, 3e-3),  # its sign turns rounding into whole steps
        ({"optimizer": "sgd"}, {"optimizer": "sgd"}, EXACT),
        ({"offload_optimizer": True}, {}, EXACT),
        ({"offload_optimizer": True, "ablate": ("set-to-none",), "micro_batch": 2}, {"micro_batch": 8}, EXACT),
        ({"compile": "aot_eager"}, {}, EXACT),
    ],
    ids=str,
)  # fmt: skip
def test_a_gpu_trains_as_the_cpu_does(
    config: TrainConfig, changes: Mapping[str, Any], on_cpu: Mapping[str, Any], tolerance: float
) -> None:
    _, expected = train(config.replace(device="cpu", **on_cpu))
    result, found = train(config.replace(**changes))
    assert result.outcome == "finished"
    assert curve(found) == pytest.approx(curve(expected), abs=tolerance, rel=tolerance)


@pytest.mark.parametrize(
    "changes",
    [
        {"precision": "fp32", "loader_threads": 1}, {"precision": "bf16"}, {"precision": "fp16"},
        {"precision": "bf16-activations", "loss": "fused", "optimizer": "muon"}, {"optimizer": "lion"},
        {"offload_optimizer": True},
    ],
    ids=str,
)  # fmt: skip
def test_a_resumed_run_is_the_same_run(config: TrainConfig, tmp_path: Path, changes: Mapping[str, Any]) -> None:
    config = config.replace(**changes)
    _, whole = train(config)
    interrupted = make_trainer(resolve_local(config), checkpoints=tmp_path, should_stop=stop_at(6))
    saved = interrupted.run().checkpoint
    assert saved
    reports: list[CycleReport] = []
    resumed = make_trainer(resolve_local(config), resume=Path(saved), on_cycle=reports.append)
    assert resumed.scaler.state_dict() == interrupted.scaler.state_dict()
    resumed.run()
    assert step_losses(reports) == step_losses(whole)[4:]


def test_a_checkpoint_holds_the_weights_of_its_step(config: TrainConfig, tmp_path: Path) -> None:
    """The next step is under way while they are copied."""
    train(config.replace(checkpoint_every=1), checkpoints=tmp_path / "cuda")
    train(config.replace(checkpoint_every=1, device="cpu"), checkpoints=tmp_path / "cpu")
    names = sorted(path.name for path in (tmp_path / "cpu").iterdir())
    assert len(names) == config.duration.steps
    for name in names:
        found, expected = (load_file(tmp_path / side / name / "model.safetensors") for side in ("cuda", "cpu"))
        for key, value in expected.items():
            assert (found[key] - value).norm() <= 1e-3 * value.norm(), (name, key)
        states = [json.loads((tmp_path / side / name / "progress.json").read_text()) for side in ("cuda", "cpu")]
        assert states[0]["windows_consumed"] == states[1]["windows_consumed"]


@pytest.mark.parametrize(
    "changes",
    [
        *({"optimizer": name} for name in ("adamw", "adamw-fused", "adamw-8bit", "muon", "lion", "sgd")),
        {"optimizer": "adamw-bf16", "precision": "bf16-activations"}, {"precision": "fp16"}, {"loader_threads": 1},
        {"loss": "fused", "loss_chunks": 2, "precision": "bf16"}, {"checkpointing": "selective"},
        {"mask_books": True, "attention": "sdpa"},
    ],
    ids=str,
)  # fmt: skip
def test_no_step_after_the_first_waits_for_the_gpu(config: TrainConfig, changes: dict[str, Any]) -> None:
    """By torch's own check, over cycles with validation and their reports."""
    if changes.get("optimizer") in ("adamw-8bit", "adamw-bf16"):
        pytest.importorskip("torchao")

    def after_the_first() -> bool:
        torch.cuda.set_sync_debug_mode("error")
        return False

    trainer = make_trainer(resolve_local(config.replace(**changes)), should_stop=after_the_first)
    try:
        assert trainer.run().outcome == "finished"
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("changes", [{"precision": "fp16", "optimizer": "adamw"}, {"optimizer": "adafactor"}], ids=str)
def test_an_optimizer_that_waits_for_the_gpu_by_torchs_design(config: TrainConfig, changes: dict[str, Any]) -> None:
    """The help of ``--optimizer`` names them.

    Loss scaling asks on the host whether a gradient overflowed, unless the optimizer's kernel does; Adafactor asks for
    the norms of every weight and its update.
    """
    with pytest.raises(RuntimeError, match="synchronizing"):
        test_no_step_after_the_first_waits_for_the_gpu(config, changes)


@pytest.mark.parametrize(
    ("changes", "tolerance"),
    [({}, 10 * EXACT), ({"precision": "fp16", "ablate": ("set-to-none",)}, 0.05)],
    ids=str,
)  # fmt: skip
def test_the_noise_scale_is_that_of_the_cpu_and_its_steps_do_not_wait(
    config: TrainConfig, changes: dict[str, Any], tolerance: float
) -> None:
    """The loss scale of fp16 multiplies both norms, and clipping follows them."""
    config = config.replace(**changes, clip_norm=0.1)

    def measured(device: Device) -> Estimate:
        noise = NoiseScale(first=4, steps=6)

        def after_the_first() -> bool:
            torch.cuda.set_sync_debug_mode("error")
            return False

        settings = (
            config.replace(device=device) if device == "cuda" else config.replace(device=device, precision="fp32")
        )
        callbacks = Callbacks(should_stop=after_the_first, user_callbacks=[noise])
        try:
            assert make_trainer(resolve_local(settings), callbacks=callbacks).run().outcome == "finished"
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert noise.sequences
        return noise.sequences

    assert tuple(measured("cuda")) == pytest.approx(tuple(measured("cpu")), rel=tolerance)


def test_what_the_host_reads_later_is_copied_to_pinned_memory(config: TrainConfig) -> None:
    """A copy to other memory has the host wait, without torch's check noticing."""
    trainer = make_trainer(resolve_local(config))
    trainer.run()
    cycle = open_cycle(0, 1, config.duration.cycle, [1.0], trainer.device)
    close_cycle(cycle, trainer.workers, trainer.device)
    assert cycle.host_values
    assert all(value.is_pinned() for value in cycle.host_values if value is not None)
