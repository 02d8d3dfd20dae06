"""Running a suite: the control, a rung, the control again, every one a Ray Train run in fresh processes.

In: a suite and the config to start from. Out: one :class:`Measured` a run, kept in the run's own folder,
so that a ladder that was stopped goes on where it was. The control is the baseline; it is run again
after every rung, because machines drift by more than most rungs gain.
"""

import json
import math
import re
import shutil
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from infra.cluster import connected
from infra.command import escape
from infra.errors import UserError, first_line
from infra.gpu import GpuWatch
from infra.hardware import DeviceFacts, device_facts
from infra.schema import from_json, strict, to_json
from infra.storage import write_json
from infra.tracking.key import RunKey
from infra.tracking.store import create_run
from infra.tracking.tracker import Tracker
from infra.units import format_size
from pipeline.shards import read_manifest
from train import report
from train.checkpoint.run_folder import RunFolder
from train.config import SIXTEEN_BITS, TrainConfig
from train.estimate.flops import with_matmul_efficiency
from train.estimate.memory import predict_peak
from train.intervals import Estimate
from train.ladder.suites import Rung, Suite, apply
from train.launch import driver
from train.loop.memory_limit import UNMEASURED
from train.resolve import resolve
from train.result import RunResult

SHORTEST = 8
"""Steps that a rung must have: one compiles, three warm up, four are measured."""


class Interrupted(Exception):
    """The user stopped the ladder; what was finished is kept."""


@strict
@dataclass(frozen=True)
class Measured:
    """A rung or a control that was run, or the reason why it was not."""

    name: str
    folder: str
    config: dict[str, Any]
    result: RunResult | None = None
    reason: str = ""
    """Why there is no result; empty when there is one."""
    new_mathematics: bool = False
    predicted: int | None = None
    """Peak bytes of the process that the formula expected."""
    gpu: dict[str, float] | None = None
    """What NVML said while it ran: the lowest clock, the highest temperature, every throttle reason, the limit."""

    @property
    def speed(self) -> Estimate | None:
        """Tokens per second, if it has a speed."""
        return self.result.throughput.estimate if self.result and self.result.throughput else None


@dataclass(frozen=True)
class Climb:
    """Where a ladder runs and what it tells."""

    folder: Path
    parent: RunKey
    session: ExitStack
    """Where the Ray that all rungs share is entered, with the first that must be run."""
    address: str | None = None
    memory_limit: int | None = None
    """Bytes that the process of a rung may use: one that uses more has no result."""
    fit: bool = False
    """Whether every rung's batch is the largest predicted to fit the limit."""
    say: Callable[[str], None] = print
    facts: DeviceFacts = field(default_factory=device_facts)

    def run(self, suite: Suite, base: TrainConfig) -> tuple[list[Measured], list[Measured]]:
        """The controls and the rungs of ``suite``: ``n + 1`` controls around ``n`` rungs that were measured.

        Rungs without a speed stand in the list with their reason, with no control behind them. Raises
        ``UserError`` when the baseline cannot be measured and :class:`Interrupted` when asked to stop.
        """
        baseline = self._fitted(apply(base, suite.base))
        controls = [self._measure("control", Rung("baseline"), baseline, 0)]
        refuse_short(controls[0].result, controls[0].reason)
        rungs: list[Measured] = []
        state = baseline
        for number, rung in enumerate(suite.rungs, 1):
            try:
                config = self._fitted(apply(state, rung.changes))
                if config == state and rung.changes:
                    raise UserError("here it changes nothing")
                refuse_unsuited(state, config, rung, self.facts)
            except UserError as refused:
                reason = str(refused).rstrip(".")  # the table ends it
                self.say(f"[yellow]{escape(rung.name)}[/yellow]: not run, {escape(reason)}")
                rungs.append(Measured(rung.name, "", rung_json(rung), reason=reason))
                continue
            if config.global_batch != state.global_batch:
                rung = replace(rung, new_mathematics=True)
            measured = self._measure(f"{number:02d}", rung, config, number)
            rungs.append(measured)
            if measured.speed is None:
                continue
            state = config if suite.climbs else state
            controls.append(self._measure("control", Rung("control"), baseline, number))
            if controls[-1].speed is None:
                raise UserError(f"the control could not be run again after {rung.name!r}: {controls[-1].reason}.")
        return controls, rungs

    def _fitted(self, config: TrainConfig) -> TrainConfig:
        if not (self.fit and self.memory_limit):
            return config
        config = resolve(config, self.facts)
        return largest_batch(config, self.memory_limit - (UNMEASURED if config.device == "cuda" else 0))

    def _measure(self, prefix: str, rung: Rung, config: TrainConfig, number: int) -> Measured:
        """Run ``config`` unless its folder holds the result of just this config."""
        slug = re.sub(r"[^a-z0-9]+", "-", rung.name.lower()).strip("-")
        name = f"{prefix}-{number:02d}" if prefix == "control" else f"{prefix}-{slug}"
        folder = self.folder / name
        kept = folder / "rung.json"
        found = _kept(kept, config)
        if found is not None:
            self.say(f"[dim]{escape(rung.name)}: kept from {name}[/dim]")
            return found
        left = RunFolder(folder).key()
        if left and not kept.exists():  # its ladder was killed before it could say how the run ended
            with Tracker(left) as tracker:
                tracker.finish("KILLED")
        shutil.rmtree(folder, ignore_errors=True)
        self.say(f"[bold]{escape(rung.name)}[/bold]")
        watch = GpuWatch()
        result, reason = self._train(name, rung, config, folder, watch)
        measured = Measured(
            rung.name, name, config.to_json(), result, reason, rung.new_mathematics,
            predict_peak(resolve(config, self.facts)).total, watch.seen,
        )  # fmt: skip
        write_json(kept, to_json(measured))
        return measured

    def _train(
        self, name: str, rung: Rung, config: TrainConfig, folder: Path, watch: GpuWatch
    ) -> tuple[RunResult | None, str]:
        manifest = read_manifest(config.data)
        self.session.enter_context(connected(self.address, prestart=False))  # or refused, with no child left open
        tags = {"kind": "control" if name.startswith("control") else "rung", "rung": rung.name}
        folder.mkdir(parents=True)
        key = create_run(
            "ladder", f"{self.folder.name}/{name}", parent=self.parent, tags=tags, keep=RunFolder(folder).keep_key
        )
        write_json(folder / "config.json", config.to_json())
        result, reason, status = None, "", "FAILED"
        with Tracker(key) as tracker:
            try:
                resolved = resolve(config, self.facts)
                report.record_start(tracker, resolved, manifest)
                result = driver.run(
                    resolved, folder, asked=config, tracker=tracker, memory_limit=self.memory_limit,
                    address=self.address, on_cycle=lambda cycle: self._cycle(cycle, watch),
                )  # fmt: skip
                result = with_matmul_efficiency(result, resolved, self.folder.parent)
                report.record_end(tracker, resolved, result, watch.seen)
                if result.outcome == "interrupted":
                    status = "KILLED"
                    raise Interrupted
                if result.outcome != "finished":
                    result, reason = None, f"{result.outcome}: {result.reason}"
                else:
                    status = "FINISHED"
                    if result.throughput is None:
                        reason = f"{result.steps} steps are too few to leave warm-up: give it more time or steps"
            except (Interrupted, driver.ControllerDied):
                shutil.rmtree(folder, ignore_errors=True)
                raise
            except KeyboardInterrupt:
                status = "KILLED"
                shutil.rmtree(folder, ignore_errors=True)
                raise
            except UserError as refused:
                result, reason = None, worker_reason(refused)
            except Exception as failure:  # noqa: BLE001 one rung's failure is a row of the table, not the ladder's end
                result, reason = None, worker_reason(failure)
                (folder / "failure.txt").write_text("".join(traceback.format_exception(failure)), encoding="utf-8")
            finally:
                tracker.tags({"reason": reason} if reason else {})
                tracker.finish(status)
        if reason:
            self.say(f"[yellow]{escape(rung.name)}[/yellow]: {escape(reason)}")
        return result, reason

    def _cycle(self, cycle: dict[str, Any], watch: GpuWatch) -> None:
        watch.look()
        self.say(f"  {cycle['line']}")


def _kept(path: Path, config: TrainConfig) -> Measured | None:
    """What ``path`` holds of an earlier run of just this ``config``; None when there is none, or a damaged one."""
    try:
        found = from_json(Measured, json.loads(path.read_text(encoding="utf-8")), path)
        same = found.config == json.loads(json.dumps(config.to_json()))
        return found if same and found.speed is not None else None
    except (OSError, ValueError):
        return None


def has_begun(folder: Path) -> bool:
    """Whether a run in the ladder's ``folder`` trained, or failed in a way that is to be looked into there."""
    return any(path.name in ("cycles.jsonl", "failure.txt") for path in folder.glob("*/*"))


def worker_reason(failure: Exception) -> str:
    """One line that says why a run failed, the last of a traceback, without the full stop that the table gives it."""
    lines = str(failure).strip().splitlines()
    return (lines[-1] if lines else first_line(failure)).rstrip(".")


def rung_json(rung: Rung) -> dict[str, Any]:
    """A rung's changes as JSON values, for one that never became a config."""
    return dict(rung.changes)


def refuse_unsuited(before: TrainConfig, config: TrainConfig, rung: Rung, facts: DeviceFacts) -> None:
    """Raise ``UserError`` when ``config`` instead of ``before`` says nothing about the rung on this device."""
    if resolve(config, facts).device == "cuda":
        if set(config.naive) ^ set(before.naive) == {"pages"}:
            raise UserError("the pages are a CPU's; torch keeps a GPU's memory by itself")
        return
    changed = set(rung.changes)
    if "precision" in changed and config.precision == "tf32":
        raise UserError("TF32 is a GPU's; a CPU computes the same fp32")
    if config.precision in SIXTEEN_BITS and not facts.bf16:
        raise UserError(f"this CPU emulates {config.precision}, many times slower than fp32")
    if config.compile == "max-autotune":
        raise UserError("max-autotune tries GPU kernels")
    if config.compile != "off" and not any(map(shutil.which, ("g++", "clang++", "c++"))):
        raise UserError("torch.compile needs a C++ compiler on a CPU and there is none")
    if "attention" in changed and config.attention == "auto":
        raise UserError("a CPU has one fused attention kernel, the one it used before")


def largest_batch(config: TrainConfig, limit: int) -> TrainConfig:
    """``config`` with the largest micro-batch predicted to fit ``limit`` bytes, multiples of 8 from 8 on.

    The accumulation stays, so the global batch follows. Raises ``UserError`` when one sequence does not fit.
    """

    def sized(size: int) -> TrainConfig:
        return replace(config, micro_batch=size, global_batch=size * config.accumulation * config.workers)

    sizes = [*range(1, 8), *range(8, 8193, 8)]
    fitting = 0
    while fitting < len(sizes) and predict_peak(sized(sizes[fitting])).total <= limit:
        fitting += 1
    if not fitting:
        raise UserError(f"not even one sequence fits --memory-limit {format_size(limit)}")
    return sized(sizes[fitting - 1])


def refuse_short(run: RunResult | None, reason: str) -> None:
    """Raise ``UserError`` when the baseline failed for ``reason``, or ended before its speed could settle."""
    if run is None:
        large = reason.startswith(("oom", "over_limit"))
        step = " Give --fit and --memory-limit for the largest batch that fits." if large else ""
        raise UserError(f"the baseline cannot be run: {reason}.{step}")
    if run.throughput is None or run.steps < SHORTEST:
        step = run.seconds / (run.steps - 1) if run.steps > 1 else run.first_step_seconds or 0.0
        raise UserError(
            f"{run.steps} steps in {run.seconds:.1f}s are too few to leave warm-up: a rung needs {SHORTEST} steps, "
            f"here --time-budget {math.ceil(SHORTEST * step)}s or more."
        )


def cycles(folder: Path) -> list[dict[str, Any]]:
    """The cycles that a run left in its folder, oldest first."""
    path = RunFolder(folder).cycles
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
