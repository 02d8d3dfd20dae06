"""The runs of a suite: the baseline, a rung, the baseline again, and so on, each with its config.

The baseline is the control. It runs again after every rung, because the speed of machines drifts by more than most
rungs gain. The rows alone determine the next run: the suite is replayed from its beginning up to the first run without
a row.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from infra.cli.units import format_size
from infra.device.hardware import DeviceInfo
from infra.errors import UserError
from train.config import GPU_KERNELS, HALF_PRECISIONS, ResolvedConfig, TrainConfig
from train.data.sources import source_of
from train.estimate.memory import peak_if_known, predict_peak
from train.intervals import Estimate
from train.loop.memory_limit import RESERVED_OUTSIDE_ALLOCATOR
from train.resolved import prepare, resolve
from tune.config import SHORTEST, LadderConfig
from tune.experiment.trials import Experiment
from tune.space import Candidate
from tune.suite.suites import Changes, Rung, Suite, apply_changes
from tune.trial.compare import Difference
from tune.trial.row import Proposal, Stage, TrialRow
from tune.trial.run import TrialRequest

SAME_BATCH = ", same batch"
"""Suffix of a rung's first run, at the batch of the previous rung, if a run with a larger batch follows."""

TOO_LARGE = ("oom", "over_limit")
"""Outcomes of a run whose batch did not fit."""

RETRIES = 3
"""Maximum number of smaller batches that are tried after a batch that was predicted to fit did not."""


class PendingRun(Exception):
    """The next run of a ladder, which has no row yet."""

    def __init__(self, key: str, name: str, config: ResolvedConfig, stage: Stage) -> None:
        super().__init__(key)
        self.key, self.name, self.config = key, name, config
        self.stage: Stage = stage


@dataclass(frozen=True)
class RungResult:
    """A rung or a control with its run and, once all have run, its comparison; or the reason why it has no speed."""

    name: str
    reason: str = ""
    """Reason why the rung has no speed; empty if it has one."""
    row: TrialRow | None = None
    config: ResolvedConfig | None = None
    changes_numerics: bool = False
    """Whether the loss may differ from the loss of the previous rung."""
    failed_micro_batches: tuple[int, ...] = ()
    """Larger micro-batches that were predicted to fit the memory limit and did not."""
    held_out: tuple[tuple[float, float], ...] = ()
    """Validation losses (previous rung, this rung) for each seed, if seeds are compared."""
    step: Difference | None = None
    """Speedup over the previous rung; both are relative to the controls around them."""
    total: Difference | None = None
    """Speedup over the baseline."""
    matmul_rate: float | None = None
    """FLOP/s of matrix products at the rung's precision, measured by infra.doctor on the rung's machine."""
    loss: float | None = None
    """Mean training loss over the last fifth of the tokens that every rung has seen."""

    @property
    def speed(self) -> Estimate | None:
        return self.row and self.row.speed

    @property
    def memory(self) -> int | None:
        return self.row and self.row.memory

    @property
    def val_loss(self) -> float | None:
        return self.row and self.row.result and self.row.result.val_loss

    @property
    def batch(self) -> str:
        """Micro-batch, accumulation above 1, and in brackets the batch that was predicted to fit and did not."""
        if self.config is None:
            return ""
        size, accumulation = self.config.batch.micro_batch, self.config.batch.accumulation
        return f"{size}{f' x {accumulation}' * (accumulation > 1)}" + "".join(
            f" ({n})" for n in self.failed_micro_batches[:1]
        )

    @property
    def ceiling(self) -> float | None:
        """Model FLOP/s as a fraction of the measured matmul rate."""
        flops = self.row and self.row.result and self.row.result.flops_per_second
        return flops / self.matmul_rate if flops and self.matmul_rate else None


@dataclass(frozen=True)
class Ladder(Experiment):
    """One ladder with all its settings resolved."""

    config: LadderConfig
    suite: Suite
    start: TrainConfig
    """The run from which the suite's baseline is derived."""

    mlflow_experiment = "ladder"

    def request(
        self, machine: str, number: int, rows: Sequence[TrialRow], running: Sequence[TrialRequest]
    ) -> TrialRequest | None:
        try:
            self.replay_results(rows)
        except PendingRun as run:
            peak = peak_if_known(run.config)
            memory = float(peak.total) if peak else None
            proposal = Proposal(Candidate(run.config.batch.micro_batch), run.stage, predicted_memory=memory)
            return TrialRequest(run.key, number, run.name, proposal, run.config.to_json(), machine, self.limit)
        return None

    def is_finished(self, rows: Sequence[TrialRow]) -> bool:
        return self.request("", 0, rows, []) is None

    def remaining(self, rows: Sequence[TrialRow]) -> int:
        return max(0, 1 + 2 * len(self.suite.rungs) - len(rows))  # A control follows each rung.

    def is_reusable(self, row: TrialRow) -> bool:
        """Whether the run did not fail. A failed one runs again, because its cause may be gone."""
        return row.outcome != "failed"

    def usable_machines(self, machines: Iterable[str], rows: Sequence[TrialRow]) -> set[str]:
        """The machine of the first run only, because speeds of different machines cannot be compared."""
        return {name for name in machines if not rows or name == rows[0].node}

    def params(self) -> dict[str, object]:
        return {"suite": self.suite.name, "model": self.start.model.text, "data": str(self.data)}

    def extra_columns(self, row: TrialRow) -> dict[str, str]:
        return {"rung": row.name}

    def replay_results(self, rows: Sequence[TrialRow]) -> tuple[list[RungResult], list[RungResult]]:
        """Returns: (controls, rungs), with ``n + 1`` controls around ``n`` rungs that have a speed.

        A rung without a speed has its reason, and no control follows it.

        Raises:
            NotRun: a run has no row yet.
            UserError: the baseline cannot be measured.
        """
        return SuiteReplay(self, {row.key: row for row in rows}).replay()


@dataclass(frozen=True)
class SuiteReplay:
    """Replays a suite from its beginning, as far as its runs have rows."""

    ladder: Ladder
    rows: Mapping[str, TrialRow] | None
    """The rows of the runs by key; None to plan the suite as if every run succeeded."""

    @property
    def device_info(self) -> DeviceInfo:
        return self.ladder.machines[0].device

    def replay(self) -> tuple[list[RungResult], list[RungResult]]:
        """Returns and raises as :meth:`Ladder.replay_results`."""
        suite, memory = self.ladder.suite, self._memory_for_fit()
        baseline = self._fitted(self._with(self.ladder.start, suite.base), memory)
        check_single_worker(baseline.batch.workers)
        source_of(baseline.dataset).check_lengths(
            baseline.model.context_length, baseline.duration.cycle, self.ladder.manifest
        )
        first, baseline, memory = self._run_with_smaller_batches("control-00", Rung("baseline"), baseline, memory)
        if first.row:
            check_baseline_speed(first.row, first.reason, fitted=bool(memory))
        controls, previous, state = [first], first, baseline
        rungs: list[RungResult] = []
        for number, rung in enumerate(suite.rungs, 1):
            try:
                config = self._fitted(self._with(state, rung.changes), memory)
                if config == state and rung.changes:
                    raise UserError("it changes nothing on this device")
                check_suits_device(state, config, rung, self.device_info)
                source_of(config.dataset).check_lengths(
                    config.model.context_length, config.duration.cycle, self.ladder.manifest
                )
                stages = equal_work_first(rung, state, config)
                for _, each in stages:
                    resolve(each, self.device_info)
            except UserError as mistake:
                rungs.append(RungResult(rung.name, str(mistake).rstrip(".")))
                continue
            for stage, config in stages:
                same_batch = stage.name.endswith(SAME_BATCH)
                label = f"{number:02d}-" + re.sub(r"[^a-z0-9]+", "-", stage.name.lower()).strip("-")
                larger_than = resolve(stages[0][1], self.device_info).batch.micro_batch if len(stages) > 1 else 0
                result, config, reduced_memory = self._run_with_smaller_batches(
                    label, stage, config, None if same_batch else memory, larger_than
                )
                if result.failed_micro_batches:  # Its batch is not the requested one, so its loss may differ.
                    result = replace(result, changes_numerics=True)
                rungs.append(result)
                if result.reason:
                    continue
                control = f"control-{number:02d}{'-same-batch' * same_batch}"
                controls.append(self._run_or_pending(control, Rung("control"), baseline))
                if controls[-1].reason:
                    raise UserError(
                        f"The control failed when it ran again after {stage.name!r}: {controls[-1].reason}. Check "
                        "the machine, and run the ladder again."
                    )
                rounds_differently = result.changes_numerics or "precision" in stage.changes
                equal_work = (
                    config.batch.global_batch == state.batch.global_batch
                    and config.dataset.source == state.dataset.source
                )
                if suite.seeds > 1 and rounds_differently and equal_work and result.row:
                    rungs[-1] = replace(result, held_out=self._held_out((previous, state), (result, config)))
                if suite.cumulative:
                    previous, state, memory = rungs[-1], config, memory if same_batch else reduced_memory
        return controls, rungs

    def _held_out(self, *runs: tuple[RungResult, TrainConfig]) -> tuple[tuple[float, float], ...]:
        """Validation losses of the previous rung and of a rung with each of the suite's seeds.

        Runs with a seed other than the ladder's have no control, because only their losses are used.
        """
        losses: list[list[float | None]] = []
        for result, config in runs:
            assert result.row is not None, "a rung with a speed has a row"
            losses.append([result.val_loss])
            for seed in range(config.dataset.seed + 1, config.dataset.seed + self.ladder.suite.seeds):
                label = f"{result.row.key.rpartition('-')[0]}-seed-{seed}"
                rung = Rung(f"{result.name}, seed {seed}")
                with_seed = self._run_or_pending(label, rung, config.replace(seed=seed), "seed")
                losses[-1].append(with_seed.val_loss)
        pairs = zip(*losses, strict=True)
        return tuple((previous, loss) for previous, loss in pairs if previous is not None and loss is not None)

    def _memory_for_fit(self) -> int | None:
        """Bytes that a rung's predicted peak may take with ``--fit-batch``; None if the suite sets the batches."""
        ladder = self.ladder
        if not (ladder.config.fit_batch and ladder.limit):
            return None
        return ladder.limit - (RESERVED_OUTSIDE_ALLOCATOR if ladder.device == "cuda" else 0)

    def _with(self, config: TrainConfig, changes: Changes) -> TrainConfig:
        """``config`` with ``changes``; if they name a model, its vocabulary follows the data."""
        changed = apply_changes(config, changes)
        return prepare(changed, self.ladder.manifest) if "model" in changes else changed

    def _fitted(self, config: TrainConfig, memory: int | None) -> TrainConfig:
        """``config`` with its micro-batch resolved, or with the largest batch that is predicted to fit ``memory``."""
        if memory is None:
            resolved = resolve(config, self.device_info.with_memory_limit(self.ladder.limit))
            return config.replace(micro_batch=resolved.batch.micro_batch)
        fitted = largest_batch(resolve(config, self.device_info), memory)
        return config.replace(micro_batch=fitted.batch.micro_batch, global_batch=fitted.batch.global_batch)

    def _run_with_smaller_batches(
        self, label: str, rung: Rung, config: TrainConfig, memory: int | None, larger_than: int = 0
    ) -> tuple[RungResult, TrainConfig, int | None]:
        """Run ``config``, and again with smaller batches while one that was predicted to fit ``memory`` does not.

        ``larger_than`` is a micro-batch that has already run.

        Returns: (the last run, its config, bytes that predictions for the rungs based on it must stay below).
        """
        result = self._run_or_pending(label, rung, config)
        failed: list[int] = []
        while memory and result.row and result.row.outcome in TOO_LARGE and len(failed) < RETRIES:
            resolved = resolve(config, self.device_info)
            failed.append(resolved.batch.micro_batch)
            memory = predict_peak(resolved).total - 1
            try:
                config = self._fitted(config, memory)
            except UserError:
                break
            micro_batch = resolve(config, self.device_info).batch.micro_batch
            if micro_batch <= larger_than:
                break
            result = self._run_or_pending(f"{label}-batch-{micro_batch}", rung, config)
        last_micro_batch = result.config.batch.micro_batch if result.config else 0
        failed_micro_batches = tuple(micro_batch for micro_batch in failed if micro_batch != last_micro_batch)
        return replace(result, failed_micro_batches=failed_micro_batches), config, memory

    def _run_or_pending(self, label: str, rung: Rung, config: TrainConfig, stage: Stage | None = None) -> RungResult:
        """The result of the run of ``config`` with this ``label``. Raises ``PendingRun`` if it has no row."""
        resolved = resolve(config, self.device_info)
        key = f"{label}-{hashlib.sha256(json.dumps(resolved.to_json()).encode()).hexdigest()[:8]}"
        if self.rows is None:
            return RungResult(rung.name, config=resolved, changes_numerics=rung.changes_numerics)
        row = self.rows.get(key)
        if row is None:
            default: Stage = "baseline" if label.startswith("control") else "rung"
            raise PendingRun(key, rung.name, resolved, stage or default)
        reason = "" if row.speed else f"{row.outcome}: {row.reason}" if row.outcome in TOO_LARGE else row.reason
        return RungResult(rung.name, reason.rstrip("."), row, resolved, rung.changes_numerics)


def check_single_worker(workers: int) -> None:
    if workers > 1:
        raise UserError(f"--workers {workers} is not supported: a ladder measures one device. Use --workers 1.")


def check_suits_device(previous: TrainConfig, config: TrainConfig, rung: Rung, device_info: DeviceInfo) -> None:
    """Raise ``UserError`` if the rung's change from ``previous`` to ``config`` has no effect to measure on the device.

    The messages are reasons in the table of results, so they have neither capital nor period.
    """
    check_single_worker(config.batch.workers)
    if resolve(config, device_info).execution.device == "cuda":
        if set(config.execution.ablate) ^ set(previous.execution.ablate) == {"large-pages"}:
            raise UserError("large pages only apply to CPU memory; torch caches GPU memory itself")
        return
    changed = set(rung.changes)
    if "precision" in changed and config.execution.precision == "tf32":
        raise UserError("TF32 only exists on GPUs; a CPU would compute in fp32")
    if config.execution.precision in HALF_PRECISIONS and not device_info.bf16:
        raise UserError(f"this CPU only emulates {config.execution.precision}, which is far slower than fp32")
    if config.execution.compile in GPU_KERNELS:
        raise UserError(f"--compile {config.execution.compile} tunes GPU kernels")
    if "attention" in changed and config.execution.attention == "auto":
        raise UserError("a CPU has only one fused attention kernel, which is already used")


def equal_work_first(rung: Rung, state: TrainConfig, config: TrainConfig) -> list[tuple[Rung, TrainConfig]]:
    """The runs of a rung that changes ``state`` to ``config``: one, or two if its batch is also larger.

    The first of two keeps the batch of ``state``, and shows the memory that the change saves and the speed that it
    gains at equal work; the second shows what the larger batch adds. A rung that sets the micro-batch or the global
    batch itself runs once, because the batch is what it measures.
    """
    larger = (
        config.batch.global_batch > state.batch.global_batch
        and not {"micro_batch", "global_batch"} & rung.changes.keys()
    )
    same = (
        config.replace(micro_batch=state.batch.micro_batch, global_batch=state.batch.global_batch) if larger else state
    )
    last = replace(
        rung, changes_numerics=rung.changes_numerics or config.batch.global_batch != state.batch.global_batch
    )
    return [(last, config)] if same == state else [(replace(rung, name=rung.name + SAME_BATCH), same), (last, config)]


def largest_batch(config: ResolvedConfig, limit: int) -> ResolvedConfig:
    """``config`` with the largest micro-batch that is predicted to fit ``limit`` bytes; above 8 a multiple of 8.

    The accumulation stays, so the global batch changes. Raises ``UserError`` if not even one sequence fits.
    """

    def sized(size: int) -> ResolvedConfig:
        return config.replace(micro_batch=size, global_batch=size * config.batch.accumulation * config.batch.workers)

    sizes = [*range(1, 8), *range(8, 8193, 8)]
    fitting = 0
    while fitting < len(sizes) and predict_peak(sized(sizes[fitting])).total <= limit:
        fitting += 1
    if not fitting:
        raise UserError(f"--fit-batch: not even one sequence fits {format_size(limit)}. Use a larger --memory-limit.")
    return sized(sizes[fitting - 1])


def check_baseline_speed(row: TrialRow, reason: str, *, fitted: bool = False) -> None:
    """Raise ``UserError`` if the baseline failed, or was too short to measure a speed.

    ``fitted`` is whether smaller batches have been tried already.
    """
    steps = row.step_seconds
    if row.ended_too_early or (row.speed and len(steps) < SHORTEST):
        seconds = sum(steps[1:]) / (len(steps) - 1) if len(steps) > 1 else sum(steps)
        raise UserError(
            f"The baseline made only {len(steps)} steps in {sum(steps[1:]):.1f} s; a rung needs {SHORTEST} to get past "
            f"warm-up. Use --time-budget {math.ceil(SHORTEST * seconds)}s or more."
        )
    if not row.speed:
        advice = "Fix the cause, or choose another --suite."
        if row.outcome in TOO_LARGE and fitted:
            advice = f"{RETRIES} smaller batches did not fit either. Use a larger --memory-limit or a smaller --model."
        elif row.outcome in TOO_LARGE:
            advice = "Use --fit-batch with --memory-limit for the largest batch that fits."
        raise UserError(f"The baseline failed: {reason}. {advice}")
