"""A ladder: the runs of its suite in order, each chosen from the rows of the previous runs.

The baseline is the control. It runs again after every rung, because the speed of machines drifts by more than most
rungs gain. To find the next run, the suite is replayed from its beginning up to the first run without a row.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from infra.device.hardware import DeviceInfo
from infra.errors import UserError
from train.config import ResolvedConfig, TrainConfig
from train.data.sources import source_of
from train.estimate.memory import peak_if_known, predict_peak
from train.loop.memory_limit import RESERVED_OUTSIDE_ALLOCATOR
from train.resolved import prepare, resolve
from tune.config import LadderConfig
from tune.experiment.trials import Experiment
from tune.space import Candidate
from tune.suite.batches import RETRIES, TOO_LARGE, largest_batch
from tune.suite.checks import check_baseline_speed, check_single_worker, check_suits_device
from tune.suite.runs import SAME_BATCH, PendingRun, RungResult, SuiteRun
from tune.suite.suites import Changes, Rung, Suite, apply_changes
from tune.trial.row import Proposal, TrialRow
from tune.trial.run import TrialRequest

BASELINE = "baseline"
"""Name of the first control in reports."""


@dataclass(frozen=True)
class Ladder(Experiment):
    """A ladder with all its settings resolved."""

    config: LadderConfig
    """Settings of the ladder."""
    suite: Suite
    """Suite of the ladder, resolved for the device."""

    mlflow_experiment = "ladder"

    def request(
        self, machine: str, number: int, rows: Sequence[TrialRow], running: Sequence[TrialRequest]
    ) -> TrialRequest | None:
        try:
            self.replay_results(rows)
        except PendingRun as pending:
            run = pending.run
            peak = peak_if_known(run.config.step)
            memory = float(peak.total) if peak else None
            proposal = Proposal(Candidate(run.config.batch.micro_batch), run.stage, predicted_memory=memory)
            labels = {"rung": run.name}
            return TrialRequest(run.key, number, run.name, proposal, run.config, machine, self.limit, labels=labels)
        return None

    def is_finished(self, rows: Sequence[TrialRow]) -> bool:
        return self.request("", 0, rows, []) is None

    def remaining(self, rows: Sequence[TrialRow]) -> int:
        return max(0, 1 + 2 * len(self.suite.rungs) - len(rows))  # A control follows each rung.

    def is_reusable(self, row: TrialRow) -> bool:
        """Return whether the run did not fail. A failed run is repeated, because its cause may be gone."""
        return row.outcome != "failed"

    def usable_machines(self, machines: Iterable[str], rows: Sequence[TrialRow]) -> set[str]:
        """Find the machine of the first run, because speeds of different machines cannot be compared."""
        return {name for name in machines if not rows or name == rows[0].node}

    def params(self) -> dict[str, object]:
        return {"suite": self.suite.name, "model": self.training.model.text, "data": str(self.data)}

    def replay_results(self, rows: Sequence[TrialRow]) -> tuple[list[RungResult], list[RungResult]]:
        """Replay the suite up to its end.

        A rung without a speed has a reason, and no control follows it.

        Returns: (controls, rungs), with ``n + 1`` controls around ``n`` rungs that have a speed.

        Raises:
            PendingRun: a run has no row yet.
            UserError: the baseline cannot be measured.
        """
        return SuiteReplay(self, {row.key: row for row in rows}).replay()


@dataclass(frozen=True)
class SuiteReplay:
    """Replays a suite from its beginning, as far as its runs have rows."""

    ladder: Ladder
    """Ladder with the suite."""
    rows: Mapping[str, TrialRow] | None
    """Rows of the runs, by key; None to plan the suite as if every run succeeded."""

    @property
    def device_info(self) -> DeviceInfo:
        """Properties of the device that runs the suite."""
        return self.ladder.machines[0].device

    def replay(self) -> tuple[list[RungResult], list[RungResult]]:
        """Replay the suite; see :meth:`Ladder.replay_results`."""
        suite, memory = self.ladder.suite, self._memory_for_fit()
        config = self._resolve(self.ladder.training.requested, suite.base, memory)
        run = SuiteRun("control-00", BASELINE, config, "baseline")
        baseline, first, memory = self._run_with_smaller_batches(run, memory)
        if first.row:
            check_baseline_speed(first.row, first.reason, fitted=bool(memory))
        controls, rungs = [first], list[RungResult]()
        previous, previous_result = baseline, first
        for number, rung in enumerate(suite.rungs, 1):
            try:
                runs = self._plan(number, rung, previous.config, memory)
            except UserError as mistake:
                rungs.append(RungResult(rung.name, str(mistake).rstrip(".")))
                continue
            for run in runs:
                is_same_batch = run is not runs[-1]
                run, result, reduced_memory = self._run_with_smaller_batches(
                    run, None if is_same_batch else memory, runs[0].config.batch.micro_batch if len(runs) > 1 else 0
                )
                if result.failed_micro_batches:  # Its batch is not the requested one, so its loss may differ.
                    result = replace(result, changes_numerics=True)
                rungs.append(result)
                if result.reason:
                    continue
                label = f"control-{number:02d}{'-same-batch' * is_same_batch}"
                controls.append(self._run_or_pending(replace(baseline, label=label, name="control")))
                if controls[-1].reason:
                    raise UserError(
                        f"The control failed when it ran again after {run.name!r}: {controls[-1].reason}. Check "
                        "the machine, and run the ladder again."
                    )
                rounds_differently = result.changes_numerics or "precision" in rung.changes
                is_equal_work = (
                    run.config.batch.global_batch == previous.config.batch.global_batch
                    and run.config.dataset.source == previous.config.dataset.source
                )
                if suite.seeds > 1 and rounds_differently and is_equal_work and result.row:
                    result = replace(result, held_out=self._held_out((previous, previous_result), (run, result)))
                    rungs[-1] = result
                if suite.cumulative:
                    previous, previous_result, memory = run, result, memory if is_same_batch else reduced_memory
        return controls, rungs

    def _plan(self, number: int, rung: Rung, previous: ResolvedConfig, memory: int | None) -> list[SuiteRun]:
        """Plan the runs of a rung that changes the ``previous`` config: one, or two if its batch is also larger.

        The first of two runs keeps the previous batch. It shows the memory that the change saves and its speed at equal
        work; the second run shows the effect of the larger batch. A rung that sets the micro-batch or the global batch
        runs once, because it measures the batch.

        Raises ``UserError`` if the rung cannot be measured; the message is a reason in the table of results.
        """
        batch = previous.batch
        previous_batch = {"micro_batch": batch.micro_batch, "global_batch": batch.global_batch}
        settings = previous.requested.replace(**previous_batch)
        config = self._resolve(settings, rung.changes, memory)
        changes_only_batch = config.requested.replace(**previous_batch) == settings
        if rung.changes and changes_only_batch and config.batch == batch:
            raise UserError("it changes nothing on this device")
        check_suits_device(rung.changes, config.execution, previous.execution, self.device_info)
        label = f"{number:02d}-" + re.sub(r"[^a-z0-9]+", "-", rung.name.lower()).strip("-")
        is_larger = config.batch.global_batch > batch.global_batch
        changes_numerics = rung.changes_numerics or config.batch.global_batch != batch.global_batch
        runs = [SuiteRun(label, rung.name, config, "rung", changes_numerics)]
        if is_larger and not changes_only_batch and not rung.changes.keys() & previous_batch.keys():
            same_batch = config.replace(**previous_batch)
            label, name = f"{label}-same-batch", rung.name + SAME_BATCH
            runs.insert(0, SuiteRun(label, name, same_batch, "rung", rung.changes_numerics))
        return runs

    def _resolve(self, settings: TrainConfig, changes: Changes, memory: int | None) -> ResolvedConfig:
        """Resolve ``settings`` with ``changes`` for the device of the runs.

        With ``memory`` the config has the largest batch that is predicted to fit in this number of bytes.
        """
        settings = apply_changes(settings, changes)
        if "model" in changes:  # The vocabulary of another model follows the data.
            settings = prepare(settings, self.ladder.manifest)
        check_single_worker(settings.batch.workers)
        config = resolve(settings, self.device_info.with_memory_limit(self.ladder.limit))
        if memory is not None:
            config = replace(config, batch=largest_batch(config.step, memory))
        context_length, cycle = config.model.context_length, config.duration.cycle
        source_of(config.dataset).check_lengths(context_length, cycle, self.ladder.manifest)
        return config

    def _memory_for_fit(self) -> int | None:
        """Return the maximum predicted peak of a rung with ``--fit-batch``, in bytes; None if the suite sets the
        batches."""
        ladder = self.ladder
        if not (ladder.config.fit_batch and ladder.limit):
            return None
        return ladder.limit - (RESERVED_OUTSIDE_ALLOCATOR if ladder.device == "cuda" else 0)

    def _run_with_smaller_batches(
        self, run: SuiteRun, memory: int | None, larger_than: int = 0
    ) -> tuple[SuiteRun, RungResult, int | None]:
        """Find the result of ``run``, or of a run with a smaller batch if a batch that was predicted to fit does not.

        ``memory`` is the maximum predicted peak in bytes, and ``larger_than`` a micro-batch that has already run.

        Returns: (last run, its result, maximum predicted peak in bytes for rungs that are based on it).
        """
        attempt, result = run, self._run_or_pending(run)
        failed: list[int] = []
        while memory and result.row and result.row.outcome in TOO_LARGE and len(failed) < RETRIES:
            failed.append(attempt.config.batch.micro_batch)
            memory = predict_peak(attempt.config.step).total - 1
            try:
                batch = largest_batch(attempt.config.step, memory)
            except UserError:
                break
            if batch.micro_batch <= larger_than:
                break
            config = replace(attempt.config, batch=batch)
            attempt = replace(run, label=f"{run.label}-batch-{batch.micro_batch}", config=config)
            result = self._run_or_pending(attempt)
        micro_batch = attempt.config.batch.micro_batch
        failed_micro_batches = tuple(size for size in failed if size != micro_batch)
        return attempt, replace(result, failed_micro_batches=failed_micro_batches), memory

    def _held_out(self, *runs: tuple[SuiteRun, RungResult]) -> tuple[tuple[float, float], ...]:
        """Find the validation losses (previous rung, rung) with each of the suite's seeds.

        Runs with a seed other than the ladder's have no control, because only their losses are compared.
        """
        losses: list[list[float | None]] = []
        for run, result in runs:
            losses.append([result.val_loss])
            seed = run.config.dataset.seed
            for other_seed in range(seed + 1, seed + self.ladder.suite.seeds):
                label, name = f"{run.label}-seed-{other_seed}", f"{run.name}, seed {other_seed}"
                with_seed = SuiteRun(label, name, run.config.replace(seed=other_seed), "seed")
                losses[-1].append(self._run_or_pending(with_seed).val_loss)
        pairs = zip(*losses, strict=True)
        return tuple((previous, loss) for previous, loss in pairs if previous is not None and loss is not None)

    def _run_or_pending(self, run: SuiteRun) -> RungResult:
        """Find the result of ``run``. Raises ``PendingRun`` if it has no row."""
        if self.rows is None:
            return RungResult(run.name, config=run.config, changes_numerics=run.changes_numerics)
        row = self.rows.get(run.key)
        if row is None:
            raise PendingRun(run)
        reason = "" if row.speed else f"{row.outcome}: {row.reason}" if row.outcome in TOO_LARGE else row.reason
        return RungResult(run.name, reason.rstrip("."), row, run.config, run.changes_numerics)
