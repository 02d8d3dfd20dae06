"""The step loop: plain torch, without Ray and without MLflow, reporting through callbacks.

Nothing inside a cycle waits for the device: losses stay there, moments are marked on its own timeline, and both are
read one step into the next cycle, when the device already has new work. The garbage collector is off, because a
collection in the middle of a step would delay the following launches.
"""

import gc
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from infra.cli.units import format_count, format_duration
from infra.device.telemetry import Telemetry
from infra.errors import UserError
from train.callbacks import Callback, TrainStep
from train.config import CUDA_GRAPHS, ResolvedConfig
from train.data.loader import BatchLoader, WorkerShare
from train.data.source import TrainingData
from train.loop import memory, oom, timing
from train.loop.attention_check import choose_attention
from train.loop.control import Callbacks, Control, Decision
from train.loop.cycle import RunningCycle, close_cycle, divergence_reason, open_cycle, report, step_seconds
from train.loop.epochs import Epochs
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
from train.loop.pace import LONG_STEP_SECONDS
from train.loop.result_builder import StepTimes, build_result
from train.loop.validation import window_count
from train.loop.validator import Validator
from train.models import parallel
from train.models.builders import builder_of
from train.models.custom import raised_in_forward
from train.models.optimizer import learning_rate, make_optimizer, set_learning_rate
from train.models.parallel import Workers
from train.result import BUILDING, TRAINING, MemoryShortage, Outcome, RunResult
from train.run_files import checkpoint
from train.run_files.checkpoint import Checkpoints
from train.run_files.host_copy import PendingCopies
from train.run_files.progress import Progress, RunState, check_same_run, read_progress

BACKWARD = "running the backward pass"
FORWARD = "timing a forward pass"

ANNOUNCED_STEP_SECONDS = 10.0
"""Expected length of a step from which a line says so before the first one."""

END_SECONDS = 1.0
"""Time from the last checkpoint to the end of a run, for its result, its chart and a sample. A large model's sample may
take longer on a CPU, but only a long run has learned enough for one."""


class Trainer:
    """One worker's run. ``run()`` trains to the end of the config's steps, tokens or time, or until it is stopped.

    Args:
        config: the run.
        data: its data, opened.
        callbacks: called while it trains; None to call nothing.
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
        callbacks: Callbacks | None = None,
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
        self.callbacks = callbacks or Callbacks()
        self.limit = limit
        self.started = time.perf_counter()
        self.workers = Workers(config.batch.workers)
        self.device = torch_device(config.execution.device)
        torch.set_float32_matmul_precision("highest" if config.execution.precision == "fp32" else "high")
        self.state = RunState()
        self.times = StepTimes()
        self.elapsed_before = 0.0
        self.micro_batch = 0
        """Number of micro-batches that were launched in the current step; another thread may read it."""
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
        # The next replay of a CUDA graph overwrites the results of the last one, so gradients that the next micro-batch
        # adds to need their own memory.
        accumulates_graphs = config.execution.compile in CUDA_GRAPHS and config.batch.accumulation > 1
        self.keep_gradients = accumulates_graphs or "set-to-none" in config.execution.ablate
        if accumulates_graphs:
            for parameter in self.model.parameters():
                parameter.grad = torch.zeros_like(parameter)
        self.has_buffers = len(self.model.state_dict()) > len(list(self.model.named_parameters(remove_duplicate=False)))
        self.optimizer = make_optimizer(self.model, config.optimization, offload=config.execution.offload_optimizer)
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
        self._prepare(total)
        pending: RunningCycle | None = None
        cycle = self._open_cycle(self.state.last_reported_step, self.unreported_losses)
        if self.control.first_step_closes():
            cycle.stop = self.state.step + 1
        while True:
            cycle.learning_rate = learning_rate(
                config.optimization, self.state.step, total, self.control.progress(self.state.step)
            )
            self.epochs.begin_step(self.state.windows_consumed, self.state.step)
            if not self._train_step(loader, cycle):
                return self._discard_step(cycle, pending)
            self._advance(step=self.state.step + 1, windows_consumed=loader.position)
            self._end_step(cycle)
            self._call_user(cycle)
            if pending and (wrong := self._report(pending)):
                return "diverged", wrong
            pending = None
            decision = self._decide(cycle)
            if decision.closes:
                pending = cycle
                if not self._close(cycle, validates=decision.validates) and not decision.outcome:
                    decision = replace(decision, outcome="interrupted", reason="stop requested during a validation")
            outcome = decision.outcome
            saving = self.saves_checkpoints and (
                bool(outcome) or self.state.step % config.checkpoints.checkpoint_every == 0
            )
            if pending and (saving or outcome or self.control.is_interruptible):  # A long step would delay the report.
                if wrong := self._report(pending):
                    return "diverged", wrong
                pending = None
            elif outcome:
                self._end_within(cycle)
            if saving:
                self._save(cycle)
            if outcome:
                return outcome, decision.reason
            if decision.closes:
                gc.collect(0)
                cycle = self._open_cycle(self.state.step, [])
            if decision.next_closes:
                cycle.stop = self.state.step + 1

    def _prepare(self, total: int | None) -> None:
        """Time a forward pass, if a time limits validations or the run, and announce steps and data of unusual
        length."""
        config, windows = self.config, self.data.validation
        duration, batch = config.duration, config.batch
        compiles = config.execution.compile != "off"
        on_line = self.callbacks.on_line if self.workers.is_first else lambda text: None
        self.epochs = Epochs(
            self.data.epoch_windows, batch.global_batch, on_line, self.callbacks.clock, self.state.windows_consumed
        )
        self.validator = None
        if windows is not None:
            max_windows = window_count(windows, batch.global_batch, duration.cycle)
            threads = config.dataset.loader_threads
            self.validator = Validator(windows, max_windows, batch, self.workers.rank, self.device, threads)
            if duration.cycle.val_batches is not None:
                self._advance(val_windows=max_windows)
        self.control = Control(config, self.workers, self.callbacks, self.validator, total, self.elapsed_before)
        by_time = duration.cycle.val_batches is None or duration.time_budget is not None
        if self.validator is not None and by_time:
            first_step, self.activity = self.activity, FORWARD
            self.stage = FORWARD
            self.control.pace.pass_seconds = self.validator.pass_seconds(
                self.model, self._loss, self.callbacks.clock, compiles=compiles
            )
            self.activity = first_step
        seconds = self.control.pace.step_seconds
        if not compiles and seconds >= ANNOUNCED_STEP_SECONDS:
            on_line(f"A step takes about {format_duration(round(seconds))}. {_interrupt_hint(batch.accumulation)}")
        if seconds and total is None and duration.time_budget:
            self.epochs.announce_budget(duration.time_budget / seconds)

    def _open_cycle(self, first: int, unreported_losses: list[float]) -> RunningCycle:
        """Return the cycle that continues after a report at step ``first``."""
        self.control.pace.begin_cycle()
        return open_cycle(first, self.state.step, self.config.duration.cycle, unreported_losses, self.device)

    def _end_step(self, cycle: RunningCycle) -> None:
        """Mark the end of a step, and wait for that of the first one, because the run's time starts there."""
        cycle.step_ends.append(timing.mark(self.device))
        if self.times.first_step is None:
            timing.wait_for(cycle.step_ends[-1])
            memory.release_cached_memory(self.config.execution)
            self.times.first_step = time.perf_counter() - self.started
            self.activity = TRAINING
            self.state_bytes = checkpoint.state_bytes(self.model, self.optimizer)
        self.control.pace.end_step()

    def _call_user(self, cycle: RunningCycle) -> None:
        """Call the user's callbacks after a step of ``cycle``."""
        if not self.callbacks.user_callbacks or not self.workers.is_first:
            return
        self.stage = f"running the callbacks after step {self.state.step}"
        loss, config = cycle.losses[cycle.steps - 1].clone(), self.config
        step = TrainStep(
            self.state.step, loss, cycle.learning_rate, self.model, config.batch, config.model.context_length
        )
        for callback in self.callbacks.user_callbacks:
            if callback.on_step_end(step):
                self.stopped_by = callback

    def _advance(self, **changes: Any) -> None:
        self.state = replace(self.state, **changes)

    def _train_step(self, loader: BatchLoader, cycle: RunningCycle) -> bool:
        """Train one optimizer step, and leave its loss and gradient norm on the device.

        Returns whether the step was completed; False if the run must stop without it.
        """
        config, index, step = self.config, cycle.steps, self.state.step + 1
        accumulation = config.batch.accumulation
        self.control.pace.begin_step()
        cycle.make_room()
        if self.workers.rank:  # dropout must differ between workers, and be the same when the run is resumed here
            torch.manual_seed(hash((config.dataset.seed, self.state.step, self.workers.rank)))
        set_learning_rate(self.optimizer, cycle.learning_rate)
        interruptible = self.control.is_interruptible and accumulation > 1 and not self.has_buffers
        random_state = checkpoint.random_state() if interruptible else None
        for micro in range(accumulation):
            self.micro_batch = micro
            if micro and random_state is not None and self.control.must_discard():
                checkpoint.restore_random_state(random_state)
                return False
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
            with parallel.gradient_sync(self.forward, self.model, micro == accumulation - 1):
                loss = self._loss(inputs, targets)
                self.stage = f"{BACKWARD} of step {step}"
                self.scaler.scale(loss / accumulation).backward()
            cycle.losses[index] += loss.detach() / accumulation
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
        self.micro_batch = 0
        return True

    def _discard_step(self, cycle: RunningCycle, pending: RunningCycle | None) -> tuple[Outcome, str]:
        """End the run in a step of ``cycle`` without its gradients, and save the last whole step."""
        accumulation, step = self.config.batch.accumulation, self.state.step + 1
        cycle.discard_unfinished_step(accumulation)
        if pending and (wrong := self._report(pending)):
            return "diverged", wrong
        self._end_within(cycle)
        if self.saves_checkpoints and self.times.first_step is not None:
            self._save(cycle)
        done = f"{self.micro_batch} of {accumulation} micro-batches"
        return "interrupted", f"stop requested in step {step:,}, of which {done} are lost"

    def _loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        with autocast_context(self.config.execution):
            return self.forward(inputs, targets)

    def _decide(self, cycle: RunningCycle) -> Decision:
        """Return what all workers do after this step."""
        whole = self.state.step == cycle.stop
        decision = self.control.decide(
            self.state, whole=whole, step_seconds=self.times.steps, closing_seconds=self._closing_seconds(),
            excess=self._excess() if whole or self.device.type == "cpu" else "",  # NVML takes milliseconds.
            stopped_by=self.stopped_by,
        )  # fmt: skip
        self._advance(train_seconds=self.control.elapsed)
        return decision

    def _closing_seconds(self) -> float:
        """Estimate the seconds from the last step to the end of the run, without the validation."""
        if not (self.saves_checkpoints and self.checkpoints):
            return 0.0
        return self.checkpoints.seconds(self.state_bytes) + END_SECONDS

    def _excess(self) -> str:
        return self.limit.excess_message() if self.limit else ""

    def _close(self, cycle: RunningCycle, *, validates: bool) -> bool:
        """Queue the validation after ``cycle``'s steps, if there is one, and close the cycle.

        Returns whether the validation was completed; False if the run must stop without it.
        """
        completed = True
        if self.validator is not None and validates:
            self.stage = f"running the validation after step {self.state.step}"
            self._advance(val_windows=self.control.val_windows(self.state))
            cycle.val_windows = self.state.val_windows
            self.control.pace.end_training()
            start = self.callbacks.clock()
            must_stop = self.control.must_discard if self.control.is_interruptible else lambda: False
            cycle.val_losses = self.validator.run(cycle.val_windows, self.model, self._loss, must_stop)
            completed = cycle.val_losses is not None
            seconds = self.callbacks.clock() - start if timing.is_immediate(self.device) and completed else None
            self.control.pace.end_validation(self.validator.passes(cycle.val_windows), seconds)
        else:
            self.control.pace.end_training()
        close_cycle(cycle, self.workers, self.device)
        return completed

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
            for callback in self.callbacks.user_callbacks:
                if callback.on_cycle_end(made):
                    self.stopped_by = callback
        return wrong

    def _end_within(self, cycle: RunningCycle) -> None:
        """Keep the times and losses of ``cycle``'s steps, because the run ends before the cycle does."""
        self._add_step_times(cycle)
        self.times.unreported_losses = self.workers.mean(cycle.losses[: cycle.steps]).tolist()

    def _add_step_times(self, cycle: RunningCycle) -> None:
        """Add the times of ``cycle``'s steps to the totals; waits for the last of them."""
        seconds = step_seconds(cycle)
        is_long = bool(seconds) and statistics.median(seconds) >= LONG_STEP_SECONDS
        self.times.micro_batches += cycle.micro_batch_seconds if is_long else [[]] * len(seconds)
        self.times.steps += seconds
        self.times.data_wait += cycle.data_wait
        self.times.optimizer += cycle.optimizer_seconds

    def _total_steps(self) -> int | None:
        """Return the steps of the whole run: as configured, else one epoch; None when only time ends it."""
        config = self.config
        if config.total_steps is None and config.duration.time_budget is None:
            assert self.data.epoch_windows is not None, "a config for data without a known end says when to stop"
            return max(1, self.data.epoch_windows // config.batch.global_batch)
        return config.total_steps

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


def _interrupt_hint(micro_batches: int) -> str:
    """Describe what Ctrl-C does in a long step of this number of micro-batches."""
    if micro_batches == 1:
        return "Ctrl-C ends the run after the current step."
    return f"Ctrl-C discards the current step after one of its {micro_batches:,} micro-batches."
