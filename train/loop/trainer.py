"""The step loop: plain torch, without Ray and without MLflow, reporting through callbacks.

Nothing inside a cycle waits for the device: losses stay there, moments are marked on its own timeline, and both are
read one step into the next cycle, when the device already has new work. The garbage collector is off, because a
collection in the middle of a step would delay the following launches.
"""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from infra.cli.units import format_count
from infra.device.telemetry import Telemetry
from infra.errors import UserError
from train.callbacks import Callback, TrainStep
from train.config import CUDA_GRAPHS, ResolvedConfig
from train.data.loader import BatchLoader, WorkerShare
from train.data.source import TrainingData
from train.loop import memory, oom, timing
from train.loop.attention_check import choose_attention
from train.loop.cycle import RunningCycle, close_cycle, divergence_reason, open_cycle, report, step_seconds
from train.loop.execution import (
    autocast_context,
    build_model,
    compile_model,
    configure_allocator,
    configure_determinism,
    enable_large_pages,
    gc_disabled,
    torch_device,
)
from train.loop.gradient_norms import NormCheck
from train.loop.memory_limit import MemoryLimit
from train.loop.oom import OutOfMemory
from train.loop.result_builder import StepTimes, build_result
from train.loop.throughput import is_precise
from train.loop.validation import ValidationPasses, validate, window_count
from train.models import parallel
from train.models.builders import builder_of
from train.models.custom import raised_in_forward
from train.models.optimizer import learning_rate, make_optimizer, set_learning_rate
from train.models.parallel import Workers
from train.result import BUILDING, TRAINING, CycleReport, MemoryShortage, Outcome, RunResult
from train.run_files import checkpoint
from train.run_files.checkpoint import Checkpoints
from train.run_files.host_copy import PendingCopies
from train.run_files.progress import Progress, RunState, check_same_run, read_progress

BACKWARD = "running the backward pass"


@dataclass(frozen=True)
class Callbacks:
    """Functions that the loop calls on the first worker."""

    on_cycle: Callable[[CycleReport], object] = lambda report: None
    """Called with each cycle's report."""
    should_stop: Callable[[], bool] = lambda: False
    """Called after each step; returns whether the run must stop after it, as interrupted."""
    of_user: Sequence[Callback] = ()
    """Callbacks of a Python program; the run is finished after the step in which one of them stops it."""


class Trainer:
    """One worker's run. ``run()`` trains to the end of the config's steps, tokens or time, or until it is stopped.

    Args:
        config: the run.
        data: its data, opened.
        callbacks: called while it trains.
        checkpoints: where the first worker saves; None to save nothing.
        resume: the checkpoint to continue from.
        limit: the limit on the memory of this process.

    Raises:
        UserError: this machine, the data or the checkpoint do not fit the config.
        OutOfMemory: memory does not hold the model.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        data: TrainingData,
        callbacks: Callbacks = Callbacks(),
        *,
        checkpoints: Checkpoints | None = None,
        resume: Path | None = None,
        limit: MemoryLimit | None = None,
    ) -> None:
        self.config = config
        self.data = data
        configure_allocator(config.execution.allocator)
        enable_large_pages(config.execution)
        configure_determinism(config.execution)
        self.callbacks = callbacks
        self.limit = limit
        self.started = time.perf_counter()
        self.workers = Workers(config.batch.workers)
        self.device = torch_device(config.execution.device)
        torch.set_float32_matmul_precision("highest" if config.execution.precision == "fp32" else "high")
        self.state = RunState()
        self.times = StepTimes()
        self.elapsed_before = 0.0
        self.unreported_losses: list[float] = []
        self.stopped_by: Callback | None = None
        """The user's callback that has stopped the run; None if there is none."""
        self.resume_checkpoint = resume
        self.saves_checkpoints = checkpoints is not None
        self.checkpoints = checkpoints if self.workers.is_first else None
        self.snapshot_copies: PendingCopies | None = None
        if self.checkpoints:
            self.checkpoints.prepare_folder()
        self.activity = "building the model"
        """What the loop is doing, as a phrase; another thread may read it, and ``state.step`` too."""
        self.stage = BUILDING
        """The part of a step, or the work before or after one, that the loop is doing."""
        self.builder = builder_of(config.model)
        self.attention, self.attention_message = config.execution.attention, ""
        """The attention kernel, and a line about those that failed the check of :mod:`train.loop.attention_check`."""
        try:
            self._build()
        except RuntimeError as failure:
            if not memory.is_oom_error(failure):
                raise
            raise OutOfMemory(self._oom_result(failure)) from failure
        self.activity = data.first_batch_activity

    def _build(self) -> None:
        """Make the model and its optimizer, distributed over the workers, with their state from the checkpoint."""
        config = self.config
        choice = choose_attention(self.builder, config.execution, self.device)
        self.attention, self.attention_message = choice.kernel, choice.message
        self.model = build_model(
            config.model, choice.execution, config.optimization.optimizer, config.dataset.seed, self.device
        )
        if self.resume_checkpoint is None:
            self.builder.load_initial_weights(self.model)
        self.forward = compile_model(self.model, config.execution)
        if config.execution.fsdp:
            parallel.apply_fsdp(self.model, config.execution.device, config.batch.workers)
        elif self.workers.size > 1:
            self.forward = parallel.apply_ddp(self.forward, self.device, config.model.has_unused_parameters)
        # The next replay of a CUDA graph overwrites the results of the last one, so gradients need their own memory.
        self.keep_gradients = config.execution.compile in CUDA_GRAPHS or "set-to-none" in config.execution.ablate
        if config.execution.compile in CUDA_GRAPHS:
            for parameter in self.model.parameters():
                parameter.grad = torch.zeros_like(parameter)
        self.optimizer = make_optimizer(self.model, config.optimization, config.execution.offload_optimizer)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=config.execution.precision == "fp16")
        self.norm_check = NormCheck(self.attention, skips_steps=self.scaler.is_enabled())
        if self.resume_checkpoint is not None:
            self._restore(self.resume_checkpoint)

    def run(self) -> RunResult:
        """Train. Running out of memory and diverging are outcomes; raises ``OutOfMemory`` where other workers wait."""
        memory.reset_peak(self.device)
        missing = None
        try:
            with gc_disabled(self.config.execution):
                outcome, reason = self._steps()
            if outcome == "finished" and (excess := self._excess()):  # The memory grew after the last step.
                outcome, reason = "over_limit", excess
            if outcome == "over_limit" and self.limit:
                missing = oom.over_limit(self.model, self.optimizer, self.limit, self.state.step)
        except Exception as failure:
            if not memory.is_oom_error(failure):
                self._raise_model_error(failure)
                raise
            result = self._oom_result(failure)
            if self.workers.size > 1:
                raise OutOfMemory(result) from failure
            return result
        return self._concluded(outcome, reason, missing)

    def _raise_model_error(self, failure: Exception) -> None:
        """Raise ``UserError`` where a custom model's own code has failed, and not another worker or this loop."""
        if isinstance(failure, UserError) or self.config.execution.fsdp:
            return
        backward = self.workers.size == 1 and self.stage.startswith(BACKWARD)
        is_models = backward or raised_in_forward(self.model, failure)
        if is_models and (error := self.builder.user_error(self.stage, failure)):
            raise error from failure

    def _oom_result(self, failure: Exception) -> RunResult:
        """Return the result of a run that ran out of memory by ``failure``."""
        stage = self.stage
        if self.workers.size > 1:
            stage += f" on worker {self.workers.rank + 1} of {self.workers.size}"
        model, optimizer = (vars(self).get(part) for part in ("model", "optimizer"))  # as far as they have been built
        missing = oom.out_of_memory(model, optimizer, self.limit, self.device, stage, failure)
        return self._concluded("oom", oom.format_oom(missing, self.config.step, self.limit), missing)

    def _concluded(self, outcome: Outcome, reason: str, missing: MemoryShortage | None) -> RunResult:
        """Return the result, once the checkpoint that is being written is complete."""
        self.activity = "saving the checkpoint"
        saved = self.checkpoints.wait() or self.resume_checkpoint if self.checkpoints else None
        address = self.checkpoints.address(saved) if self.checkpoints and saved else None
        result = build_result(self.config, self.data, self.device, self.state, self.times, (outcome, reason))
        return replace(result, shortage=missing, attention=self.attention, checkpoint=address)

    def while_training(self, telemetry: Telemetry) -> dict[str, float]:
        """Return the means of what ``telemetry`` has read after the first step of :meth:`run`."""
        first = self.times.first_step
        return {} if first is None else telemetry.averages_since(self.started + first)

    def _steps(self) -> tuple[Outcome, str]:
        config = self.config
        total = self._total_steps()
        if total is not None and self.state.step >= total:  # it was killed after its last checkpoint
            return "finished", f"reached {format_count(self.state.step, 'step')}"
        loader = BatchLoader(
            self.data.windows,
            WorkerShare(config.batch, self.state.windows_consumed, self.workers.rank),
            self.device,
            prefetch="prefetch" not in config.execution.ablate,
            threads=config.dataset.loader_threads,
        )
        pending: RunningCycle | None = None
        cycle = open_cycle(
            self.state.last_reported_step, self.state.step, config.duration.cycle.train_steps, self.unreported_losses,
            self.device,
        )  # fmt: skip
        start_time = time.perf_counter()
        while True:
            cycle.learning_rate = learning_rate(config.optimization, self.state.step, total, self._progress(total))
            self._train_step(loader, cycle)
            self._advance(step=self.state.step + 1, windows_consumed=loader.position)
            cycle.step_ends.append(timing.mark(self.device))
            self._call_user(cycle)
            if self.times.first_step is None:
                timing.wait_for(cycle.step_ends[-1])
                memory.release_cached_memory(config.execution)
                start_time = time.perf_counter()  # the time budget does not include compilation
                self.times.first_step = start_time - self.started
                self.activity = TRAINING
            if pending and (wrong := self._report(pending)):
                return "diverged", wrong
            pending = None
            whole = self.state.step == cycle.stop
            outcome, ended = self._end(total, time.perf_counter() - start_time, whole)
            if whole or outcome == "finished":
                self._validate(cycle)
                pending = cycle
            saving = self.saves_checkpoints and (
                bool(outcome) or self.state.step % config.checkpoints.checkpoint_every == 0
            )
            if pending and (saving or outcome):
                if wrong := self._report(pending):
                    return "diverged", wrong
                pending = None
            elif outcome:
                self._add_step_times(cycle)
            if saving:
                self._save(cycle)
            if outcome:
                return outcome, ended
            if whole:
                gc.collect(0)
                cycle = open_cycle(self.state.step, self.state.step, config.duration.cycle.train_steps, [], self.device)

    def _call_user(self, cycle: RunningCycle) -> None:
        """Call the user's callbacks after a step of ``cycle``."""
        if not self.callbacks.of_user or not self.workers.is_first:
            return
        self.stage = f"running the callbacks after step {self.state.step}"
        step = TrainStep(self.state.step, cycle.losses[cycle.steps - 1].clone(), cycle.learning_rate, self.model)
        for callback in self.callbacks.of_user:
            if callback.on_step_end(step):
                self.stopped_by = callback

    def _advance(self, **changes: Any) -> None:
        self.state = replace(self.state, **changes)

    def _train_step(self, loader: BatchLoader, cycle: RunningCycle) -> None:
        """Train one optimizer step, and leave its loss and gradient norm on the device."""
        config, index, step = self.config, cycle.steps, self.state.step + 1
        if self.workers.rank:  # dropout must differ between workers, and be the same when the run is resumed here
            torch.manual_seed(hash((config.dataset.seed, self.state.step, self.workers.rank)))
        set_learning_rate(self.optimizer, cycle.learning_rate)
        for micro in range(config.batch.accumulation):
            self.stage = f"loading a batch for step {step}"
            batch_requested_at = timing.mark(self.device)
            inputs, targets = loader.next()
            if self.times.first_step is None:
                compiles = ", which compiles however short the run is (--compile off starts sooner)"
                self.activity = "running the first step" + compiles * (config.execution.compile != "off")
            cycle.batch_waits.append((batch_requested_at, timing.mark(self.device)))
            if config.execution.compile in CUDA_GRAPHS:
                torch.compiler.cudagraph_mark_step_begin()
            self.stage = f"running the forward pass of step {step}"
            with parallel.gradient_sync(self.forward, self.model, micro == config.batch.accumulation - 1):
                loss = self._loss(inputs, targets)
                self.stage = f"{BACKWARD} of step {step}"
                self.scaler.scale(loss / config.batch.accumulation).backward()
            cycle.losses[index] += loss.detach() / config.batch.accumulation
            if "async-loss" in config.execution.ablate:
                loss.item()
        self.stage = f"running the optimizer in step {step}"
        cycle.backward_ends.append(timing.mark(self.device))
        if self.snapshot_copies:  # They are made while the forward and backward pass run.
            self.snapshot_copies.wait()
            self.snapshot_copies = None
        if config.optimization.clip_norm:
            self.scaler.unscale_(self.optimizer)
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), config.optimization.clip_norm)
            cycle.norms[index] = parallel.full_tensor(norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=not self.keep_gradients)

    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with autocast_context(self.config.execution):
            return self.forward(inputs, targets)

    def _end(self, total: int | None, seconds: float, whole: bool) -> tuple[Outcome | None, str]:
        """Return whether and why the run ends after this step; the first worker decides, or one over its memory
        limit."""
        config, step = self.config, self.state.step
        outcome: Outcome | None = None
        ended = ""
        elapsed = self.elapsed_before + seconds
        if total is not None and step >= total:
            outcome, ended = "finished", f"reached {format_count(step, 'step')}"
        elif config.duration.time_budget is not None and elapsed >= config.duration.time_budget:
            outcome, ended = "finished", "time budget reached"
        elif (
            config.duration.speed_tolerance
            and step == self.state.last_reported_step + 1
            and is_precise(self.times.steps, config.duration.speed_tolerance)
        ):
            outcome, ended = "finished", f"speed measured to within {config.duration.speed_tolerance:.1%}"
        elif self.stopped_by:
            outcome, ended = "finished", f"stopped by the callback {type(self.stopped_by).__name__}"
        elif self.workers.is_first and self.callbacks.should_stop():
            outcome, ended = "interrupted", "stop requested"
        if not self.workers.is_first:
            outcome, elapsed = None, 0.0
        if (whole or self.device.type == "cpu") and (excess := self._excess()):  # NVML takes milliseconds
            outcome, ended = "over_limit", excess
        known: list[Outcome | None] = [None, "finished", "interrupted", "over_limit"]
        code, elapsed = self.workers.all_max(known.index(outcome), elapsed)
        self._advance(train_seconds=elapsed)
        return known[int(code)], ended or "ended by another worker"

    def _excess(self) -> str:
        return self.limit.excess_message() if self.limit else ""

    def _validate(self, cycle: RunningCycle) -> None:
        """Queue the validation after ``cycle``'s steps, and close the cycle."""
        windows = self.data.validation
        if windows is not None:
            self.stage = f"running the validation after step {self.state.step}"
            batch = self.config.batch
            cycle.val_windows = window_count(windows, batch.global_batch, self.config.duration.cycle)
            passes = ValidationPasses(windows, cycle.val_windows, batch.micro_batch, batch.workers)
            share = WorkerShare(passes.batch, rank=self.workers.rank)
            loader = BatchLoader(passes, share, self.device, threads=self.config.dataset.loader_threads)
            cycle.val_losses = validate(passes, loader, self.model, self._loss)
        close_cycle(cycle, self.workers, self.device)

    def _report(self, cycle: RunningCycle) -> str | None:
        """Read a finished cycle's numbers and report them; returns the reason to stop if they contain one."""
        state = self.state
        made = report(
            cycle,
            self.config.batch,
            self.config.model.context_length,
            self.data.manifest,
            val_tokens=state.val_tokens,
            elapsed=state.train_seconds,
        )
        self._add_step_times(cycle)
        wrong = self.norm_check.reason(cycle.first, made.step_losses, cycle.step_norms) or divergence_reason(
            made.step_losses, state.reference_loss, self.config.duration.max_loss_spike, cycle.first
        )
        self._advance(last_reported_step=made.step, reference_loss=made.train_loss, val_tokens=made.val_tokens)
        self.times.reports.append(made)
        if self.workers.is_first:
            self.callbacks.on_cycle(made)
            for callback in self.callbacks.of_user:
                if callback.on_cycle_end(made):
                    self.stopped_by = callback
        return wrong

    def _add_step_times(self, cycle: RunningCycle) -> None:
        """Add the times of ``cycle``'s steps to the totals; waits for the last of them."""
        self.times.steps += step_seconds(cycle)
        self.times.data_wait += cycle.data_wait
        self.times.optimizer += cycle.optimizer_seconds

    def _total_steps(self) -> int | None:
        """Return the steps of the whole run: as configured, else one epoch; None when only time ends it."""
        config = self.config
        if config.total_steps is None and config.duration.time_budget is None:
            assert self.data.epoch_windows is not None, "a config for data without a known end says when to stop"
            return max(1, self.data.epoch_windows // config.batch.global_batch)
        return config.total_steps

    def _progress(self, total: int | None) -> float:
        """Return the fraction of the run that has passed, by steps or by the time budget."""
        if total is not None:
            return self.state.step / total
        assert self.config.duration.time_budget is not None
        return min(1.0, self.state.train_seconds / self.config.duration.time_budget)

    def _save(self, cycle: RunningCycle) -> None:
        """Take a snapshot of this step and have it written while training continues."""
        unreported = (
            cycle.losses[: cycle.steps] if self.state.last_reported_step < self.state.step else cycle.losses[:0]
        )
        losses = self.workers.mean(unreported)
        if not (self.workers.is_first or self.config.execution.fsdp):
            return
        self.stage = f"copying the checkpoint of step {self.state.step}"
        if self.checkpoints is None:
            checkpoint.gather_state(self.model, self.optimizer)
            return
        self.checkpoints.wait_for_write()
        snapshot = checkpoint.take_snapshot(self.model, self.optimizer, self.scaler, losses)
        self.snapshot_copies = snapshot.copies
        first, reference, spike = (
            self.state.last_reported_step,
            self.state.reference_loss,
            self.config.duration.max_loss_spike,
        )
        progress = Progress(
            **vars(self.state),
            data_fingerprint=self.data.manifest.fingerprint,
            tokenizer_sha256=self.data.manifest.tokenizer_sha256,
            config=self.config.to_json(),
            data_state=self.data.state_dict(self.state.windows_consumed),
        )
        self.checkpoints.save(
            snapshot, progress, lambda losses: divergence_reason(losses, reference, spike, first) is None
        )

    def _restore(self, path: Path) -> None:
        progress = read_progress(path)
        check_same_run(path, progress, self.config.step, self.config.dataset, self.data.manifest)
        self.unreported_losses = checkpoint.load(path, self.model, self.optimizer, self.scaler, self.device)
        self.state = progress.state
        self.data.load_state_dict(progress.data_state)
        self.elapsed_before = progress.train_seconds
