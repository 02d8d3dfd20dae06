"""The header of a run, and its report for the terminal, ``summary.md`` and MLflow."""

import textwrap
from pathlib import Path

from rich.markup import escape

from infra.cli.console import console
from infra.cli.table import Report, Table
from infra.cli.units import GB, format_count, format_duration
from infra.device.hardware import DeviceInfo
from infra.facts import Fact
from infra.storage.directory import StorageDir
from pipeline.shards import Manifest
from train.config import (
    AUTO,
    CUDA_GRAPHS,
    Batch,
    DatasetConfig,
    DurationConfig,
    Execution,
    ExecutionConfig,
    ResolvedConfig,
    Step,
)
from train.data.sources import source_of
from train.estimate.breakdown import MemoryBreakdown
from train.estimate.memory import peak_if_known
from train.intervals import Estimate
from train.model_config import ModelSpec
from train.reporting import next_steps
from train.result import Memory, RunResult

SAMPLE_CHARS = 160
"""Characters of a sample on the terminal, two lines; ``summary.md`` has all of it."""


def print_header(
    config: ResolvedConfig, manifest: Manifest, run_dir: StorageDir, device_info: DeviceInfo | None = None
) -> None:
    """Print the header of a run: its model, data and batch, and its execution settings.

    Warnings from ``device_info`` explain what the device does not support.
    """
    train = manifest.splits["train"]
    tokens = f"{'' if source_of(config.dataset).has_epoch else 'about '}{train['tokens']:,} training tokens"
    console.print(f"[bold]{config.model.text}[/bold] on {escape(config.dataset.source)}: {tokens}")
    batch = _batch(config.batch, config.format_setting("micro_batch"))
    console.print(f"{batch}; {config.step_tokens:,} tokens per step", markup=False)
    console.print(config.describe_execution(), markup=False)
    if config.model.summary:
        console.print(f"model: {config.model.summary}", markup=False)
    if device_info:
        print_device_lines(config, device_info)
    console.print(f"folder: {run_dir}", markup=False)


def print_device_lines(config: ResolvedConfig, device_info: DeviceInfo) -> None:
    """Print what the device does not support, and what ``config`` uses instead."""
    for line in device_lines(config.requested.execution, config.execution, device_info):
        console.print(line, style="yellow", markup=False)


def device_lines(requested: ExecutionConfig, execution: Execution, device_info: DeviceInfo) -> list[str]:
    """Return one line for each setting that was chosen because of what the device does not support."""
    if execution.device == "cpu":
        is_fallback = requested.device == AUTO and device_info.gpu_absence
        return [f"device: cpu, because {device_info.gpu_absence}"] if is_fallback else []
    lines: list[str] = []
    if device_info.compile_blocker and requested.compile == AUTO:
        lines.append(f"warning: torch.compile is off, so training is slower: {device_info.compile_blocker}")
    if requested.compile == AUTO and execution.compile in CUDA_GRAPHS:
        lines.append(
            f"compile: {execution.compile} (CUDA graphs), because launching this model's kernels one by one takes "
            "longer than computing them"
        )
    if requested.precision == AUTO and not device_info.bf16:
        reason = "with loss scaling, because" if execution.precision == "fp16" else "because"
        lines.append(f"precision: {execution.precision} {reason} {device_info.name} does not multiply bf16 matrices")
    if requested.allocator == AUTO and device_info.allocator_blocker:
        lines.append(f"allocator: torch's default instead of expandable segments: {device_info.allocator_blocker}")
    if device_info.gpu_note:
        lines.append(f"GPU: {device_info.gpu_note}")
    if device_info.pinned_blocker:
        lines.append(f"warning: host memory cannot be pinned, so copies are slower: {device_info.pinned_blocker}")
    if device_info.memory_cap_reason:
        cap = f"{device_info.memory / GB:.1f} GB"
        lines.append(f"memory: at most the free {cap} are used, because {device_info.memory_cap_reason}")
    if device_info.nvml_failure:
        lines.append(f"NVML: clocks, power and other processes may be unknown: {device_info.nvml_failure}")
    return lines


def _batch(batch: Batch, micro_batch: str) -> str:
    """Format ``global batch 8 = micro-batch 8 (auto) x accumulation 1 x 1 worker``."""
    workers = f"{batch.workers} worker{'s' * (batch.workers > 1)}"
    factors = f"micro-batch {micro_batch} x accumulation {batch.accumulation} x {workers}"
    return f"global batch {batch.global_batch} = {factors}"


def run_report(
    step: Step,
    dataset: DatasetConfig,
    duration: DurationConfig,
    result: RunResult,
    run_dir: StorageDir,
    memory_limit: int | None = None,
) -> Report:
    """Build the report of the run in ``run_dir`` for the terminal, ``summary.md`` and MLflow."""
    model, batch, execution = step.model, step.batch, step.execution
    settings = (
        f"Settings: {_batch(batch, str(batch.micro_batch))} (sequences), precision "
        f"{execution.precision}, attention {result.attention or execution.attention}, compile {execution.compile}, "
        f"loss {execution.loss}. Device: {result.device}. FLOPs: {result.flops_formula}."
    )
    summary = [
        ("Run", f"{model.text} on `{Path(dataset.source).name}`; {result.outcome}: {result.reason}"),
        *result_rows(result, memory_limit),
        *prediction_rows(result),
        ("Time", time_fact(result)),
        ("Next", next_steps.after_run(step, duration, result, run_dir)),
    ]
    details, peak = Table("", ("result", "value"), detail_rows(model, batch, result)), peak_if_known(step)
    findings = [Table("", ("finding", "value"), result.diagnosis.rows)] if result.diagnosis else []
    memory = [memory_table(peak, result)] if peak else []
    # On a CPU the table of a run that fits teaches nothing, because most parts cannot be measured.
    printed = memory if result.shortage or result.memory.capacity else []
    appendix = [details, *(table for table in memory if table not in printed), settings]
    return Report(summary, [*findings, *printed], unprinted(model, result), appendix)


def time_fact(result: RunResult) -> Fact:
    """Return the time by the clock from the start of the loop to its end, and how much of it the first step took."""
    first = result.first_step_seconds
    return Fact.joined(
        format_duration(round(result.train_seconds + (first or 0.0), 1)),
        Fact.of("time/first_step_seconds", first, "first step after {:.1f} s"),
    )


def speed_fact(speed: Estimate | None, name: str = "result/tokens_per_second") -> Fact:
    """Return the speed in tokens per second with its interval, as the metric ``name``; empty if it was not measured."""
    if speed is None:
        return Fact("", {})
    return Fact(str(speed), {name: speed.middle, f"{name}_low": speed.low, f"{name}_high": speed.high})


def memory_fact(peak_bytes: float | None, limit_bytes: float | None = None) -> Fact:
    """Return the peak memory of a process in GB and its limit; empty if it was not measured."""
    limit = limit_bytes and limit_bytes / GB
    return Fact.of("memory/process_gb", peak_bytes and peak_bytes / GB, "{:.2f} GB", limit=limit)


def peak_text(result: RunResult, memory_limit: int | None = None) -> Fact:
    """Return the peak memory of a run's process with the predicted peak and the memory that it could use: its limit
    (``memory_limit`` in bytes), or all memory of a GPU."""
    predicted = result.predicted_memory
    prediction = Fact.of("memory/predicted_gb", predicted and predicted / GB, "(predicted {:.2f} GB)")
    available = memory_limit or result.memory.capacity
    measured = memory_fact(result.memory.process, available)
    if available:
        measured = Fact.joined(measured, f"{result.memory.process / available:.1%}", separator=", ")
    return Fact.joined(measured, prediction, separator=" ")


def allocator_facts(memory: Memory) -> dict[str, Fact]:
    """Return the peaks of torch's GPU allocator in GB, by name: allocated and reserved; empty on a CPU."""
    sizes = {"allocated": memory.allocated, "reserved": memory.reserved}
    return {name: Fact.of(f"memory/{name}_gb", size / GB, "{:.3f}") for name, size in sizes.items() if size is not None}


def result_rows(result: RunResult, memory_limit: int | None) -> list[tuple[str, str]]:
    """Return the speed, memory and loss of a run: (name, text)."""
    speed, loss = result.throughput, "no cycle completed"
    speed_text = f"not measured: {result.implausible_reason or 'fewer than three steps after warm-up'}"
    if speed:
        mfu = Fact.of("result/mfu", result.mfu, "MFU {:.1%}")
        speed_text = Fact.joined(speed_fact(speed.estimate), mfu, separator=", ")
    if result.train_loss is not None:
        validation = Fact.of("result/val_loss", result.val_loss, "validation {:.3f}")
        losses = Fact.joined(f"training {result.train_loss:.3f}", validation, separator=", ")
        loss = Fact.joined(losses, "nats/token", separator=" ")
    return [("Tokens/s", speed_text), ("Peak memory", peak_text(result, memory_limit)), ("Loss", loss)]


MIN_TOKENS_DEVIATION = 0.01
"""Minimum relative difference of trained and predicted tokens for which the prediction is adjusted."""


def prediction_rows(result: RunResult) -> list[tuple[str, str]]:
    """Return the comparison of the loss with the prediction of the run's search: (name, text); empty without one.

    The time of a run includes validation and checkpoints, so that it often trains on fewer tokens than predicted.
    """
    prediction, measured = result.loss_prediction, result.val_loss
    if prediction is None or measured is None:
        return []
    tokens = result.train_tokens / prediction.train_tokens
    is_adjusted = abs(tokens - 1) >= MIN_TOKENS_DEVIATION
    loss = prediction.after(result.train_tokens if is_adjusted else prediction.train_tokens)
    verdict = "above the interval" if measured > loss.high else "within the interval"
    if measured < loss.low:
        verdict = "below the interval"
    metrics = {"prediction/loss": loss.middle, "prediction/loss_low": loss.low, "prediction/loss_high": loss.high}
    interval = f"{loss.middle:.3f} (95% CI {loss.low:.3f} to {loss.high:.3f})"
    windows = prediction.val_windows
    return [("Prediction", Fact.joined(
        Fact(f"{interval}, measured {measured:.3f}, {verdict}", metrics),
        f"adjusted by {loss.middle - prediction.loss:+.3f} for {tokens:.1%} of the predicted tokens" * is_adjusted,
        f"validated on {result.val_windows:,} windows, the search on {windows:,}" * (windows != result.val_windows),
    ))]  # fmt: skip


def unprinted(model: ModelSpec, result: RunResult) -> list[Fact]:
    """Return the metrics of a run that its report does not print: FLOPs by each formula, and details of the memory.

    ``result/mfu`` uses the model's first FLOPs formula; ``result/mfu_causal`` counts only half of the attention.
    """
    flops_by_formula = {formula.name: formula.flops for formula in model.flops_formulas()}
    causal, predicted, memory = flops_by_formula.get("causal"), result.predicted_memory, result.memory
    return [
        *allocator_facts(memory).values(),
        Fact.of("memory/allocator_retries", memory.allocator_retries),
        Fact.of("memory/prediction_error", predicted and predicted / memory.process - 1),
        Fact.of("result/mfu_causal", result.mfu and causal and result.mfu * causal / result.flops_per_token),
        *(
            Fact.of(f"result/flops_per_token_{name.partition(',')[0]}", flops)
            for name, flops in flops_by_formula.items()
        ),
    ]


def detail_rows(model: ModelSpec, batch: Batch, result: RunResult) -> list[tuple[str, str]]:
    """Return the details of a run's result as rows of a name and a value with its unit."""
    rows: list[tuple[str, str]] = []
    if result.failed_micro_batches:
        sizes = ", ".join(map(str, result.failed_micro_batches))
        rows.append(("micro-batch", f"{batch.micro_batch}; {sizes} did not fit"))
    if speed := result.throughput:
        counts = [format_count(number, speed.unit) for number in (speed.steps, speed.warmup_steps)]
        rows.append(("measurement", f"median of {counts[0]} after a warm-up of {counts[1]}"))
        flops = (result.flops_per_second or 0.0) / 1e12
        rows.append(("utilization", Fact.joined(
            Fact.of("result/tflops_per_second", flops, "{:,.3f} TFLOP/s"),
            "" if result.mfu else f"MFU unknown: no peak FLOP/s listed for {result.device!r}",
            Fact.of("result/hfu", result.hfu, "HFU {:.1%} including recomputation"),
            Fact.of("result/matmul_utilization", result.matmul_utilization,
                    "{:.1%} of the matmul rate measured by infra.doctor"),
        )))  # fmt: skip
    compute = Fact.of("result/petaflop_days", result.petaflop_days, "{:.3g} PF-days")
    formula = f"{result.train_tokens:,} tokens x {result.flops_per_token / 1e6:,.1f} MFLOP"
    rows.append(("compute", Fact.joined(compute, formula, separator=" = ")))
    if joules := result.joules_per_million_tokens:
        energy = "{:,.3g} kJ per million tokens (GPU only)"
        rows.append(("energy", Fact.of("result/kilojoules_per_million_tokens", joules / 1e3, energy)))
    if result.val_perplexity is not None:
        val_batches = result.val_windows / batch.global_batch
        perplexity = f"perplexity {{:,.1f}} over {model.vocab_size:,} token ids"
        rows.append(("validation", Fact.joined(
            Fact.of("result/val_perplexity", result.val_perplexity, perplexity),
            Fact.of("result/val_bits_per_byte", result.val_bits_per_byte, "{:.3f} bits per byte"),
            Fact.of("result/val_bits_per_character", result.val_bits_per_character, "{:.3f} bits per character"),
            Fact.of("result/val_windows", result.val_windows or None,
                    f"{{:,}} windows ({val_batches:.3g} global batches)"),
        )))  # fmt: skip
    total = result.train_tokens + result.val_tokens
    tokens = f"{result.train_tokens:,} training + {result.val_tokens:,} validation = {total:,} in total"
    rows += [("tokens seen", tokens), ("books seen", f"{result.books_seen:,}")]
    first_step = Fact.of("time/first_step_seconds", result.first_step_seconds, "first step after {:.1f} s")
    rows.append(("time", Fact.joined(format_duration(round(result.train_seconds, 1)), first_step)))
    if result.data_wait_fraction is not None and result.optimizer_fraction is not None:
        step = Fact.joined(
            f"{1 - result.data_wait_fraction - result.optimizer_fraction:.1%} compute",
            Fact.of("time/optimizer_fraction", result.optimizer_fraction, "{:.1%} optimizer"),
            Fact.of("time/data_wait_fraction", result.data_wait_fraction, "{:.2%} waiting for data"),
            separator=", ",
        )
        if result.encoded_on:
            total = sum(result.encoded_on.values())
            percentages = [f"{node} ({tokens / total:.0%})" for node, tokens in sorted(result.encoded_on.items())]
            step = Fact.joined(step, f"{result.machine} read books encoded on {', '.join(percentages)}")
        rows.append(("step time", step))
    if result.paused_seconds:
        pause = format_duration(round(result.paused_seconds))
        rows.append(("pause", f"the process was paused for {pause}, which is excluded from speed and step time"))
    if result.checkpoint:
        rows.append(("checkpoint", result.checkpoint))
    if result.sample or result.no_sample_reason:
        rows.append(("sample", " ".join((result.sample or f"none: {result.no_sample_reason}").split())))
    return rows


def memory_table(breakdown: MemoryBreakdown, result: RunResult) -> Table:
    """Return the table of the peak memory by part: the prediction, and a measurement if the part can be measured."""
    memory, predicted = result.memory, breakdown.parts()
    measured = dict(result.shortage.bytes_by_part) if result.shortage else {}
    if memory.allocated is not None and memory.reserved is not None:
        predicted |= {"allocated": breakdown.allocated, "reserved": breakdown.reserved}
        measured |= {"allocated": memory.allocated, "reserved": memory.reserved}
        measured["unused"] = memory.reserved - memory.allocated
        if memory.process_source == "nvml":
            measured["context"] = memory.process - memory.reserved
    names = {
        "nvml": "NVML", "device": "increase of the GPU's used memory",
        "reserved": "reserved by torch; not available from NVML", "rss": "resident set",
        "rss-of-process": "resident set, including memory from before this run",
    }  # fmt: skip
    process = f"process ({names[memory.process_source]})"
    predicted[process], measured[process] = breakdown.total, memory.process
    facts = allocator_facts(memory)
    rows = [
        (part, _gigabytes(predicted.get(part)), facts.get(part) or _gigabytes(measured.get(part)))
        for part in predicted
        if predicted[part] or measured.get(part)
    ]
    return Table(f"Peak memory ({breakdown.moment})", ("part", "predicted (GB)", "measured (GB)"), rows)


def _gigabytes(size: int | None) -> str:
    return "" if size is None else f"{size / GB:.3f}"


def print_result(report: Report, result: RunResult, in_mlflow: str) -> None:
    """Print the sample and the report of a run, and the text ``in_mlflow`` with its link."""
    if result.sample:
        console.print(f"Sample: {textwrap.shorten(result.sample, SAMPLE_CHARS)}", markup=False)
    elif result.no_sample_reason:
        console.print(f"No sample: {result.no_sample_reason}", markup=False)
    report.show()
    console.print(in_mlflow, markup=False)
