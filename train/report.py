"""How a run is shown: lines on the terminal, and the run's page in MLflow."""

import json
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.markup import escape

from infra.console import console
from infra.errors import UserError
from infra.hardware import DeviceFacts
from infra.schema import from_json, to_json
from infra.storage import write_text
from infra.storage_dir import StorageDir, WorkingCopy
from infra.table import Part, Report
from infra.thinning import stride
from infra.tracking.key import RunKey
from infra.tracking.lost import held, incomplete, is_complete
from infra.tracking.names import changed, shown
from infra.tracking.store import add_to_page, last_steps
from infra.tracking.tracker import Tracker
from infra.tracking.views import model_link, page_link
from infra.units import GB, format_duration
from pipeline.shards import Manifest, made_by
from train.checkpoint.find import resume_run, run_argument, run_with
from train.checkpoint.run_folder import RunFolder
from train.config import TrainConfig, load_config
from train.estimate.flops import formulas
from train.estimate.memory import known_peak, predict_peak
from train.model_config import format_model
from train.resolve import choices, said
from train.result import RunResult

METRICS = (
    "loss/step", "loss/train", "loss/val", "throughput/tokens_per_second", "progress/train_tokens",
    "optimizer/learning_rate", "optimizer/gradient_norm", "result/tokens_per_second", "result/mfu", "result/val_loss",
    "result/kilojoules_per_million_tokens", "memory/process_gb",
)  # fmt: skip
"""The curves and numbers of a run's page in MLflow; its other metrics are under ``detail/``."""

STATUS = {"finished": "FINISHED", "interrupted": "KILLED"}
"""MLflow's status of a run by its outcome; of other outcomes it is FAILED."""

DENSE_STEPS = 1000
"""Steps at the beginning of a run whose losses are all in MLflow; ``cycles.jsonl`` has all of every run."""


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


def record_start(tracker: Tracker, config: TrainConfig, manifest: Manifest, asked: TrainConfig) -> None:
    """Fill the page of a run that starts: settings, data, and a description.

    ``config`` is ``asked`` as it is resolved for the device.
    """
    tracker.params(params(config, asked))
    tracker.json(config.to_json(), "config.json")
    tracker.data(Path(config.source).name, manifest.fingerprint, config.source, manifest.splits, "training")
    maker = None if config.stream else made_by(config.data)
    tracker.tags({"data.run": maker.run_id} if maker else {})
    running = f"Training {format_model(config.model)} on `{config.source}`. Still running."
    tracker.note("\n\n".join([running, *origin(config, tracker.key.store)]))


def params(config: TrainConfig, asked: TrainConfig) -> dict[str, Any]:
    """What tells a run from others: settings that were asked for and are not the default, and a few of every run."""

    def named(settings: TrainConfig) -> dict[str, Any]:
        values = settings.to_json() | {"model": format_model(settings.model)}
        return {name: value for name, value in values.items() if name not in ("data", "stream")}

    return changed(named(asked), named(TrainConfig())) | {
        "model": format_model(config.model), "data": config.source, "global_batch": config.global_batch,
        "micro_batch": config.micro_batch, "accumulation": config.accumulation, "precision": config.precision,
        "compile": config.compile, "loss": config.loss, "device": config.device, "seed": config.seed,
    }  # fmt: skip


def record_search(tracker: Tracker, name: str, config_file: str) -> None:
    """Link the run ``name`` with the search that found its settings, if ``config_file`` is what a search has left.

    The search's page gets a link to this run, and this run the tag ``search.run``.
    """
    place = StorageDir.of(config_file).parent
    try:
        kept = json.loads(place.read("search.json"))["parent"]
        search = from_json(RunKey, kept, "it")
    except (OSError, ValueError, KeyError, TypeError):
        return
    if not search.is_here:
        return
    tracker.tags({"search.run": search.run_id})
    link = page_link(tracker.key, name, store=search.store)
    add_to_page(search, f"Trained with its winner: {link}", {"trained.run": tracker.key.run_id})


def record_export(key: RunKey, step: int, folder: Path, model: tuple[str, str] | None) -> None:
    """Add to the page of the run that trained a model where that was exported to after ``step`` steps.

    ``model`` is its name and version in the registry, if it is registered.
    """
    registered = f", and registered as {model_link(*model)}" if model else ""
    paragraph = f"Exported after {step:,} steps to `{folder}`{registered}"
    add_to_page(key, paragraph, {"exported.to": str(folder)})


def record_resume(tracker: Tracker, config: TrainConfig, step: int) -> None:
    """Add to the page of a run that is resumed; its params stay those of the first start, as they cannot change."""
    tracker.tags({"resumed_at_step": step, "outcome": "", "reason": ""})
    tracker.json(config.to_json(), f"config-from-step-{step}.json")


def cycle_metrics(cycle: dict[str, Any]) -> Iterator[tuple[int, dict[str, float | None]]]:
    """(step, metrics by their names in MLflow) of a logged cycle: losses of its steps, then its own metrics.

    The losses become sparser after the first thousand steps: 100,000 steps have 6,577 and a million 9,954.
    """
    step, losses = cycle["step"], cycle["step_losses"]
    for number, loss in enumerate(losses, step - len(losses) + 1):
        if number % stride(number, DENSE_STEPS) == 0:
            yield number, {"loss/step": loss}
    val_loss = cycle["val_loss"]
    values = {
        "loss/train": cycle["train_loss"],
        "loss/val": val_loss,
        "loss/val_perplexity": math.exp(val_loss) if val_loss is not None and val_loss < 700 else None,
        "throughput/tokens_per_second": cycle["cycle_tokens"] / cycle["seconds"],
        "progress/train_tokens": cycle["train_tokens"],
        "progress/books": cycle["books"],
        "time/elapsed_seconds": cycle["elapsed"],
        "time/cycle_seconds": cycle["seconds"],
        "time/train_seconds": cycle["train_seconds"],
        "time/data_wait_seconds": cycle["data_wait_seconds"],
        "time/optimizer_seconds": cycle["optimizer_seconds"],
        "optimizer/learning_rate": cycle["learning_rate"],
        "optimizer/gradient_norm": cycle["gradient_norm"],
    }
    yield step, shown(values, METRICS)


def record_cycle(tracker: Tracker, cycle: dict[str, Any], sent: Mapping[str, int]) -> None:
    """Record a logged cycle, but what MLflow has: metrics up to the step that they were ``sent`` until."""
    for step, values in cycle_metrics(cycle):
        tracker.metrics({name: value for name, value in values.items() if step > sent.get(name, 0)}, step)


def origin(config: TrainConfig, store: str) -> list[str]:
    """A paragraph that links to the run that made the data, for a page in ``store``; none where that is not known."""
    maker = None if config.stream else made_by(config.data)
    return [f"Data: {page_link(maker, Path(config.data).name, store=store)}"] if maker else []


def record_end(
    tracker: Tracker,
    config: TrainConfig,
    result: RunResult,
    home: RunFolder,
    memory_limit: int | None = None,
) -> None:
    """Add the result of the run to its page, and as ``summary.md`` to its folder.

    At step 0, because MLflow compares runs in bar charts if that is the only step.
    """
    _record_result(tracker, config, result)
    if result.too_large:
        tracker.json(config.to_json(), "config.json")  # instead of what was decided when it began
    told = run_report(config, result, home.place, memory_limit)
    text = replace(told, pieces=[*origin(config, tracker.key.store), *told.pieces]).markdown()
    write_text(home.summary, text)
    home.send(home.summary)
    tracker.note(text)


def _record_result(tracker: Tracker, config: TrainConfig, result: RunResult) -> None:
    tracker.metrics(shown(result_metrics(result) | formula_metrics(config, result), METRICS))
    reason = "" if result.outcome == "finished" else result.reason  # of a run that was continued, it is replaced
    tags = {"outcome": result.outcome, "reason": reason, "device": result.device, "attention": result.attention}
    if result.too_large:
        tags["micro_batch.too_large"] = ", ".join(map(str, result.too_large))
    tracker.tags(tags | columns(result))
    tracker.json(to_json(result), "result.json")
    if result.sample:
        tracker.text(result.sample, "sample.txt")


def complete_earlier(key: RunKey) -> None:
    """Send what MLflow lacks of other runs of the experiment of ``key`` that have ended on this machine. Never raises.

    Stops at the first of which that does not arrive.
    """
    with suppress(Exception):
        for left in incomplete:
            place = StorageDir(left.home)
            home = RunFolder(WorkingCopy.folder_of(place), place if place.remote else None)
            if left.experiment_id == key.experiment_id:
                with suppress(UserError), held(left):
                    if not _completed(home, left):
                        return


def _completed(home: RunFolder, key: RunKey) -> bool:
    """Send what MLflow lacks of a run from its folder, close it as it ended, and return whether that arrived.

    The settings of a run that was without its store from the beginning are lost.
    """
    if is_complete(key):
        return True
    result, config, cycles, ended = None, None, list[dict[str, Any]](), None
    if (kept := home.key(key.store)) and kept.run_id == key.run_id:  # it may have been removed, and made anew
        with suppress(OSError, ValueError):
            result = from_json(RunResult, json.loads(home.result.read_text(encoding="utf-8")), home.result)
            config = load_config(home.config)
        cycles = list(home.cycles_until(sys.maxsize))
        ended = max((file.stat().st_mtime for file in (home.cycles, home.result) if file.exists()), default=None)
    if result and cycles and cycles[-1]["step"] > result.steps:
        result = None  # of a part before the one that was killed
    sent, tracker = last_steps(key), Tracker(key)
    for cycle in cycles:
        record_cycle(tracker, cycle, sent)
    if result and config:
        _record_result(tracker, config, result)
        if home.summary.exists():
            tracker.note(home.summary.read_text(encoding="utf-8"))
        if home.curves.exists():
            tracker.file(home.curves)
    tracker.finish(STATUS.get(result.outcome, "FAILED") if result else "KILLED", ended=ended, wait=False)
    return tracker.deliver()


def columns(result: RunResult) -> dict[str, str]:
    """The speed with its interval and the memory with its prediction, as tags that are columns of MLflow's list.

    All of them, so that none is left of what an earlier part of the run has measured.
    """
    words = {"memory": f"{result.memory.process / GB:.2f} GB"}
    if result.predicted_memory:
        words["memory"] += f" (predicted {result.predicted_memory / GB:.2f})"
    words["tokens/s"] = str(result.throughput.estimate) if result.throughput else "not measured"
    return words


def formula_metrics(config: TrainConfig, result: RunResult) -> dict[str, float | None]:
    """FLOPs per token by every named formula, and the MFU by causal attention; ``result/mfu`` is PaLM's."""
    counted = {formula.name: formula.flops for formula in formulas(config)}
    causal = counted.get("causal")
    return {
        **{f"result/flops_per_token_{name.partition(',')[0]}": flops for name, flops in counted.items()},
        "result/mfu_causal": result.mfu and causal and result.mfu * causal / result.flops_per_token,
    }


def result_metrics(result: RunResult) -> dict[str, float | None]:
    speed, memory, predicted = result.throughput, result.memory, result.predicted_memory
    return {
        "result/tokens_per_second": speed and speed.tokens_per_second,
        "result/tokens_per_second_low": speed and speed.low,
        "result/tokens_per_second_high": speed and speed.high,
        "result/mfu": result.mfu,
        "result/hfu": result.hfu,
        "result/matmul_utilisation": result.matmul_utilisation,
        "result/tflops_per_second": result.flops_per_second and result.flops_per_second / 1e12,
        "result/kilojoules_per_million_tokens": result.joules_per_million_tokens
        and result.joules_per_million_tokens / 1e3,
        "result/val_loss": result.val_loss,
        "result/val_perplexity": result.val_perplexity,
        "result/val_bits_per_byte": result.val_bits_per_byte,
        "result/val_bits_per_character": result.val_bits_per_character,
        "memory/process_gb": memory.process / GB,
        "memory/allocated_gb": memory.allocated and memory.allocated / GB,
        "memory/reserved_gb": memory.reserved and memory.reserved / GB,
        "memory/allocator_retries": memory.allocator_retries,
        "memory/predicted_gb": predicted and predicted / GB,
        "memory/prediction_error": predicted and predicted / memory.process - 1,
        "time/first_step_seconds": result.first_step_seconds,
        "time/data_wait_fraction": result.data_wait_fraction,
        "time/optimizer_fraction": result.optimizer_fraction,
    }


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
    names = {"nvml": "NVML", "reserved": "reserved; NVML does not report it", "rss": "resident set"}
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
