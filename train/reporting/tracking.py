"""A run in MLflow: its description, params and metrics, and the missing entries of earlier runs."""

import json
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from infra.cli.units import GB
from infra.device.downsampling import sampling_interval
from infra.errors import UserError
from infra.schema import from_json, to_json
from infra.storage.directory import StorageDir
from infra.storage.files import write_text
from infra.tracking.names import group_under_detail, non_default_params
from infra.tracking.orphaned_runs import incomplete, is_complete, lock_run_dir
from infra.tracking.run_ref import RunRef
from infra.tracking.store import add_to_page, last_steps
from infra.tracking.tracker import Tracker
from infra.tracking.views import model_link, page_link
from pipeline.shards import Manifest, producing_run
from train.config import DatasetConfig, ResolvedConfig, TrainConfig, load_config
from train.estimate.flops import formulas
from train.model_config import AnyModel, format_model
from train.reporting.report import run_report
from train.result import RunResult
from train.run_files.run_folder import RunFolder

METRICS = (
    "loss/step", "loss/train", "loss/val", "throughput/tokens_per_second", "progress/train_tokens",
    "optimizer/learning_rate", "optimizer/gradient_norm", "result/tokens_per_second", "result/mfu", "result/val_loss",
    "result/kilojoules_per_million_tokens", "memory/process_gb",
)  # fmt: skip
"""Metrics at the top level of a run's page in MLflow; its other metrics are under ``detail/``."""


STATUS = {"finished": "FINISHED", "interrupted": "KILLED"}
"""Status in MLflow by the outcome of a run; other outcomes are FAILED."""


DENSE_STEPS = 1000
"""Number of first steps whose losses are all sent to MLflow; ``cycles.jsonl`` has the losses of all steps."""


def record_start(tracker: Tracker, config: ResolvedConfig, manifest: Manifest) -> None:
    """Record the settings, the data and a description of a run that starts."""
    tracker.log_params(params(config))
    tracker.log_json(config.to_json(), "config.json")
    tracker.log_dataset(
        Path(config.dataset.source).name, manifest.fingerprint, config.dataset.source, manifest.splits, "training"
    )
    maker = None if config.dataset.stream else producing_run(config.dataset.data)
    tracker.set_tags({"data.run": maker.run_id} if maker else {})
    status = f"Training {format_model(config.model)} on `{config.dataset.source}`. The run is in progress."
    tracker.set_description("\n\n".join([status, *data_paragraph(config.dataset, tracker.run_ref.store)]))


def params(config: ResolvedConfig) -> dict[str, Any]:
    """A run's params: requested settings that differ from the default, and a few that every run has."""

    def values_by_name(settings: TrainConfig) -> dict[str, Any]:
        values = settings.to_json() | {"model": format_model(settings.model)}
        return {name: value for name, value in values.items() if name not in ("data", "stream")}

    return non_default_params(values_by_name(config.requested), values_by_name(TrainConfig())) | {
        "model": format_model(config.model), "data": config.dataset.source, "global_batch": config.batch.global_batch,
        "micro_batch": config.batch.micro_batch, "accumulation": config.batch.accumulation, "seed": config.dataset.seed,
        **{name: config.setting(name) for name in ("precision", "compile", "loss", "device")},
    }  # fmt: skip


def record_search(tracker: Tracker, name: str, config_file: str) -> None:
    """Link the run ``name`` and the search whose best.json is ``config_file``; do nothing if it is of no search.

    The search's description gets a link to this run, and this run the tag ``search.run``.
    """
    directory = StorageDir.of(config_file).parent
    try:
        content = directory.read("search.json")
    except OSError:
        return
    try:
        search = from_json(RunRef, json.loads(content)["parent"], "it")
    except (ValueError, UserError, KeyError, TypeError):
        return
    if not search.is_reachable:
        return
    tracker.set_tags({"search.run": search.run_id})
    link = page_link(tracker.run_ref, name, store=search.store)
    add_to_page(search, f"Trained with its winner: {link}", {"trained.run": tracker.run_ref.run_id})


def record_export(run_ref: RunRef, step: int, folder: Path, model: tuple[str, str] | None) -> None:
    """Record in the run of a model that it was exported after ``step`` steps to ``folder``.

    ``model`` is its name and version in the registry, if it is registered.
    """
    registered = f" and registered as {model_link(*model)}" if model else ""
    paragraph = f"Exported after {step:,} steps to `{folder}`{registered}"
    add_to_page(run_ref, paragraph, {"exported.to": str(folder)})


def record_resume(tracker: Tracker, config: ResolvedConfig, step: int) -> None:
    """Record that a run is resumed; its params stay those of its first start, because MLflow cannot change them."""
    tracker.set_tags({"resumed_at_step": step, "outcome": "", "reason": ""})
    tracker.log_json(config.to_json(), f"config-from-step-{step}.json")


def cycle_metrics(cycle: dict[str, Any]) -> Iterator[tuple[int, dict[str, float | None]]]:
    """Yields: (step, metrics by their names in MLflow) of a logged cycle: losses of its steps, then its own metrics.

    After the first thousand steps the losses are downsampled: of 100,000 steps 6,577 are sent, of a million 9,954.
    """
    step, losses = cycle["step"], cycle["step_losses"]
    for number, loss in enumerate(losses, step - len(losses) + 1):
        if number % sampling_interval(number, DENSE_STEPS) == 0:
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
    yield step, group_under_detail(values, METRICS)


def record_cycle(tracker: Tracker, cycle: dict[str, Any], last_sent_steps: Mapping[str, int]) -> None:
    """Record a logged cycle, except for metrics that MLflow already has; ``last_sent_steps`` is their last step by
    name."""
    for step, values in cycle_metrics(cycle):
        tracker.log_metrics(
            {name: value for name, value in values.items() if step > last_sent_steps.get(name, 0)}, step
        )


def data_paragraph(dataset: DatasetConfig, store: str) -> list[str]:
    """A paragraph with a link to the run that created the data, for a description in ``store``; empty if unknown."""
    maker = None if dataset.stream else producing_run(dataset.data)
    return [f"Data: {page_link(maker, Path(dataset.data).name, store=store)}"] if maker else []


def record_end(
    tracker: Tracker,
    config: ResolvedConfig,
    result: RunResult,
    run_folder: RunFolder,
    memory_limit: int | None = None,
) -> None:
    """Record the result of the run, and write its report as ``summary.md`` to its folder.

    Result metrics are at step 0, because MLflow compares runs in bar charts if that is the only step.
    """
    _record_result(tracker, config.model, result)
    if result.too_large:
        tracker.log_json(config.to_json(), "config.json")  # Its micro-batch is not the one recorded at the start.
    report = run_report(config, result, run_folder.location, memory_limit)
    text = replace(
        report, sections=[*data_paragraph(config.dataset, tracker.run_ref.store), *report.sections]
    ).markdown()
    write_text(run_folder.summary, text)
    run_folder.push(run_folder.summary)
    tracker.set_description(text)


def _record_result(tracker: Tracker, model: AnyModel, result: RunResult) -> None:
    tracker.log_metrics(group_under_detail(result_metrics(result) | formula_metrics(model, result), METRICS))
    reason = "" if result.outcome == "finished" else result.reason  # of a run that was continued, it is replaced
    tags = {"outcome": result.outcome, "reason": reason, "device": result.device, "attention": result.attention}
    if result.too_large:
        tags["micro_batch.too_large"] = ", ".join(map(str, result.too_large))
    tracker.set_tags(tags | run_list_tags(result))
    tracker.log_json(to_json(result), "result.json")
    if result.sample:
        tracker.log_text(result.sample, "sample.txt")


def complete_orphaned_runs(run_ref: RunRef) -> None:
    """Send the missing entries of ended runs of this machine in the experiment of ``run_ref``. Never raises.

    Stops at the first run whose entries cannot be sent.
    """
    with suppress(Exception):
        for orphan in incomplete:
            run_folder = RunFolder.of(orphan.home)
            if orphan.experiment_id == run_ref.experiment_id:
                with suppress(UserError), lock_run_dir(orphan):
                    if not _complete_run(run_folder, orphan):
                        return


def _complete_run(run_folder: RunFolder, run_ref: RunRef) -> bool:
    """Send the missing entries of a run from its folder, and close the run; returns whether all entries were sent.

    The params of a run whose MLflow store was unavailable from the start are lost.
    """
    if is_complete(run_ref):
        return True
    result, config, cycles, ended = None, None, list[dict[str, Any]](), None
    if (
        stored := run_folder.run_ref(run_ref.store)
    ) and stored.run_id == run_ref.run_id:  # The folder may belong to a new run by now.
        with suppress(OSError, ValueError, UserError):
            result = from_json(RunResult, json.loads(run_folder.result.read_text(encoding="utf-8")), run_folder.result)
            config = load_config(run_folder.config)
        cycles = list(run_folder.cycles_until(sys.maxsize))
        ended = max(
            (file.stat().st_mtime for file in (run_folder.cycles, run_folder.result) if file.exists()), default=None
        )
    if result and cycles and cycles[-1]["step"] > result.steps:
        result = None  # It is older than the part of the run that was killed.
    last_sent_steps, tracker = last_steps(run_ref), Tracker(run_ref)
    for cycle in cycles:
        record_cycle(tracker, cycle, last_sent_steps)
    if result and config:
        _record_result(tracker, config.model, result)
        if run_folder.summary.exists():
            tracker.set_description(run_folder.summary.read_text(encoding="utf-8"))
        if run_folder.curves.exists():
            tracker.log_file(run_folder.curves)
    tracker.finish(STATUS.get(result.outcome, "FAILED") if result else "KILLED", ended=ended, wait=False)
    return tracker.wait_until_sent()


def run_list_tags(result: RunResult) -> dict[str, str]:
    """Speed and memory as texts, for tags that are columns of MLflow's list of runs.

    All of them are always set, to replace the values of an earlier part of a resumed run.
    """
    tags = {"memory": f"{result.memory.process / GB:.2f} GB"}
    if result.predicted_memory:
        tags["memory"] += f" (predicted {result.predicted_memory / GB:.2f} GB)"
    tags["tokens/s"] = str(result.throughput.estimate) if result.throughput else "not measured"
    return tags


def formula_metrics(model: AnyModel, result: RunResult) -> dict[str, float | None]:
    """FLOPs per token by each formula, and the MFU with causal attention; ``result/mfu`` uses PaLM's formula."""
    flops_by_formula = {formula.name: formula.flops for formula in formulas(model)}
    causal = flops_by_formula.get("causal")
    return {
        **{f"result/flops_per_token_{name.partition(',')[0]}": flops for name, flops in flops_by_formula.items()},
        "result/mfu_causal": result.mfu and causal and result.mfu * causal / result.flops_per_token,
    }


def result_metrics(result: RunResult) -> dict[str, float | None]:
    """The metrics of a run's result."""
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
