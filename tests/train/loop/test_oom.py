"""What is known of a run that did not fit: where it was, by allocations that really fail, and what it held."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from trainers import make_trainer

from infra.device.gpu import GpuState
from train.config import Cycle, ResolvedConfig
from train.estimate.gpt2_memory import optimizer_bytes
from train.estimate.memory import predict_peak
from train.loop.memory_limit import RESERVED_OUTSIDE_ALLOCATOR, MemoryLimit
from train.loop.oom import OutOfMemory, available_bytes, bytes_by_part, failed_allocation_bytes
from train.loop.trainer import Trainer
from train.model_config import ModelConfig
from train.models import loss
from train.run_files import checkpoint

VAST = 2**60


@pytest.fixture
def config(small_shards: Path, small_model: ModelConfig) -> ResolvedConfig:
    return ResolvedConfig.of(
        data=str(small_shards), model=small_model, global_batch=8, micro_batch=4, steps=4, cycle=Cycle(2, 1),
        device="cpu", precision="fp32",
    )  # fmt: skip


def fail(*_: Any) -> None:
    torch.empty(VAST, dtype=torch.uint8)


def in_forward(trainer: Trainer) -> None:
    trainer.model.blocks[0].register_forward_pre_hook(fail)


def in_backward(trainer: Trainer) -> None:
    next(trainer.model.parameters()).register_hook(fail)


def in_the_second_optimizer_step(trainer: Trainer) -> None:
    trainer.optimizer.register_step_pre_hook(lambda *_: fail() if trainer.state.step == 1 else None)


def in_validation(trainer: Trainer) -> None:
    trainer.model.blocks[0].register_forward_pre_hook(lambda block, _: None if block.training else fail())


@pytest.mark.parametrize(
    ("arrange", "during"),
    [
        (in_forward, "running the forward pass of step 1"),
        (in_backward, "running the backward pass of step 1"),
        (in_the_second_optimizer_step, "running the optimizer in step 2"),
        (in_validation, "running the validation after step 2"),
    ],
)
def test_where_memory_ran_out(config: ResolvedConfig, arrange: Callable[[Trainer], None], during: str) -> None:
    trainer = make_trainer(config, limit=MemoryLimit.apply(10**12, "cpu"))
    arrange(trainer)
    result = trainer.run()
    assert result.outcome == "oom"
    assert result.shortage
    assert (result.shortage.stage, result.shortage.requested_bytes, result.shortage.available_bytes) == (
        during,
        VAST,
        10**12,
    )
    assert f"you tried to allocate {VAST} bytes" in result.shortage.message
    for expected in (
        during,
        "1,152,921,504.61 GB",
        f"{predict_peak(trainer.config.step).total / 1e9:.2f} GB",
        "1000.00 GB",
    ):
        assert expected in result.reason
    weights = 4 * config.model.parameters
    assert result.shortage.bytes_by_part["weights"] == weights
    state = result.shortage.bytes_by_part["optimizer"]
    assert (
        state
        >= optimizer_bytes(
            cast(ModelConfig, config.model), config.optimization.optimizer, cast(ModelConfig, config.model).parameters
        )
        if "step 2" in during
        else state == 0
    )


VAST_SIZES = {"padded_vocab_size": 2**31, "width": 2**19}
"""Sizes that a model may have, with an embedding of 2^52 bytes, which no machine has."""


def vast(config: ResolvedConfig) -> ResolvedConfig:
    return config.replace(model=replace(config.model, **VAST_SIZES))


def test_a_model_that_does_not_fit_is_explained_before_the_first_step(config: ResolvedConfig) -> None:
    with pytest.raises(OutOfMemory) as failed:
        make_trainer(vast(config), limit=MemoryLimit.apply(10**12, "cpu"))
    result = failed.value.result
    assert (result.outcome, result.steps, result.reason) == ("oom", 0, str(failed.value))
    assert result.reason.startswith("out of memory while building the model, allocating 4,503,599.63 GB")
    assert result.shortage
    assert (result.shortage.requested_bytes, result.shortage.available_bytes) == (2**52, 10**12)
    assert set(result.shortage.bytes_by_part.values()) == {0}


def test_what_was_built_before_memory_ran_out_is_counted(
    config: ResolvedConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint of a run that is continued stays its checkpoint."""
    saved = (
        make_trainer(config.replace(steps=2), checkpoints=Path(config.dataset.data).with_name("checkpoints"))
        .run()
        .checkpoint
    )
    assert saved
    monkeypatch.setattr(checkpoint, "load", fail)
    with pytest.raises(OutOfMemory) as failed:
        make_trainer(config, checkpoints=Path(saved).parent, resume=Path(saved))
    result = failed.value.result
    assert result.checkpoint == saved
    assert result.shortage
    assert result.shortage.bytes_by_part == {"weights": 4 * config.model.parameters, "gradients": 0, "optimizer": 0}


def test_one_of_several_workers_says_which_it_is(config: ResolvedConfig) -> None:
    """It cannot end by itself, because the others wait for it."""
    trainer = make_trainer(config)
    trainer.workers.rank, trainer.workers.size = 1, 2
    in_forward(trainer)
    with pytest.raises(
        OutOfMemory, match="out of memory while running the forward pass of step 1 on worker 2 of 2, "
    ) as failed:
        trainer.run()
    assert failed.value.result.outcome == "oom"


def test_the_loss_is_told_from_the_rest_of_the_forward_pass(
    config: ResolvedConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss, "plain", fail)
    shortage = make_trainer(config).run().shortage
    assert shortage
    assert shortage.stage == "running the forward pass of step 1 (computing the loss)"
    assert 0 < shortage.available_bytes < 10**15, "without a limit, all that the machine has"


def test_a_run_over_its_limit_knows_what_it_held(config: ResolvedConfig) -> None:
    shortage = make_trainer(config, limit=MemoryLimit.apply(10**6, "cpu")).run().shortage
    assert shortage
    assert (shortage.stage, shortage.requested_bytes, shortage.available_bytes) == (
        "checking memory after step 1",
        None,
        10**6,
    )
    assert set(shortage.bytes_by_part) == {"weights", "optimizer"}
    assert make_trainer(config.replace(steps=1)).run().shortage is None


@pytest.mark.parametrize("optimizer", ["adamw-fused", "adafactor", "muon"])
def test_gradients_and_the_optimizers_state_are_counted(config: ResolvedConfig, optimizer: Any) -> None:
    trainer = make_trainer(config.replace(optimizer=optimizer, steps=1, cycle=Cycle(2, 0)))
    trainer.keep_gradients = True
    trainer.run()
    sizes, count = bytes_by_part(trainer.model, trainer.optimizer), config.model.parameters
    assert sizes["weights"] == sizes["gradients"] == 4 * count
    assert sizes["optimizer"] >= optimizer_bytes(
        cast(ModelConfig, trainer.config.model), trainer.config.optimization.optimizer, count
    )


def test_the_size_that_did_not_fit_is_read_from_torchs_message() -> None:
    sizes = {
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB": 2 * 2**30,
        "CUDA out of memory. Tried to allocate 20.50 MiB. GPU 0": 20 * 2**20 + 2**19,
        "CUDA out of memory. Tried to allocate 512 bytes.": 512,
        "DefaultCPUAllocator: can't allocate memory: you tried to allocate 1234 bytes. Error code 12": 1234,
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`": None,
    }
    assert {message: failed_allocation_bytes(RuntimeError(message)) for message in sizes} == sizes


def test_on_a_gpu_the_cap_leaves_some_of_the_limit() -> None:
    assert (
        MemoryLimit(10**10, torch.device("cuda", 0), baseline_bytes=0).usable_bytes
        == 10**10 - RESERVED_OUTSIDE_ALLOCATOR
    )


def test_a_gpu_has_what_other_processes_leave() -> None:
    """Of 80 GB, 50 are in use, of which this process has 20."""
    state = GpuState("GPU", "580", 80 * 10**9, 50 * 10**9, 20 * 10**9, (), None, None, None, None)
    assert available_bytes(torch.device("cuda", 0), lambda index: state) == 50 * 10**9


@pytest.mark.gpu
def test_a_gpu_that_is_full(config: ResolvedConfig) -> None:
    """A card's real message, for logits of half a terabyte or more."""
    wide = replace(config.model, padded_vocab_size=2**22)
    result = make_trainer(config.replace(device="cuda", model=wide, micro_batch=4096, global_batch=4096)).run()
    assert result.outcome == "oom"
    assert result.shortage
    assert result.shortage.requested_bytes
    assert result.shortage.requested_bytes > 2**30
    assert result.shortage.stage == "running the forward pass of step 1 (computing the loss)"
