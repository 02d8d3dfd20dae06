"""The speed that a search confirmed for a config, and why a run with it is slower.

A cause is named only where what was recorded of the run, compared with what the search recorded of its trials, shows
it.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from infra.errors import UserError
from infra.storage_dir import StorageDir
from infra.telemetry import THROTTLED
from train.config import TrainConfig, config_from_json
from train.intervals import Estimate
from train.result import Diagnosis, RunResult

SAME = (
    "stream", "model", "global_batch", "optimizer", "clip_norm", "mask_books", "micro_batch", "precision", "attention",
    "compile", "checkpointing", "loss", "loss_chunks", "fp8", "device", "workers", "shard", "loader_workers", "ablate",
    "accelerator", "allocator",
)  # fmt: skip
"""Settings on which the speed depends."""

SHARE = 0.25
"""Of the missing speed that a cause must account for, where its effect has a formula."""

BUSY = 90.0
"""Percent of a machine's processors that are in use when processes wait for them."""

OFTEN = 5.0
"""Percent of the time that a GPU must be too hot to count."""

FIRST_STEPS = 2
"""Steps in which the allocator finds its sizes: one compiles, the next is the first with the optimizer's state."""

NEIGHBOUR = 2e9
"""Bytes of a GPU that other processes hold; the driver itself takes less."""


@dataclass(frozen=True)
class Confirmed:
    """What a search found of its winner."""

    name: str
    """Of the search."""
    speed: Estimate
    device: str
    machines: tuple[str, ...]
    data_wait_fraction: float | None
    telemetry: Mapping[str, float]


class Cause(NamedTuple):
    """One possible cause: whether the records show it, and what they say."""

    shown: bool
    text: str


def confirmed_by(file: str, config: TrainConfig) -> Confirmed | None:
    """What the search that left ``file`` found; None when no search has, or ``config`` is executed in another way."""
    where = StorageDir.of(file)
    try:
        content = where.parent.read(where.name)
    except OSError:
        return None
    try:
        values = json.loads(content)
        searched, measured = config_from_json(values["config"], str(file)), values["measured"]
        confirmed = Confirmed(
            name=where.parent.name,
            speed=Estimate(measured["tokens_per_second"], measured["low"], measured["high"]),
            device=measured["device"],
            machines=tuple(measured["machines"]),
            data_wait_fraction=measured["data_wait_fraction"],
            telemetry=measured["telemetry"],
        )
    except (ValueError, UserError, KeyError, TypeError):
        return None
    same = all(getattr(searched, name) == getattr(config, name) for name in SAME)
    return confirmed if same else None


def slower(result: RunResult, confirmed: Confirmed, config: TrainConfig) -> Diagnosis | None:
    """That the run of ``config`` is slower than ``confirmed``, with the causes that its records show; else None."""
    run = result.throughput
    if run is None or run.high >= confirmed.speed.low:
        return None
    missing = 1 - run.tokens_per_second / confirmed.speed.middle
    rows = [
        (
            "speed",
            f"slower by {missing:.1%} than the search {confirmed.name} found: {confirmed.speed.middle:,.0f} tokens/s "
            f"(95%: {confirmed.speed.low:,.0f} to {confirmed.speed.high:,.0f})",
        )
    ]
    checks = list(_checks(result, confirmed, missing))
    causes = [check.text for check in checks if check.shown]
    if causes:
        return Diagnosis([*rows, *(("likely cause", text) for text in causes)])
    recorded = "; ".join(check.text for check in checks) or "nothing"
    if config.compile != "off":  # torch has no documented count of it
        recorded += ". Whether it compiled again is not recorded: with TORCH_LOGS=recompiles torch prints that"
    return Diagnosis([*rows, ("likely cause", f"none found in what was recorded: {recorded}")])


def _checks(result: RunResult, confirmed: Confirmed, missing: float) -> Iterator[Cause]:
    """Every cause about which something was recorded."""
    if result.device != confirmed.device:
        yield Cause(True, f"it ran on {result.device}, the search on {confirmed.device}")
    elif result.machine not in confirmed.machines:
        yield Cause(True, f"it ran on {result.machine}, the search on {', '.join(confirmed.machines)}")
    if result.data_wait_fraction is not None:
        wait, usual = result.data_wait_fraction, confirmed.data_wait_fraction
        text = f"it waited for data in {wait:.1%} of the time"
        yield Cause(wait - (usual or 0.0) >= SHARE * missing, text + _in_search(usual, ".1%"))
    now, then = result.telemetry, confirmed.telemetry
    if clock := now.get("system/gpu_sm_clock_mhz"):
        usual = then.get("system/gpu_sm_clock_mhz")
        slowed = {cause: now.get(f"system/gpu_throttled_by_{cause}_percent", 0.0) for cause in THROTTLED}
        text = f"the GPU's clock was {clock:,.0f} MHz{_in_search(usual, ',.0f')}"
        text += "".join(f", lowered by {cause} in {share:.0f}% of the time" for cause, share in slowed.items() if share)
        # The power limit lowers a healthy GPU's clock too; heat does not.
        faulty = max(slowed["heat"], slowed["hardware"]) >= OFTEN
        yield Cause(1 - clock / usual >= SHARE * missing if usual else faulty, text)
    others, usual = _others(now), _others(then)
    if others is not None:
        count, busy = now["system/processors"], now["system/machine_cpu_percent"]
        text = f"other processes used {others:.1f} of the machine's {count:.0f} processors"
        more = (others - usual) / count if usual is not None else 0.0
        yield Cause(busy >= BUSY and more >= SHARE * missing, text + _in_search(usual, ".1f"))
    if held := now.get("system/gpu_memory_gb"):
        foreign = max(0.0, held * 1e9 - result.memory.process)
        yield Cause(foreign >= NEIGHBOUR, f"other processes held {foreign / 1e9:.2f} GB of the GPU's memory")
    if result.memory.allocated is not None:
        retries, steps = result.memory.allocator_retries, result.steps
        # As if each took as long as a step; a search takes no notice of those in the first steps either.
        often = retries > FIRST_STEPS and retries / steps >= SHARE * missing
        yield Cause(often, f"torch's allocator had to free its cache {retries} times in {steps:,} steps")


def _others(telemetry: Mapping[str, float]) -> float | None:
    """Processors that other processes than the worker used."""
    names = ("system/machine_cpu_percent", "system/processors", "system/worker_cpu_percent")
    if any(name not in telemetry for name in names):
        return None
    machine, count, worker = (telemetry[name] for name in names)
    return max(0.0, (machine * count - worker) / 100)


def _in_search(usual: float | None, form: str) -> str:
    return "" if usual is None else f" ({usual:{form}} in the search)"
