"""Changes of how a run is executed that make it need less memory, and what each costs in speed.

What is computed stays the same: the model, the global batch, the precision and the optimizer are never changed.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from infra.errors import UserError
from train.config import TrainConfig
from train.estimate.flops import executed
from train.estimate.memory import known_peak, predict_peak


@dataclass(frozen=True)
class Change:
    """Flags that save memory."""

    flags: tuple[str, ...]
    """As they are written on the command line: ``--loss fused``."""
    peak: int
    """Predicted peak with them, in bytes."""
    arithmetic: float
    """FLOPs that the device executes more than before, as a fraction, by :func:`train.estimate.flops.hardware`."""
    cost: str
    """What they cost in speed, as far as that is known."""

    @property
    def text(self) -> str:
        return " ".join(self.flags)


def memory_savers(config: TrainConfig) -> list[Change]:
    """The single changes, and after them their combinations, that are predicted to save memory, by what they cost.

    Among those without further arithmetic, first what leaves the batch as it is, then smaller micro-batches from the
    largest on, whose cost depends on how well the device is used and has no formula, and last selective checkpointing,
    which repeats what is element-wise.
    """
    before, arithmetic = predict_peak(config).total, executed(config)
    found = []
    for settings in _candidates(config):
        try:
            changed = replace(config, **settings)
        except UserError:  # another setting excludes it
            continue
        anatomy = known_peak(changed)
        if anatomy is None:  # not measured
            continue
        more = executed(changed) / arithmetic - 1
        flags = tuple(f"--{name.replace('_', '-')} {value}" for name, value in settings.items())
        peak = anatomy.total
        if peak < before:
            elementwise = settings.get("checkpointing") == "selective"
            rank = len(flags) > 1, more, elementwise, -changed.micro_batch, len(flags)
            found.append((rank, Change(flags, peak, more, _cost(config, changed, more))))
    return [change for _, change in sorted(found, key=lambda ranked: ranked[0])]


def _candidates(config: TrainConfig) -> Iterator[dict[str, Any]]:
    """Settings to change: at most one value of each."""
    choices: dict[str, list[Any]] = {
        "attention": ["auto"] if config.attention == "manual" else [],
        "loss": ["fused"] if config.loss == "plain" and config.loss_chunks == 1 else [],
        "micro_batch": [size for size in config.micro_batches if size < config.micro_batch],
        "checkpointing": ["selective", "alternate", "full"],
    }
    for values in product(*([None, *choice] for choice in choices.values())):
        settings = {name: value for name, value in zip(choices, values, strict=True) if value is not None}
        if settings:
            yield settings


def _cost(before: TrainConfig, after: TrainConfig, more: float) -> str:
    parts = []
    if after.micro_batch != before.micro_batch:
        parts.append(f"the same arithmetic in {after.accumulation} micro-batches instead of {before.accumulation}")
    if after.checkpointing == "selective" != before.checkpointing:
        parts.append("element-wise operations twice, no more matrix products")
    elif after.checkpointing != before.checkpointing:
        parts.append(f"{more:.0%} more arithmetic")
    return "; ".join(parts) or "no more arithmetic"
