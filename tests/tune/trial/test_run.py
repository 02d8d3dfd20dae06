"""One trial in this process: its row is on disk, whatever became of it, and its speed counts tokens rightly."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from trainers import make_trainer

from infra.errors import UserError
from train.config import Cycle, Execution, Precision, ResolvedConfig
from train.launch.link import CycleDone
from train.loop.memory_limit import MemoryLimit
from train.loop.result_builder import StepTimes
from train.loop.throughput import steady_state
from train.model_config import ModelConfig
from train.result import CycleReport, MemorySource, RunResult
from tune.space import Candidate
from tune.trial import early_stop
from tune.trial.row import Proposal, TrialOutcome, TrialRow, read_rows, write_row
from tune.trial.run import (
    StopRule,
    TrialMonitor,
    TrialRequest,
    as_trial_result,
    classify_outcome,
    make_row,
    run,
    unmeasured_row,
)


@pytest.fixture(scope="module")
def training(small_shards: Path, small_model: ModelConfig) -> ResolvedConfig:
    return ResolvedConfig.of(data=str(small_shards), model=small_model, global_batch=8, micro_batch=4, device="cpu")


def attempt(training: ResolvedConfig, folder: Path, *, limit: float = 8e9, steps: int = 20) -> TrialRow:
    folder.mkdir(exist_ok=True)
    proposal = Proposal(Candidate(training.batch.micro_batch), "probe")
    trial = training.replace(steps=steps, cycle=Cycle(1, 0))
    row, trace = run(TrialRequest("m1", 1, "m4", proposal, trial, "here", int(limit), StopRule(60.0, 0.001)))
    assert trace is None, "a traceback is for our bugs"
    write_row(folder, row)
    assert read_rows(folder) == [row]
    return row


def test_a_trial_keeps_what_its_machine_did(training: ResolvedConfig, tmp_path: Path) -> None:
    """Once a second: of a trial of seconds."""
    result = attempt(training, tmp_path, steps=800).result
    assert result
    telemetry = result.telemetry
    assert telemetry["system/worker_memory_gb"] > 0.05
    assert telemetry["system/processors"] >= 1


def test_too_much_memory_is_an_outcome(training: ResolvedConfig, tmp_path: Path) -> None:
    row = attempt(training, tmp_path, limit=1e6)
    assert row.outcome == "over_limit"
    assert len(row.step_seconds) < 20
    assert row.memory
    assert row.memory > 1e6


@pytest.mark.parametrize(("bar", "verdict"), [(200.0, "cannot win"), (99.0, "")])
def test_a_trial_that_cannot_win_stops(eight_steps: RunResult, bar: float, verdict: str) -> None:
    """A step of 100 tokens takes a second here."""
    watch = watched([], retries=[], bar=bar)
    for seconds in [9.0, *[0.99, 1.01] * 9]:
        watch.seconds.append(seconds)
        if watch.should_stop():
            break
    assert watch.verdict == verdict
    if verdict:
        assert len(watch.seconds) < 12
        assert judged(eight_steps, watch)[0] == "pruned"
        assert judged(eight_steps, watch)[1].startswith("cannot reach 200 tokens/s after ")


def test_a_failure_is_an_outcome(training: ResolvedConfig, tmp_path: Path) -> None:
    row = attempt(training.replace(data=str(tmp_path / "nowhere")), tmp_path / "rows")
    assert row.outcome == "failed"
    assert "nowhere" in row.reason


def test_running_out_of_memory_is_an_outcome(
    training: ResolvedConfig, make_shards: Callable[..., Path], tmp_path: Path
) -> None:
    """T x T matrices of 140 TB, more than a process has addresses for: refused as a GPU refuses what is too large."""
    data = make_shards(tmp_path / "data", tokens=400_000)
    long = replace(training.model, context_length=2**21, heads=8, width=8)
    config = training.replace(data=str(data), model=long, attention="manual", micro_batch=1, global_batch=1)
    row = attempt(config, tmp_path / "rows")
    assert (row.outcome, row.speed) == ("oom", None)
    assert "memory" in row.reason


def test_running_out_of_memory_while_the_model_is_built_is_an_outcome(training: ResolvedConfig, tmp_path: Path) -> None:
    """Its embedding would take more than a process has addresses for."""
    vast = replace(training.model, padded_vocab_size=2**31, width=2**19)
    row = attempt(training.replace(model=vast), tmp_path)
    assert (row.outcome, row.step_seconds) == ("oom", [])
    assert "memory" in row.reason


def test_exactly_the_limit_is_within_it(eight_steps: RunResult) -> None:
    @dataclass(frozen=True)
    class Told(MemoryLimit):
        """A limit on a process of known size."""

        peak: int = 0

        def used(self) -> tuple[int, MemorySource]:
            return self.peak, "rss"

    for peak, verdict, outcome in ((10**9, "", "ok"), (10**9 + 1, "over the limit", "over_limit")):
        watch = watched([1.0] * 8, retries=[0] * 9)
        watch.limit = Told(10**9, torch.device("cpu"), 0, peak)
        assert judged(eight_steps, watch)[0] == outcome
        watch.seconds = []
        watch.should_stop()
        assert watch.verdict == verdict


def test_a_run_that_diverged_failed_whatever_it_measured(eight_steps: RunResult) -> None:
    watch = watched([1.0] * 8, retries=[0] * 9)
    diverged = replace(eight_steps, outcome="diverged", reason="the loss is nan")
    assert judged(diverged, watch) == ("failed", "the loss is nan")


def test_an_impossible_speed_fails_its_trial_which_is_not_repeated(
    training: ResolvedConfig, eight_steps: RunResult
) -> None:
    watch = watched([1.0] * 8, retries=[0] * 9)
    impossible = replace(eight_steps, implausible_reason="1,088% of the peak", throughput=None)
    for followed, outcome in ((watch, judged(impossible, watch)), (None, judged(impossible))):
        assert outcome == ("failed", "1,088% of the peak")
        row = measured_row(training, impossible, followed)
        assert row.result
        assert (row.outcome, row.speed, row.result.mfu, row.ended_too_early) == ("failed", None, None, False)


@pytest.mark.parametrize("verdict", ["time", ""])
def test_only_a_trial_whose_time_ended_it_was_too_short(
    training: ResolvedConfig, eight_steps: RunResult, verdict: str
) -> None:
    """A search repeats such a trial with more time, which would not help one that ran all its steps."""
    watch = watched([9.0, 1.0], retries=[0] * 3)
    watch.verdict = verdict
    outcome, reason = judged(eight_steps, watch)
    assert outcome == "failed"
    assert ("--trial-time" in reason) == (verdict == "time")
    assert measured_row(training, eight_steps, watch).ended_too_early == (verdict == "time")


def test_compilation_is_what_the_first_step_took_longer(training: ResolvedConfig, eight_steps: RunResult) -> None:
    watch = watched([9.0, *[2.0] * 7], retries=[0] * 9)
    row = measured_row(training, eight_steps, watch)
    assert row.compile_seconds == pytest.approx(7.0)
    assert row.tokens_per_second == training.step_tokens / 2
    assert (row.number, row.stage, row.candidate) == (1, "probe", Candidate(1))


def test_the_first_step_which_compiles_does_not_count_against_the_trials_time() -> None:
    watch = watched([], retries=[])
    assert not watch.should_stop(), "no step has ended"
    began = CycleReport(
        step=1, batches=1, train_loss=5.0, val_loss=None, train_tokens=100, val_tokens=0, books_seen=0,
        cycle_seconds=900.0, train_seconds=900.0, data_wait_seconds=0.0, optimizer_seconds=0.0, elapsed=900.0,
        cycle_tokens=100,
        epoch_seconds=1.0, learning_rate=1e-3, gradient_norm=1.0,
    )  # fmt: skip
    watch.post(CycleDone(vars(began)))
    assert not watch.should_stop()
    watch.started_at -= 59.0
    assert not watch.should_stop()
    watch.post(CycleDone(vars(began)))  # the second step does not begin the time anew
    watch.started_at -= 1.0
    assert watch.should_stop()
    assert watch.verdict == "time"


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_utilisation_is_of_one_device_at_the_trials_precision(
    training: ResolvedConfig, eight_steps: RunResult, precision: Precision
) -> None:
    on_gpu = replace(eight_steps, device="NVIDIA A100-SXM4-80GB")
    watch = watched([1.0] * 8, retries=[0] * 9)
    row = measured_row(training.replace(precision=precision), on_gpu, watch)
    peak = {"fp32": 19.5e12, "tf32": 156e12, "bf16": 312e12}[precision]
    assert row.result
    assert row.result.mfu == pytest.approx(row.tokens_per_second * cast(ModelConfig, training.model).palm_flops / peak)


def test_a_damaged_row_is_named(training: ResolvedConfig, tmp_path: Path) -> None:
    attempt(training, tmp_path)
    (tmp_path / "m1.json").write_text('{"key": "m1"')
    with pytest.raises(UserError, match=r"m1\.json is corrupt .* Delete it"):
        read_rows(tmp_path)


@pytest.fixture(scope="module")
def eight_steps(training: ResolvedConfig) -> RunResult:
    return make_trainer(training.replace(steps=8)).run()


def judged(result: RunResult, watch: TrialMonitor | None = None) -> tuple[TrialOutcome, str]:
    """The outcome and the reason of a trial that ended with ``result``."""
    return classify_outcome(as_trial_result(result, ModelConfig(), Execution(), watch, None), watch)


def measured_row(config: ResolvedConfig, result: RunResult, watch: TrialMonitor | None = None) -> TrialRow:
    """The row of such a trial."""
    if watch:
        watch.step_tokens = config.step_tokens
    result = as_trial_result(result, config.model, config.execution, watch, None)
    return make_row(row_of(*classify_outcome(result, watch)), config.step_tokens, result, watch, StepTimes())


def row_of(outcome: TrialOutcome = "ok", reason: str = "") -> TrialRow:
    """The row of a trial of which nothing else is known."""
    config = ResolvedConfig.of(micro_batch=1, global_batch=1)
    request = TrialRequest("m1", 1, "m1", Proposal(Candidate(1), "probe"), config, "here")
    return unmeasured_row(request, outcome, reason, 0.0)


def watched(steps: Sequence[float], *, retries: Sequence[int], bar: float | None = None) -> TrialMonitor:
    """A trial of these steps, with the allocator's retries after the launch of each and at the end."""
    watch = TrialMonitor(StopRule(60.0, 0.001), bar, step_tokens=100, limit=MemoryLimit(10**12, torch.device("cpu"), 0))
    watch.seconds = list(steps)
    watch.retries = list(retries)
    return watch


def test_a_step_in_which_the_allocator_freed_its_cache_is_left_out(eight_steps: RunResult) -> None:
    """But for the first two, in which it has to."""
    watch = watched([9.0, 8.0, 1.0, 1.0, 1.0, 1.0, 5.0, 1.0], retries=[1, 2, 2, 2, 2, 2, 3, 3, 3])
    assert watch.rejected_steps() == {6}
    assert watch.valid_seconds() == [9.0, 8.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert judged(eight_steps, watch) == ("ok", "completed 8 steps; 1 step excluded")


def test_an_allocator_that_lives_off_its_cache_thrashes(eight_steps: RunResult) -> None:
    watch = watched([1.0] * 8, retries=[0, 3, 3, 3, 4, 4, 5, 5, 5])
    assert judged(eight_steps, watch) == ("thrash", "the allocator freed its cache in 2 steps")


@pytest.mark.parametrize("slow", [2, 7, 18])
def test_a_step_that_compiles_again_does_not_change_the_speed(
    training: ResolvedConfig, eight_steps: RunResult, slow: int
) -> None:
    steps = [9.0, *([1.0, 1.01, 0.99, 1.0] * 5)[1:]]
    speeds = []
    for seconds in (0.0, 20.0):
        steps[slow] += seconds
        watch = watched(steps, retries=[0] * 21, bar=95.0)  # of 100 tokens/s
        speeds.append(measured_row(training, eight_steps, watch).tokens_per_second)
        assert all(
            early_stop.verdict(steps[:count], threshold_seconds=100 / 95, precision=0.0) != "cannot win"
            for count in range(len(steps))
        )
    assert speeds[1] == pytest.approx(speeds[0], rel=0.01)


@pytest.mark.parametrize("batch", [4, 8, 32])
def test_speed_counts_the_tokens_of_whole_steps(training: ResolvedConfig, tmp_path: Path, batch: int) -> None:
    """The usual bug is to count micro-batches, which makes a speed depend on the accumulation: 1, 2 and 8 here."""
    row = attempt(training.replace(global_batch=batch), tmp_path)
    assert row.accumulation == batch // training.batch.micro_batch
    whole = steady_state(row.step_seconds, batch * training.model.context_length)
    assert whole
    assert row.tokens_per_second == whole.tokens_per_second
    assert row.speed
    assert row.result
    assert (row.outcome, row.result.memory.process_source, len(row.step_seconds)) == ("ok", "rss", 20)
    assert row.speed.low <= whole.tokens_per_second <= row.speed.high
    assert row.memory


@dataclass(frozen=True)
class Known(MemoryLimit):
    """A limit on a process that has used a known amount."""

    def used(self) -> tuple[int, MemorySource]:
        return 5 * 10**9, "device"


def test_the_row_of_a_trial_has_what_its_run_measured(training: ResolvedConfig, distinct: Callable[..., Any]) -> None:
    """But for the memory, where it has a limit, which is on another measure of it."""
    result = distinct(RunResult, implausible_reason="")
    measured = as_trial_result(result, training.model, training.execution, None, None)
    row = make_row(row_of(), training.step_tokens, measured, None, StepTimes())
    assert row.result == result
    assert (row.speed, row.memory) == (result.throughput.estimate, result.memory.process)
    limit = Known(10**10, torch.device("cpu"), 0)
    limited = as_trial_result(result, training.model, training.execution, None, limit)
    assert limited == replace(result, memory=replace(result.memory, process=5 * 10**9, process_source="device"))


def test_what_was_asked_of_a_trial_is_in_its_row_by_the_same_name(distinct: Callable[..., Any]) -> None:
    request = distinct(TrialRequest, config=ResolvedConfig.of(micro_batch=4, global_batch=24), stop_rule=None)
    row = unmeasured_row(request, "failed", "for a reason", 2.5)
    requested = vars(request.proposal) | vars(request)
    shared = {field.name for field in fields(TrialRow)} & requested.keys()
    assert len(shared) >= 9
    assert {name: getattr(row, name) for name in shared} == {name: requested[name] for name in shared}
    assert (row.accumulation, row.outcome, row.reason, row.seconds) == (6, "failed", "for a reason", 2.5)


def test_a_rung_is_measured_like_the_run_of_its_config(training: ResolvedConfig) -> None:
    """With all its losses, and with validation; its limit is that of any trial."""
    config = training.replace(steps=9, cycle=Cycle(4, 1), seed=3)
    trainer = make_trainer(config)
    expected = trainer.run()
    request = TrialRequest("m4", 1, "rung", Proposal(Candidate(4), "rung"), config, "here")
    row, _ = run(request)
    assert row.result
    assert (row.outcome, row.result.train_loss, row.result.val_loss) == ("ok", expected.train_loss, expected.val_loss)
    assert row.losses == [loss for report in trainer.times.reports for loss in report.step_losses]
    assert [seen for seen, _ in row.curve] == [number * config.step_tokens for number in range(1, 10)]
    assert (len(row.step_seconds), row.step_tokens, row.result.attention) == (9, config.step_tokens, expected.attention)
    over, _ = run(replace(request, memory_limit=10**6))
    assert (over.outcome, len(over.step_seconds), over.speed) == ("over_limit", 1, None)
