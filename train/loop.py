"""The step loop: plain torch, without Ray and without MLflow, reporting through callbacks.

In: a config and opened shards. Out: a RunResult. Nothing inside a cycle waits for the device: losses
stay there, moments are marked on its own timeline, and both are read one step into the next cycle,
when the device already has new work. The garbage collector is frozen, because a collection in the
middle of a step delays the launches behind it.
"""

import contextlib
import gc
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from infra.command import UserError
from infra.hardware import peak_flops
from pipeline.shards import TokenShards
from train import checkpoint, measure, memory
from train.attention import ATTENTION
from train.batches import BatchLoader, Windows
from train.config import TrainConfig
from train.model import GPT
from train.optimizers import learning_rate, make_optimizer
from train.result import CycleReport, Outcome, RunResult


@dataclass
class _Cycle:
    """A cycle whose numbers are still on the device."""

    first_step: int
    start: measure.Mark
    marks: list[measure.Mark]
    losses: Tensor
    norms: Tensor
    val_losses: Tensor | None = None
    trained: measure.Mark = None
    end: measure.Mark = None
    data_wait: float = 0.0
    position: int = 0
    rate: float = 0.0


class Trainer:
    """One worker's run. ``run()`` trains to the end of the config's steps, tokens or time, or until told to stop."""

    def __init__(
        self,
        config: TrainConfig,
        *,
        on_cycle: Callable[[CycleReport], None] = lambda report: None,
        should_stop: Callable[[], bool] = lambda: False,
        checkpoints: Path | None = None,
        resume: Path | None = None,
    ) -> None:
        self.config = config
        self.on_cycle = on_cycle
        self.should_stop = should_stop
        self.checkpoints = checkpoints
        self.started = time.perf_counter()
        self.device = pick_device(config)
        self.precision = pick_precision(config, self.device)
        torch.manual_seed(config.seed)
        torch.set_float32_matmul_precision("highest" if self.precision == "fp32" else "high")
        self.data = TokenShards(config.data)
        length = config.model.context_length
        self.windows = Windows(self.data.open("train"), length, config.seed)
        self.val_windows = None
        if config.cycle.val:
            self.val_windows = Windows(self.data.open("val"), length, config.seed, split="val")
        self.model = GPT(
            config.model,
            attention=ATTENTION[config.attention],
            checkpointing=config.checkpointing,
            loss_chunks=config.loss_chunks,
        ).to(self.device)
        self.optimizer = make_optimizer(self.model, config)
        self.forward = compiled(self.model, config)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.precision == "fp16")
        self.step = self.position = self.val_tokens = 0
        self.elapsed_before = 0.0
        self.begin = self.started
        if resume is not None:
            self._restore(resume)
        self.step_seconds: list[float] = []
        self.data_wait = 0.0
        self.reports: list[CycleReport] = []
        self.first_step_seconds: float | None = None

    def run(self) -> RunResult:
        """Train. Always returns: running out of memory and diverging are outcomes."""
        memory.start_peak(self.device)
        gc.collect()
        gc.freeze()
        gc.disable()
        outcome: Outcome = "finished"
        reason = "reached the end"
        try:
            outcome, reason = self._steps()
        except torch.OutOfMemoryError as failure:
            outcome, reason = "oom", str(failure).splitlines()[0]
        except RuntimeError as failure:
            if "can't allocate memory" not in str(failure):  # torch's CPU allocator has no class of its own
                raise
            outcome, reason = "oom", str(failure).splitlines()[0]
        finally:
            gc.enable()
            gc.unfreeze()
        saved = None
        if self.checkpoints and outcome in ("finished", "interrupted"):
            saved = checkpoint.save(self.checkpoints, self.model, self.optimizer, self._progress())
        return self._result(outcome, reason, saved)

    def _steps(self) -> tuple[Outcome, str]:
        config, device = self.config, self.device
        total = config.total_steps
        if total is None and config.time_budget is None:
            total = max(1, self.windows.count // config.global_batch)
        loader = BatchLoader(
            self.windows,
            micro_batch=config.micro_batch,
            accumulation=config.accumulation,
            position=self.position,
            device=device,
        )
        pending: _Cycle | None = None
        self.begin = time.perf_counter()
        while True:
            cycle = self._new_cycle()
            outcome: Outcome = "finished"
            ended = ""
            for index in range(config.cycle.train):
                progress = self._progress_fraction(total)
                cycle.rate = learning_rate(config, self.step, total, progress)
                cycle.data_wait += self._train_step(loader, cycle, index)
                self.step += 1
                self.position = loader.position
                cycle.marks.append(measure.mark(device))
                if self.first_step_seconds is None:
                    measure.wait_for(cycle.marks[-1])
                    self.first_step_seconds = time.perf_counter() - self.started
                if pending is not None:
                    self._report(pending)
                    pending = None
                    if not self._finite():
                        return "diverged", f"the loss is {self.reports[-1].train_loss} at step {self.reports[-1].step}"
                if total is not None and self.step >= total:
                    ended = f"reached {self.step} steps"
                elif config.time_budget is not None and self._elapsed() >= config.time_budget:
                    ended = "the time budget is used up"
                elif self.should_stop():
                    outcome, ended = "interrupted", "was asked to stop"
                if ended:
                    break
            cycle.position = self.position
            cycle.trained = measure.mark(device)
            cycle.val_losses = self._validate()
            cycle.end = measure.mark(device)
            gc.collect(0)
            pending = cycle
            if ended:
                self._report(pending)
                if not self._finite():
                    return "diverged", f"the loss is {self.reports[-1].train_loss} at step {self.step}"
                return outcome, ended

    def _train_step(self, loader: BatchLoader, cycle: _Cycle, index: int) -> float:
        """One optimizer step; returns the host seconds spent waiting for batches."""
        config = self.config
        for group in self.optimizer.param_groups:
            group["lr"] = cycle.rate
        waited = 0.0
        for _ in range(config.accumulation):
            asked = time.perf_counter()
            inputs, targets = loader.next()
            waited += time.perf_counter() - asked
            with self._autocast():
                loss = self.forward(inputs, targets)
            self.scaler.scale(loss / config.accumulation).backward()
            cycle.losses[index] += loss.detach() / config.accumulation
        if config.clip_norm:
            self.scaler.unscale_(self.optimizer)
            cycle.norms[index] = nn.utils.clip_grad_norm_(self.model.parameters(), config.clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return waited

    @torch.no_grad()
    def _validate(self) -> Tensor | None:
        """Losses of the validation batches, still on the device; the same batches at every call."""
        config = self.config
        if self.val_windows is None:
            return None
        wanted = config.cycle.val * config.accumulation
        count = min(wanted, max(1, self.val_windows.count // config.micro_batch))
        loader = BatchLoader(
            self.val_windows, micro_batch=config.micro_batch, accumulation=1, position=0, device=self.device
        )
        losses = torch.zeros(count, device=self.device)
        self.model.eval()
        for index in range(count):
            inputs, targets = loader.next()
            with self._autocast():
                losses[index] = self.forward(inputs, targets)
        self.model.train()
        return losses

    def _autocast(self) -> contextlib.AbstractContextManager:
        kinds = {"fp16": torch.float16, "bf16": torch.bfloat16}
        kind = kinds.get(self.precision)
        return torch.autocast(self.device.type, kind) if kind else contextlib.nullcontext()

    def _new_cycle(self) -> _Cycle:
        steps = self.config.cycle.train
        losses, norms = torch.zeros(2, steps, device=self.device)
        return _Cycle(self.step, measure.mark(self.device), [], losses, norms)

    def _report(self, cycle: _Cycle) -> None:
        """Read a finished cycle's numbers off the device and hand them on."""
        config = self.config
        measure.wait_for(cycle.end)
        moments = [cycle.start, *cycle.marks]
        steps = [measure.seconds_between(a, b) for a, b in itertools.pairwise(moments)]
        self.step_seconds += steps
        self.data_wait += cycle.data_wait
        losses = cycle.losses[: len(steps)].tolist()
        val_losses = [] if cycle.val_losses is None else cycle.val_losses.tolist()
        val_tokens = len(val_losses) * config.micro_batch * config.model.context_length
        self.val_tokens += val_tokens
        seconds = measure.seconds_between(cycle.start, cycle.end)
        train_seconds = measure.seconds_between(cycle.start, cycle.trained)
        cycle_tokens = len(steps) * config.step_tokens
        step = cycle.first_step + len(steps)
        train_tokens = step * config.step_tokens
        totals = self.data.manifest.splits["train"]
        report = CycleReport(
            step=step,
            batches=step + self.val_tokens // config.step_tokens,
            train_loss=sum(losses) / len(losses),
            val_loss=sum(val_losses) / len(val_losses) if val_losses else None,
            train_tokens=train_tokens,
            val_tokens=self.val_tokens,
            books=train_tokens * totals["books"] / totals["tokens"],
            seconds=seconds,
            train_seconds=train_seconds,
            data_wait_seconds=cycle.data_wait,
            elapsed=self._elapsed(),
            cycle_tokens=cycle_tokens + val_tokens,
            epoch_seconds=totals["tokens"] / (cycle_tokens / train_seconds),
            learning_rate=cycle.rate,
            gradient_norm=float(cycle.norms[len(steps) - 1]),
            step_losses=losses,
        )
        self.reports.append(report)
        self.on_cycle(report)

    def _finite(self) -> bool:
        return all(torch.isfinite(torch.tensor(self.reports[-1].step_losses)))

    def _elapsed(self) -> float:
        return self.elapsed_before + time.perf_counter() - self.begin

    def _progress_fraction(self, total: int | None) -> float:
        """How much of the run has passed, by steps or by the time budget."""
        if total is not None:
            return self.step / total
        assert self.config.time_budget is not None
        return min(1.0, self._elapsed() / self.config.time_budget)

    def _progress(self) -> checkpoint.Progress:
        return checkpoint.Progress(
            step=self.step,
            position=self.position,
            val_tokens=self.val_tokens,
            elapsed=self._elapsed(),
            data_fingerprint=self.data.manifest.fingerprint,
            config=self.config.to_json(),
        )

    def _restore(self, path: Path) -> None:
        progress = checkpoint.read_progress(path)
        if progress.data_fingerprint != self.data.manifest.fingerprint:
            raise UserError(
                f"{path} was trained on other data (fingerprint {progress.data_fingerprint[:12]}) than "
                f"--data {self.config.data} ({self.data.manifest.fingerprint[:12]})."
            )
        checkpoint.load(path, self.model, self.optimizer, self.device)
        self.step, self.position = progress.step, progress.position
        self.val_tokens, self.elapsed_before = progress.val_tokens, progress.elapsed

    def _result(self, outcome: Outcome, reason: str, saved: Path | None) -> RunResult:
        config = self.config
        speed = measure.steady_state(self.step_seconds, config.step_tokens)
        flops = measure.flops_per_token(config.model)
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"
        peak = peak_flops(name)
        rate = speed.tokens_per_second * flops if speed else None
        last = self.reports[-1] if self.reports else None
        trained = sum(self.step_seconds)
        return RunResult(
            outcome=outcome,
            reason=reason,
            steps=self.step,
            throughput=speed,
            memory=memory.peak(self.device),
            train_loss=last.train_loss if last else None,
            val_loss=last.val_loss if last else None,
            train_tokens=self.step * config.step_tokens,
            val_tokens=self.val_tokens,
            books=last.books if last else 0.0,
            seconds=self._elapsed(),
            first_step_seconds=self.first_step_seconds,
            data_wait_fraction=self.data_wait / trained if trained else None,
            flops_per_token=flops,
            flops_formula=measure.FLOPS_FORMULA,
            flops_per_second=rate,
            mfu=rate / (peak * config.workers) if rate and peak else None,
            device=name,
            checkpoint=str(saved) if saved else None,
            data_fingerprint=self.data.manifest.fingerprint,
            loss_curve=[(r.step, r.train_loss, r.val_loss) for r in self.reports],
        )


def pick_device(config: TrainConfig) -> torch.device:
    """The device that ``--device`` means here. Raises ``UserError`` when cuda is asked for and absent."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda was asked for and torch sees no CUDA GPU: use --device auto or --device cpu.")
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if config.device == "auto" else config.device
    if kind == "cpu" and config.precision == "fp16":
        raise UserError("--precision fp16 needs loss scaling on a GPU and this machine has none; use bf16 or fp32.")
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def pick_precision(config: TrainConfig, device: torch.device) -> str:
    """The precision that the config means on this device."""
    if config.precision != "auto":
        return config.precision
    return "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"


def compiled(model: GPT, config: TrainConfig) -> Callable[..., Tensor]:
    """What the loop calls forward: the model, compiled as the config says, for shapes that never change."""
    if config.compile == "whole":
        return torch.compile(model, dynamic=False)
    if config.compile == "blocks":
        for block in model.blocks:
            block.compile(dynamic=False)
    return model
