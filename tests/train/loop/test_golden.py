"""Rungs that claim to keep the mathematics: their loss curve is fp32's, step by step, on the small model."""

from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from trainers import make_trainer

from train.config import TORCHAO_OPTIMIZERS, Batch, Cycle, ResolvedConfig
from train.data.loader import BatchLoader, WorkerShare
from train.data.shards import ShardData
from train.model_config import ModelConfig
from train.models.gpt2 import GPT
from train.models.optimizer import make_optimizer, set_learning_rate
from tune.suite.catalog import SUITES
from tune.suite.suites import Rung, Suite, apply_changes

STEPS = 12
TOLERANCE = 2e-4
"""Nats. Sums in another order differ by 1e-6 in the first step, and training amplifies that."""


def curve(config: ResolvedConfig) -> list[float]:
    """The training loss of every step."""
    trainer = make_trainer(config)
    result = trainer.run()
    assert result.outcome == "finished", result.reason
    return trainer.times.reports[0].step_losses


@pytest.fixture(scope="module")
def plain(small_shards: Path, small_model: ModelConfig) -> ResolvedConfig:
    """fp32, everything by the book."""
    return ResolvedConfig.of(
        data=str(small_shards), model=small_model, micro_batch=8, global_batch=8, precision="fp32", attention="manual",
        optimizer="adamw", learning_rate=3e-3, device="cpu", steps=STEPS, cycle=Cycle(STEPS, 0), keep_checkpoints=0,
    )  # fmt: skip


@pytest.fixture(scope="module")
def golden(plain: ResolvedConfig) -> list[float]:
    """fp32's loss curve, which falls."""
    losses = curve(plain)
    assert losses[-1] < losses[0] - 0.1
    return losses


@pytest.mark.parametrize(
    "changes",
    [
        {"micro_batch": 1},
        {"micro_batch": 2},
        {"checkpointing": "full"},
        {"checkpointing": "alternate"},
        {"checkpointing": "selective"},
        {"loss_chunks": 8},
        {"attention": "sdpa"},
        {"optimizer": "adamw-fused"},
        {"ablate": ("async-loss", "set-to-none", "prefetch", "gc-pause")},
        {"loader_threads": 2},
        {"loss": "fused"},
        {"micro_batch": 4, "checkpointing": "full", "loss_chunks": 4, "attention": "sdpa", "optimizer": "adamw-fused"},
    ],
    ids=lambda changes: " ".join(changes),
)
def test_what_changes_the_execution_keeps_the_curve(
    plain: ResolvedConfig, golden: list[float], changes: Mapping[str, Any]
) -> None:
    assert curve(plain.replace(**changes)) == pytest.approx(golden, abs=TOLERANCE)


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_checkpointing_repeats_the_dropout_of_the_forward_pass(plain: ResolvedConfig, kind: Any) -> None:
    dropped = plain.replace(model=replace(plain.model, dropout=0.2))
    assert curve(dropped.replace(checkpointing=kind)) == pytest.approx(curve(dropped), abs=TOLERANCE)


def test_padding_the_vocabulary_barely_moves_the_curve(plain: ResolvedConfig, golden: list[float]) -> None:
    """Ids that never occur add exp(0) each to the softmax at the start, until training has silenced them."""
    exact = curve(plain.replace(model=replace(plain.model, padded_vocab_size=plain.model.vocab_size)))
    assert exact == pytest.approx(golden, abs=0.3)


def test_tying_is_one_matrix_in_two_places(plain: ResolvedConfig) -> None:
    """As two matrices that start equal and both move by the sum of their gradients, of which autograd knows nothing."""
    config = plain.replace(clip_norm=0)
    windows = ShardData(config.dataset, config.model, config.duration.cycle).windows
    losses: dict[bool, list[float]] = {True: [], False: []}
    for tied, curve in losses.items():
        torch.manual_seed(0)
        model = GPT(replace(cast(ModelConfig, config.model), tied=tied))
        head, embedding = model.head.weight, model.token_embedding.weight
        with torch.no_grad():
            head.copy_(embedding)
        optimizer = make_optimizer(model, config.optimization)
        set_learning_rate(optimizer, config.optimization.learning_rate)
        batches = BatchLoader(windows, WorkerShare(Batch(8, 8)), torch.device("cpu"))
        for _ in range(STEPS):
            loss = model(*batches.next())
            loss.backward()
            if not tied:
                assert head.grad is not None
                assert embedding.grad is not None
                head.grad = embedding.grad = head.grad + embedding.grad
            optimizer.step()
            optimizer.zero_grad()
            curve.append(loss.item())
    assert losses[True][-1] < losses[True][0] - 0.1
    assert losses[True] == pytest.approx(losses[False], abs=TOLERANCE)


def test_untying_changes_the_numerics(plain: ResolvedConfig, golden: list[float]) -> None:
    untied = curve(plain.replace(model=replace(plain.model, tied=False)))
    assert untied != pytest.approx(golden, abs=TOLERANCE)


def test_bf16_is_near_fp32_but_not_it(plain: ResolvedConfig, golden: list[float]) -> None:
    """Also where the CPU emulates it: slower, with the same rounding, which the mean of a loss evens out."""
    losses = curve(plain.replace(precision="bf16"))
    assert losses == pytest.approx(golden, abs=2e-3)
    assert losses != pytest.approx(golden, abs=TOLERANCE / 10)


SMALL: Mapping[str, Any] = {
    "model.layers": 1, "model.width": 48, "model.context_length": 32, "model.vocab_size": 257, "device": "cpu",
    "learning_rate": 3e-3, "steps": STEPS, "cycle": f"{STEPS}+0", "keep_checkpoints": 0, "compile": "off",
}  # fmt: skip
"""What a rung is tried with: compiled code has its own test."""
STANDS_FOR = {
    ("precision", "fp16"): "bf16",
    ("model.width", 780): 60,
    ("model.width", 832): 52,
    ("checkpointing", "budget"): "none",
    ("offload_optimizer", True): False,
    **dict.fromkeys([("attention", name) for name in ("auto", "flash", "cudnn", "efficient")], "sdpa"),
}
"""What a CPU does in place of a GPU's settings, and code that is not compiled in place of what is for compiled code."""


def on_a_cpu(config: ResolvedConfig, rung: Rung) -> ResolvedConfig:
    """``config`` with a small model that has the mathematics of ``rung``, at one batch, divided where the rung's is."""
    changes: dict[str, Any] = {name: STANDS_FOR.get((name, value), value) for name, value in rung.changes.items()}
    changes.pop("batch", None)
    changes.pop("model", None)
    if multiple := changes.pop("vocabulary_multiple", None):
        changes["model.padded_vocab_size"] = -(-257 // multiple) * multiple
    batch = {"global_batch": 8, "micro_batch": 2 if "micro_batch" in changes else 8}
    width = {name: changes[name] for name in ("model.width",) if name in changes}
    return ResolvedConfig.from_resolved(apply_changes(config, {**changes, **SMALL, **width, **batch}))


@pytest.mark.parametrize("suite", SUITES.values(), ids=SUITES)
def test_a_rung_is_labeled_when_its_curve_is_another(suite: Suite, plain: ResolvedConfig) -> None:
    """By training: another curve than the baseline's in fp32. A rung with another batch is labeled when it is run."""
    start = plain.replace(model=ModelConfig(vocab_size=257, padded_vocab_size=320))
    base = on_a_cpu(start, Rung("base", suite.base)).replace(precision="fp32")
    expected = curve(base)
    for rung in suite.rungs:
        config = on_a_cpu(base, rung)
        if config == base:  # a batch, or what is compiled
            assert not rung.changes_numerics, rung.name
            continue
        if config.optimization.optimizer in TORCHAO_OPTIMIZERS and not find_spec("torchao"):
            continue
        with torch.compiler.set_stance("force_eager"):  # torchao's optimizers compile their steps, which takes a minute
            same = curve(config) == pytest.approx(expected, abs=TOLERANCE / 10)  # sums in another order: 2e-6 at most
        assert rung.changes_numerics is not same, rung.name


@pytest.mark.gpu
@pytest.mark.parametrize(
    "changes",
    [
        {"precision": "tf32"}, {"precision": "bf16"}, {"precision": "bf16-activations"},
        {"precision": "bf16", "attention": "flash"}, {"precision": "bf16", "attention": "auto"},
        {"precision": "bf16", "compile": "whole"},
    ],
    ids=lambda changes: " ".join(map(str, changes.values())),
)  # fmt: skip
def test_a_gpus_rungs_stay_near_fp32(plain: ResolvedConfig, changes: Mapping[str, Any]) -> None:
    wide = plain.replace(device="cuda", model=replace(plain.model, width=64, heads=1))
    torch._dynamo.reset()
    assert curve(wide.replace(**changes)) == pytest.approx(curve(wide), abs=0.05)
