"""The runs of a suite: the baseline, a rung, the baseline again, and so on, each with the config that it needs.

The baseline is the control; it is run again after every rung, because machines drift by more than most rungs gain. What
is next follows from the rows alone: the same way is gone through again from the beginning, up to the first run that has
no row.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from infra.errors import UserError
from infra.hardware import DeviceFacts
from infra.units import format_size
from train.config import GPU_KERNELS, SIXTEEN_BITS, TrainConfig
from train.data.source import refuse_short_splits
from train.data.text import with_vocabulary_of
from train.estimate.memory import known_peak, predict_peak
from train.intervals import Estimate
from train.loop.memory_limit import UNMEASURED
from train.model_config import format_model
from train.resolve import resolve
from tune.compare import Difference
from tune.config import SHORTEST, LadderConfig
from tune.experiment import Experiment
from tune.space import Candidate
from tune.suite.suites import Changes, Rung, Suite, apply
from tune.trial.row import Proposal, Stage, TrialRow
from tune.trial.run import Request

SAME_BATCH = ", same batch"
"""Ends the name of a rung's first run, at the batch of the rung before, when one with a larger batch follows."""

TOO_LARGE = ("oom", "over_limit")
"""Outcomes of a run whose batch did not fit."""

RETRIES = 3
"""Smaller batches that are tried after one that was predicted to fit has not."""


class NotRun(Exception):
    """The next run of a ladder, which has no row yet."""

    def __init__(self, key: str, name: str, config: TrainConfig, stage: Stage) -> None:
        super().__init__(key)
        self.key, self.name, self.config = key, name, config
        self.stage: Stage = stage


@dataclass(frozen=True)
class Measured:
    """A rung or a control: its run and, once all have run, how it compares; or the reason why it has no speed."""

    name: str
    reason: str = ""
    """Why it has no speed; empty when it has one."""
    row: TrialRow | None = None
    config: TrainConfig | None = None
    changes_numerics: bool = False
    """Whether its loss may differ from that of the rung before."""
    too_large: tuple[int, ...] = ()
    """Larger micro-batches that were predicted to fit the memory limit, and did not."""
    held_out: tuple[tuple[float, float], ...] = ()
    """Validation losses of the rung before and of this one, for each seed, where seeds are compared."""
    step: Difference | None = None
    """Over the rung before, each relative to the controls around it."""
    total: Difference | None = None
    """Over the baseline."""
    matmul_rate: float | None = None
    """FLOP/s at its precision that the doctor measured on its machine."""
    loss: float | None = None
    """Mean training loss over the last fifth of the tokens that every rung has seen."""

    @property
    def speed(self) -> Estimate | None:
        return self.row and self.row.speed

    @property
    def memory(self) -> int | None:
        return self.row and self.row.memory

    @property
    def batch(self) -> str:
        """Micro-batch, accumulation if any, and in brackets the batch that was predicted to fit and did not."""
        if self.config is None:
            return ""
        size, accumulation = self.config.micro_batch, self.config.accumulation
        return f"{size}{f' x {accumulation}' * (accumulation > 1)}" + "".join(f" ({n})" for n in self.too_large[:1])

    @property
    def ceiling(self) -> float | None:
        """Fraction of the matmul rate that its arithmetic is."""
        flops = self.row and self.row.flops_per_second
        return flops / self.matmul_rate if flops and self.matmul_rate else None


@dataclass(frozen=True)
class Ladder(Experiment):
    """One ladder, with everything decided that its config leaves open."""

    config: LadderConfig
    suite: Suite
    start: TrainConfig
    """What the suite's baseline is derived from."""

    collection = "ladder"

    def request(
        self, machine: str, number: int, rows: Sequence[TrialRow], running: Sequence[Request]
    ) -> Request | None:
        try:
            self.measured(rows)
        except NotRun as run:
            known = known_peak(run.config)
            memory = float(known.total) if known else None
            proposal = Proposal(Candidate(run.config.micro_batch), run.stage, predicted_memory=memory)
            return Request(run.key, number, run.name, proposal, run.config.to_json(), machine, self.limit)
        return None

    def is_finished(self, rows: Sequence[TrialRow]) -> bool:
        return self.request("", 0, rows, []) is None

    def remaining(self, rows: Sequence[TrialRow]) -> int:
        return max(0, 1 + 2 * len(self.suite.rungs) - len(rows))  # a rung is a run and a control

    def is_kept(self, row: TrialRow) -> bool:
        """Unless the run failed: whatever was in its way may be gone."""
        return row.outcome != "failed"

    def usable(self, machines: Iterable[str], rows: Sequence[TrialRow]) -> set[str]:
        """The machine of the first run, which the others are compared with."""
        return {name for name in machines if not rows or name == rows[0].node}

    def params(self) -> dict[str, object]:
        return {"suite": self.suite.name, "model": format_model(self.start.model), "data": str(self.data)}

    def labels(self, row: TrialRow) -> dict[str, str]:
        return {"rung": row.name}

    def measured(self, rows: Sequence[TrialRow]) -> tuple[list[Measured], list[Measured]]:
        """The controls and the rungs: ``n + 1`` controls around ``n`` rungs that have a speed.

        A rung without a speed is in the list with its reason, and no control follows it. Raises ``NotRun`` with the
        next run where there is one, and ``UserError`` when the baseline cannot be measured.
        """
        return Climb(self, {row.key: row for row in rows}.get).to_the_end()


@dataclass(frozen=True)
class Climb:
    """The way through a suite, as far as there are rows."""

    ladder: Ladder
    row_of: Callable[[str], TrialRow | None]
    """The row of a run by its key, if there is one."""

    @property
    def facts(self) -> DeviceFacts:
        return self.ladder.machines[0].device

    def to_the_end(self) -> tuple[list[Measured], list[Measured]]:
        """See :meth:`Ladder.measured`."""
        suite, room = self.ladder.suite, self._room()
        baseline = self._fitted(self._with(self.ladder.start, suite.base), room)
        refuse_several(baseline)
        refuse_short_splits(baseline, self.ladder.manifest)
        first, baseline, room = self._fitting("control-00", Rung("baseline"), baseline, room)
        refuse_short(first, fitted=bool(room))
        controls, before, state = [first], first, baseline
        rungs: list[Measured] = []
        for number, rung in enumerate(suite.rungs, 1):
            try:
                config = self._fitted(self._with(state, rung.changes), room)
                if config == state and rung.changes:
                    raise UserError("here it changes nothing")
                refuse_unsuited(state, config, rung, self.facts)
                refuse_short_splits(config, self.ladder.manifest)
                stages = equal_work_first(rung, state, config)
                for _, each in stages:
                    resolve(each, self.facts)
            except UserError as refused:
                rungs.append(Measured(rung.name, str(refused).rstrip(".")))  # the table ends it
                continue
            for stage, config in stages:
                same_batch = stage.name.endswith(SAME_BATCH)
                place = f"{number:02d}-" + re.sub(r"[^a-z0-9]+", "-", stage.name.lower()).strip("-")
                above = stages[0][1].micro_batch if len(stages) > 1 else 0
                measured, config, left = self._fitting(place, stage, config, None if same_batch else room, above)
                if measured.too_large:  # so that its batch is another than that of the rung before
                    measured = replace(measured, changes_numerics=True)
                rungs.append(measured)
                if measured.speed is None:
                    continue
                control = f"control-{number:02d}{'-same-batch' * same_batch}"
                controls.append(self._measure(control, Rung("control"), baseline))
                if controls[-1].speed is None:
                    raise UserError(f"the control could not be run again after {stage.name!r}: {controls[-1].reason}.")
                other_sums = measured.changes_numerics or "precision" in stage.changes
                equal_work = config.global_batch == state.global_batch and config.stream == state.stream
                if suite.seeds > 1 and other_sums and equal_work:
                    rungs[-1] = replace(measured, held_out=self._held_out((before, state), (measured, config)))
                if suite.cumulative:
                    before, state, room = rungs[-1], config, room if same_batch else left
        return controls, rungs

    def _held_out(self, *runs: tuple[Measured, TrainConfig]) -> tuple[tuple[float, float], ...]:
        """Validation losses of the rung before and of a rung, with each of the suite's seeds.

        Runs with another seed than the ladder's have no control: only their losses count.
        """
        losses: list[list[float | None]] = []
        for measured, config in runs:
            assert measured.row is not None, "it has a speed"
            losses.append([measured.row.val_loss])
            for seed in range(config.seed + 1, config.seed + self.ladder.suite.seeds):
                place = f"{measured.row.key.rpartition('-')[0]}-seed-{seed}"
                label = Rung(f"{measured.name}, seed {seed}")
                seeded = self._measure(place, label, replace(config, seed=seed), "seed")
                losses[-1].append(seeded.row and seeded.row.val_loss)
        return tuple((one, other) for one, other in zip(*losses, strict=True) if one is not None and other is not None)

    def _room(self) -> int | None:
        """Bytes that a rung's predicted peak may take; None when batches are the suite's."""
        ladder = self.ladder
        if not (ladder.config.fit and ladder.limit):
            return None
        return ladder.limit - (UNMEASURED if ladder.device == "cuda" else 0)

    def _with(self, config: TrainConfig, changes: Changes) -> TrainConfig:
        """``config`` with ``changes``; a model that they name follows the vocabulary of the data."""
        changed = apply(config, changes)
        return with_vocabulary_of(changed, self.ladder.manifest) if "model" in changes else changed

    def _fitted(self, config: TrainConfig, room: int | None) -> TrainConfig:
        if room is None:
            decided = resolve(config, self.facts.within(self.ladder.limit))
            return replace(config, micro_batch=decided.micro_batch)
        fitted = largest_batch(resolve(config, self.facts), room)
        return replace(config, micro_batch=fitted.micro_batch, global_batch=fitted.global_batch)

    def _fitting(
        self, place: str, rung: Rung, config: TrainConfig, room: int | None, above: int = 0
    ) -> tuple[Measured, TrainConfig, int | None]:
        """Run ``config`` and, where it was given the batch that was predicted to fit ``room`` and does not, a smaller
        one ``above`` a batch that has been run.

        Returns the last run, its config, and the room for what is based on it: predictions below the one that failed.
        """
        measured = self._measure(place, rung, config)
        failed: list[TrainConfig] = []
        while room and measured.row and measured.row.outcome in TOO_LARGE and len(failed) < RETRIES:
            failed.append(config)
            room = predict_peak(resolve(config, self.facts)).total - 1
            try:
                config = self._fitted(config, room)
            except UserError:
                break
            if config.micro_batch <= above:
                break
            measured = self._measure(f"{place}-batch-{config.micro_batch}", rung, config)
        ran = measured.config.micro_batch if measured.config else 0
        sizes = tuple(each.micro_batch for each in failed if each.micro_batch != ran)
        return replace(measured, too_large=sizes), config, room

    def _measure(self, place: str, rung: Rung, config: TrainConfig, stage: Stage | None = None) -> Measured:
        """The run of ``config`` at ``place``. Raises ``NotRun`` when it has no row."""
        config = resolve(config, self.facts)
        key = f"{place}-{hashlib.sha256(json.dumps(config.to_json()).encode()).hexdigest()[:8]}"
        row = self.row_of(key)
        if row is None:
            usual: Stage = "baseline" if place.startswith("control") else "rung"
            raise NotRun(key, rung.name, config, stage or usual)
        reason = "" if row.speed else f"{row.outcome}: {row.reason}" if row.outcome in TOO_LARGE else row.reason
        return Measured(rung.name, reason.rstrip("."), row, config, rung.changes_numerics)


def refuse_several(config: TrainConfig) -> None:
    if config.workers > 1:
        raise UserError(f"a ladder measures one device, and this needs {config.workers} workers")


def refuse_unsuited(before: TrainConfig, config: TrainConfig, rung: Rung, facts: DeviceFacts) -> None:
    """Raise ``UserError`` when ``config`` cannot show on this device what the rung changes of ``before``."""
    refuse_several(config)
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


def refuse_short(baseline: Measured, *, fitted: bool = False) -> None:
    """Raise ``UserError`` when the baseline failed, or was too short for a speed.

    ``fitted`` is whether smaller batches have been tried already.
    """
    row = baseline.row
    assert row is not None, "it has been run"
    steps = row.step_seconds
    if row.too_short or (row.speed and len(steps) < SHORTEST):
        seconds = sum(steps[1:]) / (len(steps) - 1) if len(steps) > 1 else sum(steps)
        raise UserError(
            f"{len(steps)} steps in {sum(steps[1:]):.1f}s are too few to leave warm-up: a rung needs {SHORTEST} steps, "
            f"here --time-budget {math.ceil(SHORTEST * seconds)}s or more."
        )
    if not row.speed:
        step = ""
        if row.outcome in TOO_LARGE:
            step = (
                f" {RETRIES} smaller batches did not fit either: give a larger --memory-limit or a smaller --model."
                if fitted
                else " Give --fit and --memory-limit for the largest batch that fits."
            )
        raise UserError(f"the baseline cannot be run: {baseline.reason}.{step}")
