"""Predicted peaks against torch's own memory tracker, which runs the real operations on tensors without storage."""

import gc
import json
from contextlib import nullcontext
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.profiler import ProfilerActivity, profile
from trainers import make_trainer

from train.config import Compile, ResolvedConfig, Step
from train.estimate.memory import (
    fit_to_probes,
    largest_unconstrained_micro_batch,
    peak_with_margin,
    predict_peak,
)
from train.loop.execution import compile_model
from train.model_config import PRESETS, ModelConfig, parse_model
from train.models.attention import ATTENTION
from train.models.gpt2 import GPT
from train.models.loss import CHUNK_TOKENS, loss_function
from train.models.optimizer import make_optimizer

MODEL = replace(PRESETS["small"], layers=2, context_length=256, vocab_size=8000, padded_vocab_size=8064)
WIDE_HEAD = replace(MODEL, layers=1, context_length=16, vocab_size=20000, padded_vocab_size=20000)
"""Its peak is where the embeddings' gradient meets the head's."""
RECORD = Path(__file__).parents[2] / "benchmarks" / "records" / "memory-cuda.json"
BASE = Step.of(
    model=MODEL, micro_batch=4, global_batch=4, precision="fp32", attention="sdpa", compile="off", loss="plain",
    device="cpu",
)  # fmt: skip


def tracked_peak(step: Step) -> int:
    """Bytes at the peak of two steps of the loop's arithmetic, counted tensor by tensor."""
    stream = torch.bfloat16 if step.execution.precision == "bf16-activations" else None
    with FakeTensorMode():
        model = GPT(
            cast(ModelConfig, step.model),
            attention=ATTENTION[step.execution.attention],
            checkpointing=step.execution.checkpointing,
            activations=stream,
        )
        optimizer = make_optimizer(model, step.optimization)
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        shape = (step.batch.micro_batch, step.model.context_length + 1)
        with tracker:
            for _ in range(2):
                for _ in range(step.batch.accumulation):
                    batch = torch.zeros(shape, dtype=torch.int64)
                    with torch.autocast("cpu", torch.bfloat16, enabled=step.execution.precision == "bf16"):
                        loss = model(batch[:, :-1], batch[:, 1:])
                    (loss / step.batch.accumulation).backward()
                    del loss
                    tracker.reset_mod_stats()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention": "manual", "global_batch": 8},
        {"precision": "bf16"},
        {"precision": "bf16-activations"},
        {"precision": "bf16", "checkpointing": "full", "global_batch": 8},
        {"precision": "bf16", "checkpointing": "alternate"},
        {"checkpointing": "selective"},
        {"optimizer": "lion"},
        {"optimizer": "lion", "model": WIDE_HEAD, "micro_batch": 1, "global_batch": 1},
        {"optimizer": "sgd"},
        {"model": WIDE_HEAD, "micro_batch": 1, "global_batch": 1},
        {"model": WIDE_HEAD, "micro_batch": 1, "global_batch": 2},
        {"model": replace(WIDE_HEAD, tied=False), "micro_batch": 1, "global_batch": 2},
        {"model": replace(MODEL, tied=False, dropout=0.1), "attention": "manual"},
    ],
    ids=lambda changes: " ".join(changes) or "fp32",
)
def test_the_formula_agrees_with_the_tracker(changes: dict[str, Any]) -> None:
    step = BASE.replace(**changes)
    assert predict_peak(step).allocated == pytest.approx(tracked_peak(step), rel=0.03)


def test_gpt2_at_any_batch_is_what_the_tracker_found() -> None:
    """1.621 + 0.897 GiB a sequence: bf16 autocast, eager, AdamW, without accumulation."""
    for size in (1, 8, 64):
        step = Step.of(
            micro_batch=size, global_batch=size, precision="bf16", attention="sdpa", compile="off", loss="plain",
            device="cpu",
        )  # fmt: skip
        assert predict_peak(step).allocated / 2**30 == pytest.approx(1.621 + 0.897 * size, rel=0.002)


LAYER = ModelConfig(layers=1, heads=2, width=128, context_length=256, vocab_size=4096, padded_vocab_size=4096)
"""Its activations and its logits both weigh enough that an error in either shows, and one in both as well."""


def allocated_peak(step: Step, trace: Path) -> int:
    """Bytes at the peak of a forward and backward pass, beside the weights, by the count of torch's CPU allocator."""
    loss = loss_function("plain", step.execution.loss_chunks)
    model = GPT(cast(ModelConfig, step.model), loss=loss)
    forward = compile_model(model, step.execution)
    batch = torch.zeros((step.batch.micro_batch, step.model.context_length + 1), dtype=torch.int64)
    for last in (False, False, True):  # the first two compile
        model.zero_grad()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) if last else nullcontext() as profiler:
            forward(batch[:, :-1], batch[:, 1:]).backward()
    assert profiler is not None
    profiler.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    counts = [event["args"] for event in sorted(events, key=itemgetter("ts")) if event["name"] == "[memory]"]
    initial = counts[0]["Total Allocated"] - counts[0]["Bytes"]  # the count goes on from an earlier profile's
    return max(count["Total Allocated"] for count in counts) - initial


@pytest.mark.parametrize(("compile", "chunks"), [("off", 8), pytest.param("whole", 1, marks=pytest.mark.slow)])
def test_the_formula_agrees_with_the_allocator(compile: Compile, chunks: int, tmp_path: Path) -> None:
    step = BASE.replace(model=LAYER, compile=compile, loss_chunks=chunks)
    breakdown = predict_peak(step)
    predicted = breakdown.allocated - breakdown.weights - breakdown.optimizer
    assert predicted == pytest.approx(allocated_peak(step, tmp_path / "trace.json"), rel=0.05)


def test_the_formula_agrees_with_what_a_gpu_allocated() -> None:
    """In every step of ``make bench-memory-cuda``."""
    for row in json.loads(RECORD.read_text())["rows"]:
        size = row["micro_batch"]
        step = Step.of(
            model=replace(parse_model(row["model"]), context_length=row["context"]), micro_batch=size,
            global_batch=size * row["accumulation"], precision=row["precision"], compile=row["compile"],
            loss=row["loss"], attention="flash", device="cuda",
        )  # fmt: skip
        assert predict_peak(step).allocated == pytest.approx(row["allocated"], rel=0.01), row


def test_two_probes_take_over_what_no_formula_knows() -> None:
    def real(predicted: float) -> float:
        return 1.04 * predicted + 700e6

    probes = [(size, real(size)) for size in (2e9, 30e9)]
    assert fit_to_probes(12e9, probes) == pytest.approx(real(12e9))
    assert fit_to_probes(12e9, probes[:1]) == pytest.approx(12e9 + real(2e9) - 2e9)
    assert fit_to_probes(12e9, []) == 12e9
    assert fit_to_probes(3.0, [(1.0, 2.0), (1.0, 4.0)]) == pytest.approx(5.0)


def test_what_would_fit_without_the_global_batch_is_the_largest() -> None:
    step = Step.of(precision="bf16", attention="flash", device="cuda", micro_batch=32, compile="off", loss="plain")
    limit = 40 * 10**9
    size, accumulation = largest_unconstrained_micro_batch(step, limit), step.batch.accumulation
    fitted = step.replace(micro_batch=size, global_batch=size * accumulation)
    assert peak_with_margin(fitted) <= limit
    assert peak_with_margin(fitted.replace(micro_batch=size + 1, global_batch=(size + 1) * accumulation)) > limit
    assert largest_unconstrained_micro_batch(step.replace(loss_chunks=15, micro_batch=15), limit) % 15 == 0, (
        "pieces divide the tokens"
    )
    assert largest_unconstrained_micro_batch(step, 10**9) == 0


def test_a_fused_loss_in_bf16_is_computed_from_a_copy_in_fp32() -> None:
    """Of a chunk of 8,192 tokens; CUDA's kernel for fp16 needs none, nor does compiled code."""
    step = Step.of(loss="fused", precision="bf16", attention="flash", device="cuda", micro_batch=16, compile="off")
    loss = {precision: predict_peak(step.replace(precision=precision)).logits for precision in ("bf16", "fp16")}
    assert loss["bf16"] - loss["fp16"] == CHUNK_TOKENS * 50304 * 4
    assert predict_peak(step.replace(compile="whole")).logits < loss["fp16"]


def test_what_saves_memory_saves_memory() -> None:
    step = Step.of(precision="bf16", attention="flash", device="cuda", micro_batch=16, compile="off", loss="plain")
    plain = predict_peak(step).total
    for changes in (
        {"checkpointing": "selective"},
        {"checkpointing": "full"},
        {"loss_chunks": 8},
        {"compile": "whole"},
        {"optimizer": "adamw-8bit"},
        {"optimizer": "lion"},
        {"optimizer": "sgd"},
        {"offload_optimizer": True},
        {"precision": "bf16-activations"},
    ):
        assert predict_peak(step.replace(**changes)).total < plain, changes
    parameters = cast(ModelConfig, step.model).parameters
    assert predict_peak(step.replace(offload_optimizer=True)).optimizer == 0
    assert predict_peak(step.replace(optimizer="lion")).optimizer == 4 * parameters


@pytest.mark.parametrize("tied", [True, False])
def test_weights_and_optimizer_are_those_of_a_real_one(tied: bool) -> None:
    step = BASE.replace(model=replace(MODEL, tied=tied))
    model = GPT(cast(ModelConfig, step.model))
    optimizer = make_optimizer(model, step.optimization)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    moments = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
    breakdown = predict_peak(step)
    assert breakdown.weights == sum(parameter.nbytes for parameter in model.parameters())
    assert breakdown.optimizer == sum(moment.nbytes for moment in moments)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("compiled", ["off", "whole"])
def test_two_probes_predict_reserved_memory_of_other_batches_within_3_percent(
    compiled: Compile, small_shards: Path
) -> None:
    """On the GPU, against what the allocator reserved."""
    model = replace(PRESETS["gpt2-124m"], layers=4)

    def measured(size: int) -> tuple[float, float]:
        config = ResolvedConfig.of(
            data=str(small_shards), model=model, micro_batch=size, global_batch=size, precision="bf16",
            attention="flash", compile=compiled, loss="plain", device="cuda", steps=4,
        )  # fmt: skip
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()
        reserved = make_trainer(config).run().memory.reserved
        assert reserved is not None
        return predict_peak(config.step).allocated, reserved

    probes = [measured(4), measured(24)]
    for size in (8, 16, 32):
        predicted, reserved = measured(size)
        assert fit_to_probes(predicted, probes) == pytest.approx(reserved, rel=0.03)


@pytest.mark.parametrize("workers", [2, 4])
def test_sharded_workers_each_hold_their_part(workers: int) -> None:
    """FSDP divides weights, gradients and the optimizer's state, and what a batch takes stays as large.

    Copies on each worker (DDP) take as much as one worker alone.
    """
    alone = BASE.replace(compile="blocks", device="cuda", precision="bf16", global_batch=16, allocator="expandable")
    copied, sharded = (alone.replace(workers=workers, global_batch=16 * workers, fsdp=fsdp) for fsdp in (False, True))
    one, copy, shard = map(predict_peak, (alone, copied, sharded))
    parameters = MODEL.parameters
    assert one.weights == copy.weights == 4 * parameters
    assert copy == one
    assert shard.weights == 4 * parameters // workers
    assert shard.optimizer == 8 * parameters // workers
    assert (shard.context, shard.workspace) == (one.context, one.workspace)
    assert shard.activations == one.activations
    saved = one.total - shard.total
    assert saved >= (4 + 8) * parameters * (workers - 1) // workers
    assert saved <= (4 + 8 + 4) * parameters * (workers - 1) // workers + 1
    assert peak_with_margin(sharded) < peak_with_margin(copied)
