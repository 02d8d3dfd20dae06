"""How a run is told: its first lines, and the report that the terminal, ``summary.md`` and MLflow show."""

from pathlib import Path

from rich.markup import escape

from infra.console import console
from infra.hardware import DeviceFacts
from infra.storage_dir import StorageDir
from infra.table import Part, Report
from infra.units import GB, format_duration
from pipeline.shards import Manifest
from train.checkpoint.find import resume_run, run_argument, run_with
from train.config import TrainConfig
from train.estimate.memory import known_peak, predict_peak
from train.model_config import format_model
from train.resolve import choices, said
from train.result import RunResult


def print_header(
    config: TrainConfig, asked: TrainConfig, manifest: Manifest, place: StorageDir, facts: DeviceFacts | None = None
) -> None:
    """Print what is about to be trained, with the arithmetic of the batch, and what was decided for the device.

    ``config`` is ``asked`` as it is resolved; of the ``facts`` about the device it is said why it cannot compile.
    """
    train = manifest.splits["train"]
    tokens = f"{'about ' if config.stream else ''}{train['tokens']:,} training tokens"
    console.print(f"[bold]{format_model(config.model)}[/bold] on {escape(config.source)}: {tokens}")
    console.print(
        f"batch: {config.global_batch} sequences = {said('micro_batch', config, asked)} per micro-batch x "
        f"{config.accumulation} accumulated x {config.workers} worker{'s' * (config.workers > 1)}; "
        f"{config.step_tokens:,} tokens per step"
    )
    console.print(choices(config, asked), markup=False)
    if config.model.described:
        console.print(f"the model: {config.model.described}", markup=False)
    if facts and facts.uncompilable and asked.compile == "auto" and config.device == "cuda":
        console.print(f"[yellow]not compiled, which is slower:[/yellow] {escape(facts.uncompilable)}")
    console.print(f"folder: {place}", markup=False)


def run_report(config: TrainConfig, result: RunResult, place: StorageDir, memory_limit: int | None = None) -> Report:
    """What a run at ``place`` has found, for its last lines on the terminal, ``summary.md`` and its page in MLflow."""
    batch = (
        f"Batch: {config.global_batch} sequences = {config.micro_batch} x {config.accumulation} accumulated x "
        f"{config.workers} workers. Precision {config.precision}, attention {result.attention or config.attention}, "
        f"compile {config.compile}, loss {config.loss}. Device: {result.device}. FLOPs: {result.flops_formula}."
    )
    rows = Part("", ("", ""), details(config, result))
    memory = [memory_part(config, result)] if known_peak(config) else []
    return Report(opening_lines(config, result, place, memory_limit), [rows, *memory, batch])


def opening_lines(
    config: TrainConfig, result: RunResult, place: StorageDir, memory_limit: int | None
) -> list[tuple[str, str]]:
    speed = result.throughput
    fast = f"not measured: {result.impossible or 'fewer than three steps after warm-up'}"
    if speed:
        fast = str(speed.estimate) + (f", MFU {result.mfu:.1%}" if result.mfu else "")
    limit = f" of {memory_limit / GB:.2f} GB" if memory_limit else " GB"
    known = known_peak(config)
    expected = f" (predicted {known.total / GB:.2f})" if known else ""
    good = "no cycle was completed"
    if result.train_loss is not None:
        held_out = "" if result.val_loss is None else f", validation {result.val_loss:.3f}"
        good = f"training {result.train_loss:.3f}{held_out}"
    return [
        ("What", f"{format_model(config.model)} on `{Path(config.source).name}`; {result.outcome}: {result.reason}"),
        ("Tokens/s", fast),
        ("Memory", f"{result.memory.process / GB:.2f}{limit}{expected}"),
        ("Loss", good),
        ("Next", next_step(config, result, place)),
    ]


def next_step(config: TrainConfig, result: RunResult, place: StorageDir) -> str:
    """What to do after a run: a command, or a sentence."""
    if result.diagnosis and result.diagnosis.advice:
        command = result.diagnosis.command
        return result.diagnosis.advice + (f"`{command}`" if command else "")
    match result.outcome, bool(result.checkpoint):
        case "interrupted", True:
            return f"continue with: `{resume_run(place)}`"
        case "interrupted", False:
            return "no checkpoint was kept: start again with another --name, and with --keep-checkpoints above 0"
        case "diverged", True:
            return (
                "the last good checkpoint is kept; continue from it with a lower learning rate: "
                f"`{resume_run(place)} --learning-rate ...`"
            )
        case "diverged", False:
            return (
                "no checkpoint was kept: start again with another --name, and with --learning-rate below "
                f"{config.learning_rate:g} or, in a long run, --warmup-steps above {config.warmup_steps}"
            )
        case _, False:
            return f"repeat it with `{run_with(place / 'config.json')}`"
    if result.sample is not None:
        return f'`python -m train.generate --checkpoint {run_argument(place)} --prompt "In the beginning"`'
    return f"`python -m train.export --checkpoint {run_argument(place)} --to exported`"


def details(config: TrainConfig, result: RunResult) -> list[tuple[str, str]]:
    """The rest of a run's result as rows of a name and a value with its unit."""
    rows: list[tuple[str, str]] = []
    if result.too_large:
        failed = ", ".join(map(str, result.too_large))
        rows.append(("micro-batch", f"{config.micro_batch}; {failed} did not fit"))
    if speed := result.throughput:
        rows.append(("measured", f"the median of {speed.steps} steps after {speed.warmup_steps} of warm-up"))
        done = f"{(result.flops_per_second or 0) / 1e12:,.3f} TFLOP/s"
        done += "" if result.mfu else f"; no MFU: the peak of {result.device!r} is not known"
        if result.hfu:
            done += f"; HFU {result.hfu:.1%} with what is computed again"
        if result.matmul_utilisation:
            done += f"; {result.matmul_utilisation:.1%} of the matmul that infra.doctor measured here"
        rows.append(("arithmetic", done))
    if joules := result.joules_per_million_tokens:
        rows.append(("energy", f"{joules / 1e3:,.3g} kJ per million tokens, of the GPU alone"))
    if result.val_perplexity is not None:
        bits = [("byte", result.val_bits_per_byte), ("character", result.val_bits_per_character)]
        per = "".join(f"; {value:.3f} bits per {unit}" for unit, value in bits if value is not None)
        rows.append(
            ("validation", f"perplexity {result.val_perplexity:,.1f} over {config.model.vocabulary:,} ids{per}")
        )
    total = result.train_tokens + result.val_tokens
    seen = f"{result.train_tokens:,} training + {result.val_tokens:,} validation = {total:,} in all"
    rows += [("tokens seen", seen), ("books seen", f"{result.books:,.1f}")]
    first = "" if result.first_step_seconds is None else f"; first step after {result.first_step_seconds:.1f} s"
    rows.append(("time", f"{format_duration(round(result.seconds, 1))}{first}"))
    if result.data_wait_fraction is not None and result.optimizer_fraction is not None:
        wait, optimizer = result.data_wait_fraction, result.optimizer_fraction
        compute = 1 - wait - optimizer
        step = f"{compute:.1%} compute, {optimizer:.1%} optimizer, {wait:.2%} waiting for data"
        if result.encoded_on:
            total = sum(result.encoded_on.values())
            shares = [f"{node} ({tokens / total:.0%})" for node, tokens in sorted(result.encoded_on.items())]
            step += f": {result.machine} waited for books encoded on {', '.join(shares)}"
        rows.append(("step time", step))
    if result.paused_seconds:
        slept = format_duration(round(result.paused_seconds))
        rows.append(("paused", f"the process stood still for {slept}, which neither speed nor step time counts"))
    if result.diagnosis:
        rows += result.diagnosis.rows
    if result.checkpoint:
        rows.append(("checkpoint", result.checkpoint))
    if result.sample:
        rows.append(("sample", " ".join(result.sample.split())))
    return rows


def memory_part(config: TrainConfig, result: RunResult) -> Part:
    """The predicted peak by part, with what was measured: of the parts that can be told apart, and of their sums."""
    anatomy, memory = predict_peak(config), result.memory
    predicted, measured = anatomy.parts(), dict(result.shortage.held) if result.shortage else {}
    if memory.allocated is not None and memory.reserved is not None:
        predicted |= {"allocated": anatomy.allocated, "reserved": anatomy.reserved}
        measured |= {"allocated": memory.allocated, "reserved": memory.reserved}
        measured["unused"] = memory.reserved - memory.allocated
        if memory.process_source == "nvml":
            measured["context"] = memory.process - memory.reserved
    names = {
        "nvml": "NVML", "reserved": "reserved; NVML does not report it", "rss": "resident set",
        "rss-of-process": "resident set, also before this run",
    }  # fmt: skip
    process = f"process ({names[memory.process_source]})"
    predicted[process], measured[process] = anatomy.total, memory.process
    lines = [
        (part, *("" if size is None else f"{size / GB:.3f}" for size in (predicted.get(part), measured.get(part))))
        for part in predicted
        if predicted[part] or measured.get(part)
    ]
    return Part(f"Memory in GB at its peak, {anatomy.moment}", ("part", "predicted", "measured"), lines)


def print_result(report: Report, result: RunResult, in_mlflow: str) -> None:
    """Print the result of a run, and where to find it in MLflow."""
    report.show()
    if result.outcome == "finished":
        minutes = (result.seconds + (result.first_step_seconds or 0.0)) / 60
        console.print(f"Training completed in {minutes:.2f} minutes")
    console.print(in_mlflow, markup=False)
