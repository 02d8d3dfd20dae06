"""Build the result of a finished loop: speed, FLOP/s, memory, losses, and the amount of data."""

import socket
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from infra.device.gpu_models import peak_flops
from pipeline.encoding.tokenizer import Tokenizer
from train.config import Execution, ResolvedConfig
from train.data.source import TrainingData
from train.estimate.flops import PF_DAY, utilization
from train.intervals import MIN_BATCHES
from train.loop import memory, throughput
from train.loop.validation import Text, bits_per, id_counts, perplexity, unigram_loss
from train.model_config import ModelSpec
from train.result import CycleReport, Outcome, RunResult, Throughput
from train.run_files.progress import RunState

MIN_PAUSE_SECONDS = 5.0
"""Length of a step from which it counts as a pause of the process or the machine, if it also took ten times as long as
the median step."""


@dataclass
class StepTimes:
    """Times of this process's steps, in seconds, and the reports of its cycles."""

    steps: list[float] = field(default_factory=list)
    """Seconds of each step."""
    data_wait: list[float] = field(default_factory=list)
    """Seconds that each step waited for its batches."""
    optimizer: list[float] = field(default_factory=list)
    """Seconds of clipping and the optimizer in each step."""
    micro_batches: list[list[float]] = field(default_factory=list)
    """Seconds of each micro-batch of each step; a step's list is empty if the steps of its cycle are short."""
    unreported_losses: list[float] = field(default_factory=list)
    """Losses of the steps after the last cycle, if the run ended before the next cycle did."""
    first_step: float | None = None
    """Seconds from the start of the loop to the end of its first step, which include compilation."""
    reports: list[CycleReport] = field(default_factory=list)
    """Reports of the cycles that ended in this process."""


def measure_speed(times: StepTimes, step_tokens: int, workers: int) -> Throughput | None:
    """Return the throughput of the steady state: of the steps, or of the micro-batches of a few long steps."""
    of_steps = throughput.steady_state(times.steps, step_tokens)
    if of_steps and of_steps.steps >= MIN_BATCHES:
        return of_steps
    samples = throughput.step_samples(times.micro_batches, times.optimizer, workers)
    of_micro_batches = throughput.steady_state(samples, step_tokens)
    if of_micro_batches is None or (of_steps and of_steps.steps >= of_micro_batches.steps):
        return of_steps
    return replace(of_micro_batches, unit="micro-batch")


def build_result(
    config: ResolvedConfig,
    data: TrainingData,
    device: torch.device,
    state: RunState,
    times: StepTimes,
    ending: tuple[Outcome, str],
) -> RunResult:
    """Return the result of a run with the ``state`` and ``times`` of its end; ``ending`` is its outcome and the
    reason."""
    manifest = data.manifest
    steady = measure_speed(times, config.step_tokens, config.batch.workers)
    formula = config.model.flops_formulas()[0]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    implausible_reason = (
        throughput.implausible_reason(steady, config.model, config.execution, config.batch.workers, name)
        if steady
        else ""
    )
    speed = None if implausible_reason else steady
    last = times.reports[-1] if times.reports else None
    warmup_steps = min(1, len(times.steps) - 1) if speed and speed.unit == "micro-batch" else 0
    warmup_steps = speed.warmup_steps if speed and speed.unit == "step" else warmup_steps
    step = throughput.median_batch_seconds(times.steps[warmup_steps:])
    pauses = [
        seconds - step
        for seconds in times.steps[warmup_steps:]
        if speed and seconds > max(MIN_PAUSE_SECONDS, 10 * step)
    ]
    train_tokens = state.step * config.step_tokens
    totals = manifest.splits["train"]
    val_loss = last.val_loss if last else None
    bits_per_byte = bits_per_character = loss_without_inputs = None
    if val_loss is not None and data.validation is not None:
        counts = id_counts(data.validation, state.val_windows, config.model.vocab_size)
        loss_without_inputs = unigram_loss(counts)
        bits_per_byte, bits_per_character = _bits_per_unit(val_loss, counts, data.tokenizer)
    result = RunResult(
        outcome=ending[0],
        reason=ending[1],
        steps=state.step,
        throughput=None,
        implausible_reason=implausible_reason,
        memory=memory.peak(device),
        first_loss=times.reports[0].first_loss if times.reports else None,
        train_loss=last.train_loss if last else None,
        val_loss=val_loss,
        train_tokens=train_tokens,
        val_tokens=state.val_tokens,
        val_windows=state.val_windows if val_loss is not None else 0,
        books_seen=train_tokens * totals["books"] // totals["tokens"],
        train_seconds=state.train_seconds,
        first_step_seconds=times.first_step,
        data_wait_fraction=throughput.median_batch_seconds(times.data_wait[warmup_steps:]) / step if step else None,
        optimizer_fraction=throughput.median_batch_seconds(times.optimizer[warmup_steps:]) / step if step else None,
        paused_seconds=sum(pauses),
        flops_per_token=formula.flops,
        petaflop_days=train_tokens * formula.flops / PF_DAY,
        flops_formula=formula.text,
        flops_per_second=None,
        mfu=None,
        device=name,
        machine=socket.gethostname(),
        checkpoint=None,
        data_fingerprint=manifest.fingerprint,
        unreported_losses=times.unreported_losses,
        loss_curve=[(r.step, r.train_loss, r.val_loss) for r in times.reports],
        val_perplexity=perplexity(val_loss),
        unigram_loss=loss_without_inputs,
        val_bits_per_byte=bits_per_byte,
        val_bits_per_character=bits_per_character,
    )
    return with_throughput(result, speed, config.model, config.execution, config.batch.workers)


def with_throughput(
    result: RunResult, throughput: Throughput | None, model: ModelSpec, execution: Execution, workers: int
) -> RunResult:
    """Return ``result`` with this speed, and with the FLOP/s and the utilization that follow from it."""
    if throughput is None:
        return replace(result, throughput=None, flops_per_second=None, mfu=None, hfu=None)
    speed, peak = throughput.tokens_per_second, peak_flops(result.device, execution.precision)
    executed = model.executed_flops_per_token(execution.checkpointing)
    recomputes = executed > result.flops_per_token
    return replace(
        result,
        throughput=throughput,
        flops_per_second=speed * result.flops_per_token,
        mfu=utilization(speed, result.flops_per_token, peak, workers),
        hfu=utilization(speed, executed, peak, workers) if recomputes else None,
    )


def _bits_per_unit(val_loss: float, id_counts: np.ndarray, tokenizer: Tokenizer | None) -> list[float | None]:
    """Return ``val_loss`` in bits per byte and per character of the text with ``id_counts``; None without a
    tokenizer."""
    if tokenizer is None:
        return [None, None]
    text = Text.of(id_counts, tokenizer)
    return [bits_per(val_loss, text.tokens, units) for units in (text.bytes, text.chars)]
