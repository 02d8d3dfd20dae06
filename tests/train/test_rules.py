"""Which settings cannot be combined: every pair by its two names, and what stands just inside each border."""

from typing import Any

import pytest

from infra.errors import UserError
from train.config import Cycle, TrainConfig, divisors
from train.model_config import ModelConfig

BATCH: dict[str, Any] = {"global_batch": 64}
SHARDED = {"fsdp": True, "workers": 2}


@pytest.mark.parametrize(
    ("settings", "first", "second"),
    [
        ({"attention": "efficient", "device": "cpu"}, "--attention efficient", "--device cpu"),
        ({"attention": "flex", "device": "cpu"}, "--attention flex", "--device cpu"),
        ({"attention": "flash", "precision": "tf32"}, "--attention flash", "--precision tf32"),
        ({"attention": "cudnn", "precision": "fp32"}, "--attention cudnn", "--precision fp32"),
        ({"attention": "flex", "model": ModelConfig(dropout=0.1)}, "--attention flex", "dropout=0.1"),
        ({"attention": "flex", "model": ModelConfig(heads=4, width=60)}, "--attention flex", "heads=4"),
        ({"attention": "efficient", "mask_books": True}, "--attention efficient", "--mask-books"),
        ({"checkpointing": "selective", "compile": "blocks"}, "--checkpointing selective", "--compile blocks"),
        ({"checkpointing": "budget", "compile": "off"}, "--checkpointing budget", "--compile off"),
        ({"fp8": True, "device": "cpu"}, "--fp8", "--device cpu"),
        ({"fp8": True, "precision": "fp16"}, "--fp8", "--precision fp16"),
        ({"optimizer": "adamw-bf16", "precision": "bf16"}, "--optimizer adamw-bf16", "--precision bf16"),
        (
            {"optimizer": "adamw-bf16", "precision": "bf16-activations", "workers": 2},
            "--optimizer adamw-bf16", "--workers 2",
        ),
        ({"fsdp": True}, "--fsdp", "--workers 1"),
        (SHARDED | {"precision": "fp16"}, "--fsdp", "--precision fp16"),
        (SHARDED | {"optimizer": "adamw-8bit"}, "--fsdp", "--optimizer adamw-8bit"),
        (SHARDED | {"optimizer": "adafactor"}, "--fsdp", "--optimizer adafactor"),
        (SHARDED | {"optimizer": "muon"}, "--fsdp", "--optimizer muon"),
        (SHARDED | {"optimizer": "lion"}, "--fsdp", "--optimizer lion"),
        (SHARDED | {"compile": "aot_eager"}, "--fsdp", "--compile aot_eager"),
        ({"checkpointing": "budget", "compile": "eager"}, "--checkpointing budget", "--compile eager"),
        ({"deterministic": True, "compile": "max-autotune"}, "--deterministic", "--compile max-autotune"),
        ({"offload_optimizer": True, "device": "cpu"}, "--offload-optimizer", "--device cpu"),
        ({"offload_optimizer": True, "precision": "fp16"}, "--offload-optimizer", "--precision fp16"),
        ({"offload_optimizer": True, "workers": 2}, "--offload-optimizer", "--workers 2"),
        ({"offload_optimizer": True, "optimizer": "muon"}, "--offload-optimizer", "--optimizer muon"),
        (SHARDED | {"compile": "whole"}, "--fsdp", "--compile whole"),
        (SHARDED | {"fp8": True}, "--fsdp", "--fp8"),
        ({"stream": ("books",), "steps": 3, "loader_threads": 2}, "--loader-threads 2", "--stream"),
    ],
)  # fmt: skip
def test_a_pair_that_excludes_each_other_is_named(settings: dict[str, Any], first: str, second: str) -> None:
    with pytest.raises(UserError, match=r"cannot be combined|does not apply to") as refusal:
        TrainConfig.of(**BATCH | settings)
    assert first in str(refusal.value)
    assert second in str(refusal.value)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"beta1": 1.0}, "--beta1 1.0"), ({"beta2": 1.0}, "--beta2 1.0"),
        ({"learning_rate": 0.0}, "--learning-rate 0.0"), ({"warmup_steps": -1}, "--warmup-steps -1"),
        ({"clip_norm": float("nan")}, "--clip-norm nan"),
        ({"max_loss_spike": -1.0}, "--max-loss-spike -1.0"),
        ({"speed_tolerance": 1.0}, "--speed-tolerance 1.0"), ({"speed_tolerance": 0.0}, "--speed-tolerance 0.0"),
        ({"time_budget": 0.0}, "--time-budget 0.0s"), ({"time_budget": float("inf")}, "--time-budget inf"),
        ({"learning_rate": float("inf")}, "--learning-rate inf"),
        ({"weight_decay": float("inf")}, "--weight-decay inf"),
        ({"weight_decay": float("nan")}, "--weight-decay nan"), ({"clip_norm": float("inf")}, "--clip-norm inf"),
        ({"max_loss_spike": float("inf")}, "--max-loss-spike inf"), ({"beta1": float("nan")}, "--beta1 nan"),
        ({"steps": 10**30}, f"--steps {10**30}"), ({"tokens": 10**30}, f"--tokens {10**30}"),
        ({"warmup_steps": 2**63}, f"--warmup-steps {2**63}"), ({"keep_checkpoints": 10**30}, "--keep-checkpoints 1"),
        ({"checkpoint_every": 10**30}, "--checkpoint-every 1"), ({"loader_threads": 1025}, "--loader-threads 1025"),
        ({"micro_batch": 10**30}, "--micro-batch 1"), ({"workers": 10**30}, "--workers 1"),
        ({"ablate": ("sink",)}, "--ablate sink"), ({"optimizer": "adam"}, "--optimizer adam is"),
        ({"stream": ("books",)}, "--stream books"),
        ({"tokens": 5000, "time_budget": 3.0}, "--tokens and --time-budget"),
        ({"global_batch": 8, "micro_batch": 3, "workers": 2}, "Use --micro-batch 1, 2 or 4"),
        ({"global_batch": 8, "micro_batch": 2, "loss_chunks": 3}, "the 2,048 tokens of --micro-batch 2"),
    ],
)  # fmt: skip
def test_a_setting_out_of_its_range_is_named(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError) as refusal:
        TrainConfig.of(**BATCH | settings)
    assert named in str(refusal.value)


def test_what_stands_just_inside_the_borders_is_allowed() -> None:
    allowed: list[dict[str, Any]] = [
        {"attention": "efficient", "precision": "fp32"},
        {"attention": "flex", "model": ModelConfig(heads=4, width=64), "mask_books": True},
        {"checkpointing": "selective", "compile": "whole"},
        {"fp8": True, "precision": "bf16"},
        {"optimizer": "adamw-bf16", "precision": "bf16-activations"},
        {"optimizer": "adamw-8bit", "workers": 2},
        SHARDED | {"compile": "blocks", "optimizer": "adamw-fused", "precision": "bf16"},
        {"offload_optimizer": True, "optimizer": "lion", "precision": "bf16", "compile": "max-autotune-graphs"},
        {"deterministic": True, "compile": "reduce-overhead"},
        {"stream": ("books",), "steps": 3, "loader_threads": 1},
        {"stream": ("books",), "tokens": 64 * 1024},
        {"stream": ("books",), "time_budget": 1.0},
        {"tokens": 8 * 1024, "global_batch": 8, "micro_batch": 8},
        {"beta1": 0.0, "weight_decay": 0.0, "clip_norm": 0.0, "seed": 0},
        {"ablate": ("async-loss", "set-to-none", "prefetch", "gc-pause", "large-pages")},
        {"steps": 1, "speed_tolerance": 0.999},
        {"steps": 2**63 - 1, "warmup_steps": 2**63 - 1, "keep_checkpoints": 2**63 - 1, "loader_threads": 1024},
    ]
    for settings in allowed:
        TrainConfig.of(**BATCH | settings)


@pytest.mark.parametrize("text", ["10000001+1", "1+10000001", f"{10**30}+0"])
def test_a_cycle_longer_than_memory_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=rf"--cycle {text.replace('+', '.')} .* 10,000,000"):
        Cycle.parse(text)
    assert Cycle.parse("10000000+10000000") == Cycle(10**7, 10**7)


def test_all_divisors() -> None:
    actual = {1: [1], 2: [1, 2], 7: [1, 7], 36: [1, 2, 3, 4, 6, 9, 12, 18, 36], 49: [1, 7, 49]}
    assert {number: list(divisors(number)) for number in actual} == actual
