"""What a search measured and predicted for a config, and the diagnosis of a slower run with this config.

A cause is only reported if the measurements of the run and of the search's trials show it.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from statistics import fmean
from typing import Any, NamedTuple

from infra.device.telemetry import THROTTLE_BITS
from infra.errors import UserError
from infra.schema import from_json, strict
from infra.storage.directory import StorageDir
from train.config import Compile, OptimizationConfig, TrainConfig, config_from_json
from train.config.step import StepConfig
from train.intervals import Difference, Estimate
from train.result import Diagnosis, LossPrediction, RunResult

SPEED_SETTINGS = (
    "stream", "model", "global_batch", "optimizer", "clip_norm", "mask_books", "micro_batch", "precision", "attention",
    "compile", "checkpointing", "loss", "loss_chunks", "fp8", "device", "workers", "fsdp", "loader_threads", "ablate",
    "accelerator", "allocator", "offload_optimizer", "deterministic",
)  # fmt: skip
"""Settings on which the speed depends."""

LOSS_SETTINGS = (*(each.name for each in fields(OptimizationConfig)), "time_budget", "steps", "tokens")
"""Further settings on which the loss at the end of a run depends."""

MIN_EXPLAINED_FRACTION = 0.25
"""Minimum fraction of the missing speed that a cause must explain, if its effect can be computed."""

BUSY_CPU_PERCENT = 90.0
"""Minimum CPU usage of a machine at which processes wait for cores."""

THROTTLED_PERCENT = 5.0
"""Minimum percentage of the time that a GPU is throttled for throttling to count as a cause."""

FIRST_STEPS = 2
"""Number of steps in which allocator retries are normal: the first compiles, the second has new optimizer state."""

OTHER_PROCESS_BYTES = 2e9
"""Minimum GPU memory of other processes for them to count as a cause; the driver alone uses less."""


@strict
@dataclass(frozen=True)
class MeasuredSpeed:
    """Speed of a candidate that did not win."""

    changes: dict[str, Any]
    """Values of the speed settings that differ from the winner's, as in ``best.json``."""
    tokens_per_second: float
    """Speed in tokens/s."""
    speed_low: float
    """Lower end of the 95% confidence interval of the speed."""
    speed_high: float
    """Upper end of the 95% confidence interval of the speed."""


@strict
@dataclass(frozen=True)
class SearchReference:
    """The measurements of the winner of a search or ladder, which ``best.json`` stores under ``measured``."""

    name: str
    """Name of the search or ladder."""
    tokens_per_second: float
    """Speed of the winner in tokens/s."""
    speed_low: float
    """Lower end of the 95% confidence interval of the speed, in tokens/s."""
    speed_high: float
    """Upper end of the speed's 95% confidence interval."""
    memory_bytes: int | None
    """Peak memory of the process, in bytes."""
    runs: int
    """Number of runs on which the speed is based."""
    tied_with: list[str]
    """Labels of the candidates that may be as fast as the winner."""
    device: str
    """Name of the device."""
    machines: list[str]
    """Names of the machines on which the winner ran."""
    data_wait_fraction: float | None
    """Fraction of a step in which the loop waits for a batch; None if it was not measured."""
    telemetry: dict[str, float]
    """Averages of the machines' telemetry, by metric."""
    loss_prediction: LossPrediction | None = None
    """Predicted loss at the end of the run; None of a search for the fastest configuration."""
    other_speeds: list[MeasuredSpeed] = field(default_factory=list)
    """Speeds of the other candidates, which a search for the lowest loss does not measure again."""

    @property
    def speed(self) -> Estimate:
        """The speed in tokens/s with its 95% interval."""
        return Estimate(self.tokens_per_second, self.speed_low, self.speed_high)

    @classmethod
    def of(cls, name: str, speed: Estimate, memory: int | None, results: Sequence[RunResult]) -> "SearchReference":
        """Create the reference by the pooled ``speed``, peak ``memory`` and ``results`` of the runs of the winner."""
        waits = [result.data_wait_fraction for result in results if result.data_wait_fraction is not None]
        averages = [result.telemetry for result in results if result.telemetry]
        return cls(
            name, *speed, memory, len(results), [], results[0].device,
            sorted({result.machine for result in results}), fmean(waits) if waits else None,
            {metric: fmean(values[metric] for values in averages if metric in values) for metric in chain(*averages)},
        )  # fmt: skip

    def with_speeds(self, winner: StepConfig, others: Iterable[tuple[StepConfig, Estimate]]) -> "SearchReference":
        """Return the reference with the speeds of the ``others``, of which ``winner`` was the best."""
        own = winner.to_json()
        speeds: list[MeasuredSpeed] = []
        for config, speed in others:
            values = config.to_json()
            changes = {name: values[name] for name in SPEED_SETTINGS if values[name] != own[name]}
            speeds.append(MeasuredSpeed(changes, *speed))
        return replace(self, other_speeds=speeds)


class Cause(NamedTuple):
    """A possible cause of a slow run."""

    is_evident: bool
    """Whether the measurements show the cause."""
    text: str
    """The measured values as a text."""


def read_search_reference(file: str, settings: Mapping[str, Any]) -> SearchReference | None:
    """Read the measurements in a search's ``file``; None without them, or if a speed setting differs.

    The predicted loss is left out if a setting differs on which the loss depends.
    """
    stored = _read(file)
    if stored is None:
        return None
    best_config, reference = stored
    differences = {name for name in SPEED_SETTINGS + LOSS_SETTINGS if best_config.setting(name) != settings[name]}
    if differences.intersection(SPEED_SETTINGS):
        return None
    return replace(reference, loss_prediction=None) if differences else reference


def read_measured_speeds(file: str, device: str, configs: Iterable[StepConfig]) -> list[Estimate | None]:
    """Read the speed of each of the ``configs`` that a search measured on this ``device`` and stored in its ``file``.

    It is None for a config that the search did not measure.
    """
    stored = _read(file)
    if stored is None or stored[1].device != device:
        return [None for _ in configs]
    best_config, reference = stored
    own = best_config.to_json()
    measured = [(own, reference.speed)] + [
        (own | other.changes, Estimate(other.tokens_per_second, other.speed_low, other.speed_high))
        for other in reference.other_speeds
    ]

    def speed(wanted: dict[str, Any]) -> Estimate | None:
        return next((e for values, e in measured if all(values[n] == wanted[n] for n in SPEED_SETTINGS)), None)

    return [speed(config.to_json()) for config in configs]


def _read(file: str) -> tuple[TrainConfig, SearchReference] | None:
    """Read the winner's config and the measurements in a search's ``file``; None if it has none."""
    path = StorageDir.of(file)
    try:
        content = path.parent.read(path.name)
    except OSError:
        return None
    try:
        values = json.loads(content)
        return config_from_json(values["config"], file), from_json(SearchReference, values["measured"], file)
    except (ValueError, UserError, KeyError, TypeError):
        return None


def diagnose_slowdown(result: RunResult, reference: SearchReference, compile: Compile) -> Diagnosis | None:
    """Diagnose a run that is slower than ``reference``; None if it is not slower."""
    run = result.throughput
    difference = run and Difference.between(run.estimate, reference.speed)
    if difference is None or difference.ratio >= 1 or not difference.is_significant:
        return None
    slowdown = 1 - difference.ratio
    rows = [("speed", f"{slowdown:.1%} slower than the search {reference.name} measured: {reference.speed} tokens/s")]
    checks = list(_checks(result, reference, slowdown))
    causes = [check.text for check in checks if check.is_evident]
    if causes:
        return Diagnosis([*rows, *(("likely cause", text) for text in causes)])
    text = f"unknown. Checked: {'; '.join(check.text for check in checks) or 'nothing, because nothing was recorded'}"
    if compile != "off":  # torch has no documented counter of recompilations.
        text += ". Recompilations are not recorded; set TORCH_LOGS=recompiles to print them"
    return Diagnosis([*rows, ("likely cause", text)])


def _checks(result: RunResult, reference: SearchReference, slowdown: float) -> Iterator[Cause]:
    """Yield all possible causes that were measured; ``slowdown`` is the fraction by which the run is slower."""
    if result.device != reference.device:
        yield Cause(True, f"ran on {result.device} (search: {reference.device})")
    elif result.machine not in reference.machines:
        yield Cause(True, f"ran on {result.machine} (search: {', '.join(reference.machines)})")
    min_effect = MIN_EXPLAINED_FRACTION * slowdown
    if result.data_wait_fraction is not None:
        wait, search_wait = result.data_wait_fraction, reference.data_wait_fraction
        text = f"waited for data {wait:.1%} of the time{_in_search(search_wait, '.1%')}"
        yield Cause(wait - (search_wait or 0.0) >= min_effect, text)
    telemetry, search_telemetry = result.telemetry, reference.telemetry
    if clock := telemetry.get("system/gpu_sm_clock_mhz"):
        search_clock = search_telemetry.get("system/gpu_sm_clock_mhz")
        throttled = {cause: telemetry.get(f"system/gpu_throttled_by_{cause}_percent", 0.0) for cause in THROTTLE_BITS}
        text = f"GPU clock {clock:,.0f} MHz{_in_search(search_clock, ',.0f', ' MHz')}"
        text += "".join(
            f", throttled by {cause} {percent:.0f}% of the time" for cause, percent in throttled.items() if percent
        )
        # The power limit also lowers the clock of a healthy GPU; heat does not.
        is_faulty = max(throttled["heat"], throttled["hardware"]) >= THROTTLED_PERCENT
        yield Cause(1 - clock / search_clock >= min_effect if search_clock else is_faulty, text)
    cores, search_cores = _cores_of_other_processes(telemetry), _cores_of_other_processes(search_telemetry)
    if cores is not None:
        count, cpu_percent = telemetry["system/processors"], telemetry["system/machine_cpu_percent"]
        text = f"other processes used {cores:.1f} of {count:.0f} CPU cores{_in_search(search_cores, '.1f')}"
        increase = (cores - search_cores) / count if search_cores is not None else 0.0
        yield Cause(cpu_percent >= BUSY_CPU_PERCENT and increase >= min_effect, text)
    if gpu_memory := telemetry.get("system/gpu_memory_gb"):
        other_memory = max(0.0, gpu_memory * 1e9 - result.memory.process)
        text = f"other processes used {other_memory / 1e9:.2f} GB of the GPU's memory"
        yield Cause(other_memory >= OTHER_PROCESS_BYTES, text)
    if result.memory.allocated is not None:
        retries, steps = result.memory.allocator_retries, result.steps
        # A retry is assumed to cost a step. A search does not count retries in the first steps either.
        is_frequent = retries > FIRST_STEPS and retries / steps >= min_effect
        yield Cause(is_frequent, f"torch's allocator freed its cache {retries} times in {steps:,} steps")


def _cores_of_other_processes(telemetry: Mapping[str, float]) -> float | None:
    """Average number of cores that processes other than the worker used; None if it was not measured."""
    names = ("system/machine_cpu_percent", "system/processors", "system/worker_cpu_percent")
    if any(name not in telemetry for name in names):
        return None
    machine, count, worker = (telemetry[name] for name in names)
    return max(0.0, (machine * count - worker) / 100)


def _in_search(value: float | None, form: str, unit: str = "") -> str:
    return "" if value is None else f" (search: {value:{form}}{unit})"
