"""Single changes that save memory: golden for GPT-2, and what holds for every step."""

from typing import Any, cast

import pytest

from infra.device.hardware import A100, cpu_info
from train.config import ResolvedConfig, Step, TrainConfig
from train.estimate.advice import MemorySaving, find_memory_savings
from train.estimate.memory import predict_peak
from train.model_config import ModelConfig
from train.resolved import resolve

NAMED: dict[str, Any] = {"compile": "off", "loss": "plain"}


def singles(step: Step) -> list[MemorySaving]:
    return [change for change in find_memory_savings(step) if len(change.flags) == 1]


def test_the_cheapest_change_comes_first() -> None:
    step = resolve(TrainConfig.of(global_batch=64, micro_batch=32, **NAMED), A100).step
    assert [change.text for change in singles(step)] == [
        "--loss fused", *(f"--micro-batch {size}" for size in (16, 8, 4, 2, 1)),
        *(f"--checkpointing {kind}" for kind in ("selective", "alternate", "full")),
    ]  # fmt: skip
    full = singles(step)[-1]
    assert full.arithmetic == pytest.approx(
        cast(ModelConfig, step.model).hardware_flops(recomputed=12) / cast(ModelConfig, step.model).palm_flops - 1
    )
    assert full.cost.startswith("24%")
    assert full.peak == predict_peak(step.replace(checkpointing="full")).total
    each = resolve(TrainConfig.of(global_batch=64, micro_batch=8, workers=4, **NAMED), A100).step
    costs = {change.text: change.cost for change in find_memory_savings(each)}
    assert "in 16 micro-batches instead of 2" in costs["--micro-batch 1"], "those of each worker"


@pytest.mark.parametrize(
    ("changes", "offered", "left_out"),
    [
        ({"attention": "manual"}, "--attention auto", ""),
        ({"loss": "fused"}, "--checkpointing full", "--loss"),
        ({"loss_chunks": 8}, "--checkpointing full", "--loss"),
        ({"compile": "blocks"}, "--checkpointing full", "selective"),
        ({"checkpointing": "full"}, "--loss fused", "--checkpointing"),
        ({"micro_batch": 1}, "--checkpointing full", "--micro-batch"),
        ({"device": "cpu"}, "--loss fused", "--attention"),
        ({"workers": 4}, "--micro-batch 8", "--micro-batch 16"),
        ({"workers": 2, "global_batch": 40, "micro_batch": 10}, "--micro-batch 5", "--micro-batch 8"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_what_can_be_changed_saves_memory_and_is_sorted_by_its_cost(
    changes: dict[str, Any], offered: str, left_out: str
) -> None:
    step = ResolvedConfig.of(global_batch=64, micro_batch=16, **NAMED)
    step = resolve(step.replace(**changes), cpu_info() if "device" in changes else A100)
    savings = singles(step.step)
    flags = [change.text for change in savings]
    assert offered in flags
    assert not left_out or not [flag for flag in flags if left_out in flag]
    assert all(change.peak < predict_peak(step.step).total for change in savings)
    costs = [change.arithmetic for change in savings]
    assert costs == sorted(costs)


def test_budgets_are_proposed_where_a_graph_is_compiled_in_the_order_of_their_time() -> None:
    step = resolve(TrainConfig.of(global_batch=32, micro_batch=32, loss="fused"), A100).step
    kinds = [change.text.split()[1] for change in singles(step) if change.flags[0].startswith("--checkpointing")]
    assert kinds == ["budget-75", "selective", "budget", "alternate", "budget-25", "full"]
    costs = {change.text: change.cost for change in singles(step)}
    assert "4% more time" in costs["--checkpointing budget-75"]


def test_combinations_come_after_single_changes_and_keep_the_largest_batch() -> None:
    step = resolve(TrainConfig.of(global_batch=4, micro_batch=4, **NAMED), A100).step
    savings = find_memory_savings(step)
    assert [len(change.flags) > 1 for change in savings] == sorted(len(change.flags) > 1 for change in savings)
    combined = [change.text for change in savings if len(change.flags) > 1]
    assert combined[:3] == [
        "--loss fused --micro-batch 2", "--loss fused --micro-batch 1", "--loss fused --checkpointing selective",
    ]  # fmt: skip
    assert combined[-1] == "--loss fused --micro-batch 1 --checkpointing full"
    costs = [change.arithmetic for change in savings if len(change.flags) > 1]
    assert costs == sorted(costs)
