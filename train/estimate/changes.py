"""Single changes of how a run is executed that make it need less memory, and what each costs in speed.

In: a resolved config. Out: the changes, the cheapest first. What is computed stays the same: the model, the global
batch, the precision and the optimizer are never changed.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from infra.errors import UserError
from train.config import TrainConfig, divisors
from train.estimate.flops import hardware, recomputed_blocks
from train.estimate.memory import predict_peak


@dataclass(frozen=True)
class Change:
    """One flag that saves memory."""

    flag: str
    """As it is written on the command line: ``--loss fused``."""
    peak: int
    """Predicted peak with it, in bytes."""
    arithmetic: float
    """FLOPs that the device executes more than before, as a fraction, by :func:`train.estimate.flops.hardware`."""
    cost: str
    """What it costs in speed, as far as that is known."""


def savings(config: TrainConfig) -> list[Change]:
    """The changes that are predicted to save memory, by what they cost.

    Among those without further arithmetic, first what leaves the batch as it is, then smaller micro-batches from the
    largest on, whose cost depends on how well the device is used and has no formula, and last selective checkpointing,
    which repeats what is element-wise.
    """
    before, executed = predict_peak(config).total, _executed(config)
    found = []
    for settings, cost in _candidates(config):
        try:
            changed = replace(config, **settings)
        except UserError:  # another setting excludes it
            continue
        more = _executed(changed) / executed - 1
        ((name, value),) = settings.items()
        flag, peak = f"--{name.replace('_', '-')} {value}", predict_peak(changed).total
        if peak < before:
            found.append(Change(flag, peak, more, cost or f"{more:.0%} more arithmetic"))
    return sorted(found, key=lambda change: change.arithmetic)


def _candidates(config: TrainConfig) -> Iterator[tuple[dict[str, Any], str]]:
    """Settings to change and, where their cost is not arithmetic, what it is."""
    if config.attention == "manual":
        yield {"attention": "auto"}, "no more arithmetic"
    if config.loss == "plain" and config.loss_chunks == 1:
        yield {"loss": "fused"}, "no more arithmetic"
    for size in reversed(divisors(config.global_batch // config.workers)):
        if size < config.micro_batch:
            count = config.global_batch // config.workers // size
            cost = f"the same arithmetic in {count} micro-batches instead of {config.accumulation}"
            yield {"micro_batch": size}, cost
    yield {"checkpointing": "selective"}, "element-wise operations twice, no more matrix products"
    yield {"checkpointing": "alternate"}, ""
    yield {"checkpointing": "full"}, ""


def _executed(config: TrainConfig) -> float:
    """FLOPs per token."""
    return hardware(config.model, recomputed=recomputed_blocks(config))
