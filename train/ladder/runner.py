"""Running a suite: the control, a rung, the control again, each a Ray Train run in fresh processes.

In: a :class:`Ladder`. Out: one :class:`Measured` per run, kept in the run's own folder, so that a ladder that was
stopped can be continued. The control is the baseline; it is repeated after every rung, because machines drift by more
than most rungs gain.
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

from rich.markup import escape

from infra.cluster import connected
from infra.errors import UserError, first_line
from infra.hardware import DeviceFacts
from infra.place import WorkingCopy
from infra.schema import from_json, strict, to_json
from infra.storage import write_json
from infra.tracking.key import RunKey
from infra.tracking.store import create_run
from infra.tracking.tracker import Tracker
from infra.units import format_size
from pipeline.shards import Manifest
from train import report
from train.checkpoint.run_folder import RunFolder
from train.config import GPU_KERNELS, SIXTEEN_BITS, TrainConfig, config_from_json
from train.data.source import estimate, stream_of
from train.estimate.memory import predict_peak
from train.intervals import Estimate
from train.ladder.suites import Rung, Suite, apply
from train.launch.driver import measure
from train.launch.run import Run
from train.launch.there import ControllerDied
from train.loop.memory_limit import UNMEASURED
from train.resolve import resolve
from train.result import RunResult

SAME_BATCH = ", same batch"
"""Ends the name of a rung's first run, at the batch of the rung before, when one with a larger batch follows."""

TOO_LARGE = ("oom", "over_limit")
"""Outcomes of a run whose batch did not fit."""

RETRIES = 3
"""Smaller batches that are tried after one that was predicted to fit has not."""

FRESH = "local"
"""The Ray of this machine that rungs share unless a cluster is named: each has a process of its own there."""

SHORTEST = 8
"""Steps that a rung needs: one compiles, three warm up, four are measured."""


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
    changes_numerics: bool = False
    """Whether its loss may differ from that of the rung before."""
    predicted: int | None = None
    """Predicted peak of the process's memory, in bytes."""
    too_large: tuple[int, ...] = ()
    """Larger micro-batches that were predicted to fit the memory limit, and did not."""
    held_out: tuple[tuple[float, float], ...] = ()
    """Validation losses of the rung before and of this one, for each seed, where seeds are compared."""
    gpu: dict[str, float] | None = None
    """What NVML reported meanwhile: the lowest clock, the highest temperature, every throttle reason, the limit."""

    @property
    def speed(self) -> Estimate | None:
        """Tokens per second, if it has a speed."""
        return self.result.throughput.estimate if self.result and self.result.throughput else None


@dataclass(frozen=True)
class Ladder:
    """One ladder: what it runs, where, and how it reports."""

    copy: WorkingCopy
    """Where it writes, and what for."""
    key: RunKey
    """Its run in MLflow, the parent of those of its rungs."""
    suite: Suite
    start: TrainConfig
    """What the suite's baseline is derived from."""
    manifest: Manifest
    facts: DeviceFacts
    """About the device that trains."""
    address: str | None = None
    memory_limit: int | None = None
    """Bytes that the process of a rung may use: one that uses more has no result."""
    fit: bool = False
    """Whether every rung gets the largest batch predicted to fit the limit, after a run at the batch before it."""
    say: Callable[[str], None] = print
    _session: ExitStack = field(default_factory=ExitStack, init=False)
    """Holds the Ray that all rungs share, from the first one that is not kept."""

    @property
    def folder(self) -> Path:
        """The folder on this machine in which it writes."""
        return self.copy.folder

    def run(self) -> tuple[list[Measured], list[Measured]]:
        """The controls and the rungs: ``n + 1`` controls around ``n`` rungs that have a speed.

        A rung without a speed is in the list with its reason, and no control follows it. Raises ``UserError`` when the
        baseline cannot be measured and ``KeyboardInterrupt`` when asked to stop.
        """
        with self._session:
            return self._run()

    def _run(self) -> tuple[list[Measured], list[Measured]]:
        room = self._room()
        baseline = self._fitted(apply(self.start, self.suite.base), room)
        first, baseline, room = self._fitting("control-00", Rung("baseline"), baseline, room)
        refuse_short(first.result, first.reason, fitted=bool(room))
        controls, before, state = [first], first, baseline
        rungs: list[Measured] = []
        for number, rung in enumerate(self.suite.rungs, 1):
            try:
                config = self._fitted(apply(state, rung.changes), room)
                if config == state and rung.changes:
                    raise UserError("here it changes nothing")
                refuse_unsuited(state, config, rung, self.facts)
                stages = equal_work_first(rung, state, config)
            except UserError as refused:
                reason = str(refused).rstrip(".")  # the table ends it
                self.say(f"[yellow]{escape(rung.name)}[/yellow]: not run, {escape(reason)}")
                rungs.append(Measured(rung.name, "", dict(rung.changes), reason=reason))
                continue
            for stage, config in stages:
                slug = re.sub(r"[^a-z0-9]+", "-", stage.name.lower()).strip("-")
                folder = f"{number:02d}-{slug}"
                if stage.name.endswith(SAME_BATCH):
                    measured, left = self._measure(folder, stage, config), room
                else:
                    above = stages[0][1].micro_batch if len(stages) > 1 else 0
                    measured, config, left = self._fitting(folder, stage, config, room, above)
                    if measured.too_large:  # so that its batch is another than that of the rung before
                        measured = replace(measured, changes_numerics=True)
                rungs.append(measured)
                if measured.speed is None:
                    continue
                control = f"control-{number:02d}{'-same-batch' * stage.name.endswith(SAME_BATCH)}"
                controls.append(self._measure(control, Rung("control"), baseline))
                if controls[-1].speed is None:
                    raise UserError(f"the control could not be run again after {stage.name!r}: {controls[-1].reason}.")
                other_sums = measured.changes_numerics or "precision" in stage.changes
                equal_work = config.global_batch == state.global_batch and config.stream == state.stream
                if self.suite.seeds > 1 and other_sums and equal_work:
                    rungs[-1] = replace(rungs[-1], held_out=self._held_out((before, state), (rungs[-1], config)))
                if self.suite.cumulative:
                    before, state, room = rungs[-1], config, left
        return controls, rungs

    def _held_out(
        self, before: tuple[Measured, TrainConfig], rung: tuple[Measured, TrainConfig]
    ) -> tuple[tuple[float, float], ...]:
        """Validation losses of the rung before and of ``rung``, with each of the suite's seeds.

        Runs with another seed than the ladder's have no control: only their losses count.
        """
        losses: list[list[float | None]] = []
        for measured, config in (before, rung):
            runs = [measured]
            for number in range(1, self.suite.seeds):
                label = Rung(f"{measured.name}, seed {config.seed + number}")
                seeded = replace(config, seed=config.seed + number)
                runs.append(self._measure(f"{measured.folder}-seed-{seeded.seed}", label, seeded))
            losses.append([run.result.val_loss if run.result else None for run in runs])
        return tuple((one, other) for one, other in zip(*losses, strict=True) if one is not None and other is not None)

    def _room(self) -> int | None:
        """Bytes that a rung's predicted peak may take; None when batches are the suite's."""
        if not (self.fit and self.memory_limit):
            return None
        return self.memory_limit - (UNMEASURED if resolve(self.start, self.facts).device == "cuda" else 0)

    def _fitted(self, config: TrainConfig, room: int | None) -> TrainConfig:
        if room is None:
            return config
        fitted = largest_batch(resolve(config, self.facts), room)
        return replace(config, micro_batch=fitted.micro_batch, global_batch=fitted.global_batch)

    def _fitting(
        self, name: str, rung: Rung, config: TrainConfig, room: int | None, above: int = 0
    ) -> tuple[Measured, TrainConfig, int | None]:
        """Run ``config`` and, where it was given the batch that was predicted to fit ``room`` and does not, a smaller
        one ``above`` a batch that has been run.

        Returns the last run, its config, and the room for what is based on it: predictions below the one that failed.
        """
        measured = self._measure(name, rung, config)
        failed: list[TrainConfig] = []
        while room and measured.reason.startswith(TOO_LARGE) and len(failed) < RETRIES:
            failed.append(config)
            room = predict_peak(resolve(config, self.facts)).total - 1
            try:
                config = self._fitted(config, room)
            except UserError:
                break
            if config.micro_batch <= above:
                break
            self.say(f"  a batch of {failed[-1].micro_batch} does not fit as predicted; trying {config.micro_batch}")
            measured = self._measure(f"{name}-batch-{config.micro_batch}", rung, config)
        sizes = tuple(each.micro_batch for each in failed if each.micro_batch != measured.config["micro_batch"])
        return replace(measured, too_large=sizes), config, room

    def _measure(self, name: str, rung: Rung, config: TrainConfig) -> Measured:
        """Run ``config`` in the folder ``name``, unless the result of exactly this config is there."""
        home = self._home(name)
        kept = home.path / "rung.json"
        found = _kept(kept, config)
        if found is not None:
            self.say(f"[dim]{escape(rung.name)}: kept from {name}[/dim]")
            report.complete(home)
            return found
        WorkingCopy(home.place, home.path).discard()
        self.say(f"[bold]{escape(rung.name)}[/bold]")
        result, reason, gpu = self._train(name, rung, config)
        if reason:
            self.say(f"[yellow]{escape(rung.name)}[/yellow]: {escape(reason)}")
        measured = Measured(
            rung.name, name, config.to_json(), result, reason, rung.changes_numerics,
            predict_peak(resolve(config, self.facts)).total, gpu=gpu,
        )  # fmt: skip
        write_json(kept, to_json(measured))
        home.send(kept)
        return measured

    def _home(self, name: str) -> RunFolder:
        """The folder of one of its runs."""
        return RunFolder(self.folder / name, self.copy.place / name if self.copy.place.remote else None)

    def _train(
        self, name: str, rung: Rung, config: TrainConfig
    ) -> tuple[RunResult | None, str, dict[str, float] | None]:
        """The result, why there is none or none with a speed, and what NVML said of the GPU."""
        self._session.enter_context(connected(self.address or FRESH))  # or refused, with no child left open
        home = self._home(name)
        home.path.mkdir(parents=True)
        tags = {"kind": "control" if name.startswith("control") else "rung", "rung": rung.name}
        key = create_run("ladder", f"{self.folder.name}/{name}", parent=self.key, tags=tags, keep=home.keep_key)
        write_json(home.config, config.to_json())
        home.send(home.config)
        result, reason, gpu = None, "", None
        with Tracker(key) as tracker:
            resolved = resolve(config, self.facts)
            stream = stream_of(config) if config.stream else None
            manifest = estimate(stream) if stream else self.manifest
            report.record_start(tracker, resolved, manifest, config)
            run = Run(config, manifest, home, None, self.memory_limit, self.address or FRESH, stream)
            try:
                result, gpu = measure(
                    run, resolved, tracker, lambda line: self.say(f"  {line}"), self.copy.place.parent
                )
                if result.outcome == "interrupted":
                    raise KeyboardInterrupt
                if result.outcome != "finished":
                    result, reason = None, f"{result.outcome}: {result.reason}"
                elif result.throughput is None:
                    reason = f"{result.steps} steps are too few to leave warm-up: give it more time or steps"
            except (KeyboardInterrupt, ControllerDied):
                shutil.rmtree(home.path, ignore_errors=True)
                raise
            except UserError as refused:
                result, reason = None, worker_reason(refused)
            except Exception as failure:  # noqa: BLE001 one rung's failure is a row of the table, not the ladder's end
                result, reason = None, worker_reason(failure)
                text = home.path / "failure.txt"
                text.write_text("".join(traceback.format_exception(failure)), encoding="utf-8")
                home.send(text)
            tracker.tags({"reason": reason} if reason else {})
            tracker.status = "FINISHED" if result else "FAILED"
        return result, reason, gpu


def _kept(path: Path, config: TrainConfig) -> Measured | None:
    """What ``path`` holds of an earlier run of exactly this ``config``; None when there is none, or a damaged one."""
    try:
        found = from_json(Measured, json.loads(path.read_text(encoding="utf-8")), path)
        same = config_from_json(found.config, str(path)) == config
        return found if same and found.speed is not None else None
    except (OSError, ValueError):
        return None


def has_begun(folder: Path) -> bool:
    """Whether a run in the ladder's ``folder`` has trained, or has left the traceback of a failure."""
    return any(path.name in ("cycles.jsonl", "failure.txt") for path in folder.glob("*/*"))


def worker_reason(failure: Exception) -> str:
    """Why a run failed: the last line of a traceback, without the full stop that the table adds."""
    lines = str(failure).strip().splitlines()
    return (lines[-1] if lines else first_line(failure)).rstrip(".")


def refuse_unsuited(before: TrainConfig, config: TrainConfig, rung: Rung, facts: DeviceFacts) -> None:
    """Raise ``UserError`` when ``config`` cannot show on this device what the rung changes of ``before``."""
    if resolve(config, facts).device == "cuda":
        if set(config.ablate) ^ set(before.ablate) == {"pages"}:
            raise UserError("large pages are for CPU memory; torch caches a GPU's by itself")
        return
    changed = set(rung.changes)
    if "precision" in changed and config.precision == "tf32":
        raise UserError("TF32 is for GPUs; a CPU computes the same fp32")
    if config.precision in SIXTEEN_BITS and not facts.bf16:
        raise UserError(f"this CPU emulates {config.precision}, many times slower than fp32")
    if config.compile in GPU_KERNELS:
        raise UserError(f"{config.compile} tries GPU kernels")
    if config.compile != "off" and not any(map(shutil.which, ("g++", "clang++", "c++"))):
        raise UserError("torch.compile needs a C++ compiler on a CPU and there is none")
    if "attention" in changed and config.attention == "auto":
        raise UserError("a CPU has one fused attention kernel, which is already used")


def equal_work_first(rung: Rung, state: TrainConfig, config: TrainConfig) -> list[tuple[Rung, TrainConfig]]:
    """The runs of a rung that makes ``state`` into ``config``: one, or two where it also comes with a larger batch.

    The first of two keeps the batch of ``state``: it shows the memory that the change frees and the speed that it gains
    at equal work; the second shows what the larger batch adds. A rung that sets the micro-batch or the global batch by
    name is about just that, and is run once.
    """
    larger = config.global_batch > state.global_batch and not {"micro_batch", "global_batch"} & rung.changes.keys()
    same = replace(config, micro_batch=state.micro_batch, global_batch=state.global_batch) if larger else state
    last = replace(rung, changes_numerics=rung.changes_numerics or config.global_batch != state.global_batch)
    return [(last, config)] if same == state else [(replace(rung, name=rung.name + SAME_BATCH), same), (last, config)]


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


def refuse_short(run: RunResult | None, reason: str, *, fitted: bool = False) -> None:
    """Raise ``UserError`` when the baseline failed for ``reason``, or was too short for a speed.

    ``fitted`` is whether smaller batches have been tried already.
    """
    if run is None:
        step = ""
        if reason.startswith(TOO_LARGE):
            step = (
                f" {RETRIES} smaller batches did not fit either: give a larger --memory-limit or a smaller --model."
                if fitted
                else " Give --fit and --memory-limit for the largest batch that fits."
            )
        raise UserError(f"the baseline cannot be run: {reason}.{step}")
    if run.throughput is None or run.steps < SHORTEST:
        step = run.seconds / (run.steps - 1) if run.steps > 1 else run.first_step_seconds or 0.0
        raise UserError(
            f"{run.steps} steps in {run.seconds:.1f}s are too few to leave warm-up: a rung needs {SHORTEST} steps, "
            f"here --time-budget {math.ceil(SHORTEST * step)}s or more."
        )
