"""Changes of the execution of a step that save memory, with their cost in speed.

They never change the mathematics: the model, the global batch, the precision and the optimizer stay the same.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from infra.errors import UserError
from train.config import ACTIVATION_BUDGETS, Step
from train.estimate.memory import peak_if_known, predict_peak
from train.estimate.recomputation import CHECKPOINTING_BY_TIME, recomputation_time


@dataclass(frozen=True)
class MemorySaving:
    """Flags that save memory."""

    flags: tuple[str, ...]
    """Flags as on the command line, such as ``--loss fused``."""
    peak: int
    """Predicted peak memory with the flags, in bytes."""
    arithmetic: float
    """Additional FLOPs that the device executes, as a fraction, by ``executed_flops_per_token`` of the model."""
    cost: str
    """The cost in speed as a text."""

    @property
    def text(self) -> str:
        return " ".join(self.flags)


def find_memory_savings(step: Step) -> list[MemorySaving]:
    """Return the changes that are predicted to save memory, by their cost: single changes first, then combinations.

    Changes without recomputation are ordered as follows: first those that keep the micro-batch; then smaller
    micro-batches from the largest on, whose cost depends on the device's utilization and has no formula. Recomputation
    follows by its predicted time.
    """
    current_peak = predict_peak(step).total
    current_flops = step.model.executed_flops_per_token(step.execution.checkpointing)
    ranked_changes = []
    for settings in _candidates(step):
        try:
            changed = step.replace(**settings)
        except UserError:  # The change cannot be combined with another setting.
            continue
        breakdown = peak_if_known(changed)
        if breakdown is None:  # The memory of a custom model is only known for settings that were probed.
            continue
        additional_flops = changed.model.executed_flops_per_token(changed.execution.checkpointing) / current_flops - 1
        flags = tuple(f"--{name.replace('_', '-')} {value}" for name, value in settings.items())
        if breakdown.total < current_peak:
            additional_time = _recomputation_time(changed) - _recomputation_time(step)
            rank = len(flags) > 1, additional_time, -changed.batch.micro_batch, len(flags)
            cost = _cost(step, changed, additional_flops)
            ranked_changes.append((rank, MemorySaving(flags, breakdown.total, additional_flops, cost)))
    return [change for _, change in sorted(ranked_changes, key=lambda ranked: ranked[0])]


def _candidates(step: Step) -> Iterator[dict[str, Any]]:
    """Yield the combinations of settings to change, with at most one value for each setting."""
    choices: dict[str, list[Any]] = {
        "attention": ["auto"] if step.execution.attention == "manual" else [],
        "loss": ["fused"] if step.execution.loss == "plain" and step.execution.loss_chunks == 1 else [],
        "micro_batch": [size for size in step.micro_batches if size < step.batch.micro_batch],
        "checkpointing": [kind for kind in CHECKPOINTING_BY_TIME if kind != "none"],
    }
    for values in product(*([None, *choice] for choice in choices.values())):
        settings = {name: value for name, value in zip(choices, values, strict=True) if value is not None}
        if settings:
            yield settings


def _cost(step: Step, changed: Step, additional_flops: float) -> str:
    costs = []
    if changed.batch.micro_batch != step.batch.micro_batch:
        costs.append(
            f"the same FLOPs in {changed.batch.accumulation} micro-batches instead of {step.batch.accumulation}"
        )
    kind = changed.execution.checkpointing
    if kind != step.execution.checkpointing:
        additional_time = _recomputation_time(changed) - _recomputation_time(step)
        if kind == "selective":
            costs.append("element-wise operations run twice, no additional matrix products")
        elif kind in ACTIVATION_BUDGETS:
            costs.append(f"about {additional_time:.0%} more time for recomputation")
        else:
            costs.append(f"{additional_flops:.0%} more FLOPs")
    return "; ".join(costs) or "no additional FLOPs"


def _recomputation_time(step: Step) -> float:
    return recomputation_time(step.execution.checkpointing)
