"""Rows of trials from flat values, for tests that need no more of a result than its speed and its memory."""

from dataclasses import fields, replace
from typing import Any

from train.result import Memory, RunResult, Throughput
from tune.trial.row import TrialRow

RESULT = RunResult(
    outcome="finished", reason="reached 10 steps", steps=10, throughput=None, memory=Memory(None, None, 0, "rss"),
    train_loss=None, val_loss=None, train_tokens=320, val_tokens=64, books_seen=2, train_seconds=2.0,
    first_step_seconds=1.5, data_wait_fraction=None, flops_per_token=2e6, flops_formula="PaLM", flops_per_second=None,
    mfu=None, device="cpu",
    machine="w1", checkpoint=None, data_fingerprint="0" * 64, loss_curve=[],
)  # fmt: skip
ROW, MEMORY = ({field.name for field in fields(kind)} for kind in (TrialRow, Memory))


def trial_row(*identity: Any, **values: Any) -> TrialRow:
    """A row of ``identity``, as of :class:`TrialRow`, with the other ``values`` as :func:`changed` takes them."""
    own = {name: values.pop(name) for name in [*values] if name in ROW}
    return changed(TrialRow(*identity, **own), **values)


def changed(row: TrialRow, **values: Any) -> TrialRow:
    """``row`` with other values: its own, or of its result and that one's ``memory`` (of the process) and speed, which
    is ``tokens_per_second`` from ``low`` to ``high``, by default within one percent."""
    row = replace(row, **{name: values.pop(name) for name in [*values] if name in ROW})
    if not values or (row.result is None and set(values.values()) == {None}):
        return row
    result = row.result or RESULT
    memory = {name: values.pop(name) for name in [*values] if name in MEMORY}
    memory |= {"process": values.pop("memory") or 0} if "memory" in values else {}
    throughput = result.throughput
    if "tokens_per_second" in values:
        speed, low, high = (values.pop(name, None) for name in ("tokens_per_second", "low", "high"))
        throughput = Throughput(speed, low or 0.99 * speed, high or 1.01 * speed, 7, 3) if speed else None
    elif throughput:
        low, high = values.pop("low", throughput.low), values.pop("high", throughput.high)
        throughput = replace(throughput, low=low, high=high)
    result = replace(result, memory=replace(result.memory, **memory), throughput=throughput, **values)
    return replace(row, result=replace(result, machine=row.node))
