"""The header of a run, and its report for the terminal, ``summary.md`` and MLflow."""

from pathlib import Path

from rich.markup import escape

from infra.cli.console import console
from infra.cli.table import Report, Table
from infra.cli.units import GB, format_duration
from infra.device.hardware import DeviceInfo
from infra.storage.directory import StorageDir
from pipeline.shards import Manifest
from train.config import AUTO, Batch, ResolvedConfig
from train.estimate.memory import peak_if_known, predict_peak
from train.model_config import format_model
from train.resolved import describe_execution, format_setting
from train.result import RunResult
from train.run_files.lookup import format_resume_command, format_run_argument, format_run_command


def print_header(
    config: ResolvedConfig, manifest: Manifest, run_dir: StorageDir, device_info: DeviceInfo | None = None
) -> None:
    """Print the header of a run: its model, data and batch, and its execution settings.

    ``device_info`` of the device explains why it cannot compile.
    """
    train = manifest.splits["train"]
    tokens = f"{'about ' if config.dataset.stream else ''}{train['tokens']:,} training tokens"
    console.print(f"[bold]{format_model(config.model)}[/bold] on {escape(config.dataset.source)}: {tokens}")
    batch = _batch(config.batch, format_setting("micro_batch", config))
    console.print(f"{batch}; {config.step_tokens:,} tokens per step", markup=False)
    console.print(describe_execution(config), markup=False)
    if config.model.summary:
        console.print(f"model: {config.model.summary}", markup=False)
    chooses_compile = config.requested.execution.compile == AUTO and config.execution.device == "cuda"
    if device_info and device_info.uncompilable and chooses_compile:
        message = "warning: torch.compile is off, so training is slower:"
        console.print(f"[yellow]{message}[/yellow] {escape(device_info.uncompilable)}")
    console.print(f"folder: {run_dir}", markup=False)


def _batch(batch: Batch, micro_batch: str) -> str:
    """``global batch 8 = micro-batch 8 (auto) x accumulation 1 x 1 worker``."""
    workers = f"{batch.workers} worker{'s' * (batch.workers > 1)}"
    factors = f"micro-batch {micro_batch} x accumulation {batch.accumulation} x {workers}"
    return f"global batch {batch.global_batch} = {factors}"


def run_report(
    config: ResolvedConfig, result: RunResult, run_dir: StorageDir, memory_limit: int | None = None
) -> Report:
    """The report of a run in ``run_dir``, for its last lines on the terminal, ``summary.md`` and MLflow."""
    execution = config.execution
    settings = (
        f"Settings: {_batch(config.batch, str(config.batch.micro_batch))} (sequences), precision "
        f"{execution.precision}, attention {result.attention or execution.attention}, compile {execution.compile}, "
        f"loss {execution.loss}. Device: {result.device}. FLOPs: {result.flops_formula}."
    )
    rows = Table("", ("result", "value"), detail_rows(config, result))
    memory = [memory_table(config, result)] if peak_if_known(config) else []
    return Report(summary_fields(config, result, run_dir, memory_limit), [rows, *memory, settings])


def summary_fields(
    config: ResolvedConfig, result: RunResult, run_dir: StorageDir, memory_limit: int | None
) -> list[tuple[str, str]]:
    """The first lines of a run's report, by name."""
    speed = result.throughput
    speed_text = f"not measured: {result.impossible or 'fewer than three steps after warm-up'}"
    if speed:
        speed_text = str(speed.estimate) + (f", MFU {result.mfu:.1%}" if result.mfu else "")
    limit = f" of {memory_limit / GB:.2f} GB" if memory_limit else ""
    peak = peak_if_known(config)
    predicted = f" (predicted {peak.total / GB:.2f} GB)" if peak else ""
    loss_text = "no cycle completed"
    if result.train_loss is not None:
        validation = "" if result.val_loss is None else f", validation {result.val_loss:.3f}"
        loss_text = f"training {result.train_loss:.3f}{validation} nats/token"
    return [
        (
            "Run",
            f"{format_model(config.model)} on `{Path(config.dataset.source).name}`; {result.outcome}: {result.reason}",
        ),
        ("Tokens/s", speed_text),
        ("Peak memory", f"{result.memory.process / GB:.2f} GB{limit}{predicted}"),
        ("Loss", loss_text),
        ("Next", next_step(config, result, run_dir)),
    ]


def next_step(config: ResolvedConfig, result: RunResult, run_dir: StorageDir) -> str:
    """The next step after a run: a command, or a sentence."""
    if result.diagnosis and result.diagnosis.advice:
        command = result.diagnosis.command
        return result.diagnosis.advice + (f"`{command}`" if command else "")
    match result.outcome, bool(result.checkpoint):
        case "interrupted", True:
            return f"resume with: `{format_resume_command(run_dir)}`"
        case "interrupted", False:
            return "no checkpoint was saved; start again with another --name, and with --keep-checkpoints above 0"
        case "diverged", True:
            return (
                "resume from the last checkpoint before the divergence with a lower learning rate: "
                f"`{format_resume_command(run_dir)} --learning-rate ...`"
            )
        case "diverged", False:
            optimization = config.optimization
            return (
                "no checkpoint was saved; start again with another --name, and with --learning-rate below "
                f"{optimization.learning_rate:g} or, in a long run, --warmup-steps above {optimization.warmup_steps}"
            )
        case _, False:
            return f"run it again with `{format_run_command(run_dir / 'config.json')}`"
    if result.sample is not None:
        return f'`python -m train.generate --checkpoint {format_run_argument(run_dir)} --prompt "In the beginning"`'
    return f"`python -m train.export --checkpoint {format_run_argument(run_dir)} --to exported`"


def detail_rows(config: ResolvedConfig, result: RunResult) -> list[tuple[str, str]]:
    """The details of a run's result as rows of a name and a value with its unit."""
    rows: list[tuple[str, str]] = []
    if result.too_large:
        failed = ", ".join(map(str, result.too_large))
        rows.append(("micro-batch", f"{config.batch.micro_batch}; {failed} did not fit"))
    if speed := result.throughput:
        rows.append(("measurement", f"median of {speed.steps} steps after {speed.warmup_steps} of warm-up"))
        utilization = f"{(result.flops_per_second or 0) / 1e12:,.3f} TFLOP/s"
        utilization += "" if result.mfu else f"; MFU unknown: no peak FLOP/s listed for {result.device!r}"
        if result.hfu:
            utilization += f"; HFU {result.hfu:.1%} including recomputation"
        if result.matmul_utilisation:
            utilization += f"; {result.matmul_utilisation:.1%} of the matmul rate measured by infra.doctor"
        rows.append(("utilization", utilization))
    if joules := result.joules_per_million_tokens:
        rows.append(("energy", f"{joules / 1e3:,.3g} kJ per million tokens (GPU only)"))
    if result.val_perplexity is not None:
        bits = [("byte", result.val_bits_per_byte), ("character", result.val_bits_per_character)]
        bits_text = "".join(f"; {value:.3f} bits per {unit}" for unit, value in bits if value is not None)
        perplexity = f"perplexity {result.val_perplexity:,.1f} over {config.model.vocab_size:,} token ids"
        rows.append(("validation", perplexity + bits_text))
    total = result.train_tokens + result.val_tokens
    tokens = f"{result.train_tokens:,} training + {result.val_tokens:,} validation = {total:,} in total"
    rows += [("tokens seen", tokens), ("books seen", f"{result.books:,.1f}")]
    first = "" if result.first_step_seconds is None else f"; first step after {result.first_step_seconds:.1f} s"
    rows.append(("time", f"{format_duration(round(result.seconds, 1))}{first}"))
    if result.data_wait_fraction is not None and result.optimizer_fraction is not None:
        wait, optimizer = result.data_wait_fraction, result.optimizer_fraction
        compute = 1 - wait - optimizer
        step = f"{compute:.1%} compute, {optimizer:.1%} optimizer, {wait:.2%} waiting for data"
        if result.encoded_on:
            total = sum(result.encoded_on.values())
            percentages = [f"{node} ({tokens / total:.0%})" for node, tokens in sorted(result.encoded_on.items())]
            step += f"; {result.machine} read books encoded on {', '.join(percentages)}"
        rows.append(("step time", step))
    if result.paused_seconds:
        pause = format_duration(round(result.paused_seconds))
        rows.append(("pause", f"the process was paused for {pause}, which is excluded from speed and step time"))
    if result.diagnosis:
        rows += result.diagnosis.rows
    if result.checkpoint:
        rows.append(("checkpoint", result.checkpoint))
    if result.sample:
        rows.append(("sample", " ".join(result.sample.split())))
    return rows


def memory_table(config: ResolvedConfig, result: RunResult) -> Table:
    """The predicted peak by part, with the measurements of sums and of the parts that can be measured."""
    breakdown, memory = predict_peak(config), result.memory
    predicted, measured = breakdown.parts(), dict(result.shortage.held) if result.shortage else {}
    if memory.allocated is not None and memory.reserved is not None:
        predicted |= {"allocated": breakdown.allocated, "reserved": breakdown.reserved}
        measured |= {"allocated": memory.allocated, "reserved": memory.reserved}
        measured["unused"] = memory.reserved - memory.allocated
        if memory.process_source == "nvml":
            measured["context"] = memory.process - memory.reserved
    names = {
        "nvml": "NVML", "reserved": "reserved; not available from NVML", "rss": "resident set",
        "rss-of-process": "resident set, including memory from before this run",
    }  # fmt: skip
    process = f"process ({names[memory.process_source]})"
    predicted[process], measured[process] = breakdown.total, memory.process
    lines = [
        (part, *("" if size is None else f"{size / GB:.3f}" for size in (predicted.get(part), measured.get(part))))
        for part in predicted
        if predicted[part] or measured.get(part)
    ]
    return Table(f"Peak memory ({breakdown.moment})", ("part", "predicted (GB)", "measured (GB)"), lines)


def print_result(report: Report, result: RunResult, in_mlflow: str) -> None:
    """Print the report of a run, and its link in MLflow."""
    report.show()
    if result.outcome == "finished":
        minutes = (result.seconds + (result.first_step_seconds or 0.0)) / 60
        console.print(f"Training completed in {minutes:.2f} minutes")
    console.print(in_mlflow, markup=False)
