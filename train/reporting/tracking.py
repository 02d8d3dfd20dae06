"""A run in MLflow: its description, params and metrics, and the missing entries of earlier runs."""

import json
import math
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from infra.cli.table import Report
from infra.device.downsampling import sampling_interval
from infra.errors import UserError
from infra.schema import from_json, strict, to_json
from infra.storage.directory import StorageDir
from infra.storage.files import write_text
from infra.tracking.names import group_under_detail, non_default_params
from infra.tracking.orphaned_runs import incomplete_runs, is_complete, lock_run_dir
from infra.tracking.run_ref import RunRef
from infra.tracking.store import add_to_description, read_logged
from infra.tracking.tracker import Tracker
from infra.tracking.views import model_link, page_link
from train.config import DatasetConfig, ResolvedConfig, TrainConfig, config_from_json, load_config
from train.data.sources import source_of
from train.reporting.report import memory_fact, run_report, speed_fact
from train.result import RunResult
from train.run_files.run_folder import RunFolder

METRICS = (
    "loss/step", "loss/train", "loss/val", "loss/val_bits_per_byte", "throughput/tokens_per_second",
    "progress/train_tokens", "optimizer/learning_rate", "optimizer/gradient_norm", "result/tokens_per_second",
    "result/mfu", "result/val_loss", "memory/process_gb",
)  # fmt: skip
"""Metrics at the top level of a run's page in MLflow; its other metrics are under ``detail/``."""


STATUS = {"finished": "FINISHED", "interrupted": "KILLED"}
"""Status in MLflow by the outcome of a run; other outcomes are FAILED."""


DENSE_STEPS = 1000
"""Number of first steps whose losses are all sent to MLflow; ``cycles.jsonl`` has the losses of all steps."""


@strict
@dataclass(frozen=True)
class RunStart:
    """Content of ``start.json`` in a run's folder, written when a command starts or resumes the run."""

    config: dict[str, Any]
    """Resolved settings of the run."""
    fingerprint: str
    """Fingerprint of the data set."""
    splits: dict[str, dict[str, int]]
    """Totals of the data set by split."""
    step: int = 0
    """Step at which the run is resumed; 0 for a new run."""
    memory_limit: int | None = None
    """Memory limit of a worker's process in bytes; None without a limit."""


def fill(tracker: Tracker, run_folder: RunFolder, *, until: int | None = None) -> RunResult | None:
    """Log the entries of ``run_folder`` that the run of ``tracker`` lacks: its start, cycles and result.

    If the run is being resumed, ``until`` is the last step whose cycle is final, and its earlier result is not logged.
    Returns the result if it is complete. Raises ``UserError`` or ``OSError`` if the folder is damaged.
    """
    start, config, step = None, None, 0
    if run_folder.start.exists():
        start = from_json(RunStart, _read_json(run_folder.start), run_folder.start)
        settings = config_from_json(start.config, str(run_folder.start))
        config = ResolvedConfig.from_resolved(settings, load_config(run_folder.config))
        log_start(tracker, config, start)
    for cycle in run_folder.cycles_until(sys.maxsize if until is None else until):
        log_cycle(tracker, cycle)
        step = cycle["step"]
    if until is not None or not (start and config and run_folder.result.exists()):
        return None
    result = from_json(RunResult, _read_json(run_folder.result), run_folder.result)
    if step > result.steps:  # The result is outdated, because the run was resumed after it and then killed.
        return None
    config = config.with_smaller_micro_batch(result.failed_micro_batches) or config
    if result.failed_micro_batches:
        tracker.log_json(config.to_json(), "config.json")  # The micro-batch has changed since the start.
    step, dataset, duration = config.step, config.dataset, config.duration
    report = run_report(step, dataset, duration, result, run_folder.location, start.memory_limit)
    _log_result(tracker, report, result, run_folder, start.memory_limit)
    return result


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as damage:
        raise UserError(f"{file} is corrupt ({damage}).") from damage


def log_start(tracker: Tracker, config: ResolvedConfig, start: RunStart) -> None:
    """Log the settings, the data and the description of a run; for a resumed run, the step at which it is resumed."""
    if not tracker.logged.params:
        tracker.log_params(params(config))
        tracker.log_json(start.config, "config.json")
        source = config.dataset.source
        tracker.log_dataset(Path(source).name, start.fingerprint, source, start.splits, "training")
        status = f"Training {config.model.text} on `{source}`. The run is in progress."
        tracker.set_description("\n\n".join([status, *data_paragraph(config.dataset, tracker.run_ref.store)]))
    if start.step:
        tracker.set_tags({"resumed_at_step": start.step, "outcome": "", "reason": ""})
        tracker.log_json(start.config, f"config-from-step-{start.step}.json")


def params(config: ResolvedConfig) -> dict[str, Any]:
    """Return the params of a run in MLflow: requested settings that differ from the default, and a few that every run
    has."""
    same_data = {"data": "", "stream": ""}  # Every run has the param data.
    requested, defaults = (
        settings.to_json() | same_data | {"model": settings.model.text}
        for settings in (config.requested, TrainConfig())
    )
    return non_default_params(requested, defaults) | {
        "model": config.model.text, "data": config.dataset.source, "global_batch": config.batch.global_batch,
        "micro_batch": config.batch.micro_batch, "accumulation": config.batch.accumulation, "seed": config.dataset.seed,
        **{name: config.setting(name) for name in ("precision", "compile", "loss", "device")},
    }  # fmt: skip


def link_search(tracker: Tracker, name: str, config_file: str) -> None:
    """Link the run ``name`` and the search whose best.json is ``config_file``; do nothing for any other file.

    The search's description gets a link to this run, and this run the tag ``search.run``.
    """
    directory = StorageDir.of(config_file).parent
    try:
        content = directory.read("search.json")
    except OSError:
        return
    try:
        search = from_json(RunRef, json.loads(content)["mlflow_run"], "it")
    except (ValueError, UserError, KeyError, TypeError):
        return
    if not search.is_reachable:
        return
    tracker.set_tags({"search.run": search.run_id})
    link = page_link(tracker.run_ref, name, store=search.store)
    add_to_description(search, f"Trained with its winner: {link}", {"trained.run": tracker.run_ref.run_id})


def link_export(
    run_ref: RunRef, step: int, folder: Path, model: tuple[str, str] | None, hub_url: str | None = None
) -> None:
    """Add to the description of a model's run that it was exported after ``step`` steps to ``folder``.

    ``model`` is its name and version in the registry, if it is registered, and ``hub_url`` its address on a hub.
    """
    pushed = f", pushed to {hub_url}" if hub_url else ""
    registered = f" and registered as {model_link(*model)}" if model else ""
    paragraph = f"Exported after {step:,} steps to `{folder}`{pushed}{registered}"
    add_to_description(run_ref, paragraph, {"exported.to": str(folder)})


def cycle_metrics(cycle: dict[str, Any]) -> Iterator[tuple[int, dict[str, float | None]]]:
    """Convert a logged cycle to metrics: the losses of its steps, then the metrics of the cycle.

    After the first thousand steps the losses are downsampled: 6,577 of 100,000 steps are sent, and 9,954 of a million.

    Yields: (step, values by the metric's name in MLflow).
    """
    step, losses = cycle["step"], cycle["step_losses"]
    for number, loss in enumerate(losses, step - len(losses) + 1):
        if number % sampling_interval(number, DENSE_STEPS) == 0:
            yield number, {"loss/step": loss}
    val_loss = cycle["val_loss"]
    values = {
        "loss/train": cycle["train_loss"],
        "loss/val": val_loss,
        "loss/val_bits_per_byte": cycle["val_bits_per_byte"],
        "loss/val_perplexity": math.exp(val_loss) if val_loss is not None and val_loss < 700 else None,
        "throughput/tokens_per_second": cycle["cycle_tokens"] / cycle["cycle_seconds"],
        "progress/train_tokens": cycle["train_tokens"],
        "progress/books": cycle["books_seen"],
        "time/elapsed_seconds": cycle["elapsed"],
        "time/cycle_seconds": cycle["cycle_seconds"],
        "time/train_seconds": cycle["train_seconds"],
        "time/data_wait_seconds": cycle["data_wait_seconds"],
        "time/optimizer_seconds": cycle["optimizer_seconds"],
        "optimizer/learning_rate": cycle["learning_rate"],
        "optimizer/gradient_norm": cycle["gradient_norm"],
    }
    yield step, group_under_detail(values, METRICS)


def log_cycle(tracker: Tracker, cycle: dict[str, Any]) -> None:
    """Log the metrics of a cycle that the run of ``tracker`` lacks."""
    for step, values in cycle_metrics(cycle):
        tracker.log_metrics(values, step)


def data_paragraph(dataset: DatasetConfig, store: str) -> list[str]:
    """Format a paragraph that links the run that created the data, for a description in ``store``; empty if unknown."""
    maker = source_of(dataset).producing_run()
    return [f"Data: {page_link(maker, Path(dataset.data).name, store=store)}"] if maker else []


def write_summary(run_folder: RunFolder, report: Report, dataset: DatasetConfig, store: str) -> None:
    """Write ``summary.md``, which is also the run's description in the MLflow ``store``."""
    sections = [*data_paragraph(dataset, store), *report.sections]
    write_text(run_folder.summary, replace(report, sections=sections).markdown())


def _log_result(
    tracker: Tracker, report: Report, result: RunResult, run_folder: RunFolder, memory_limit: int | None
) -> None:
    """Log the result of a run. Its metrics are logged at step 0, because MLflow draws bars for a single step."""
    tracker.log_metrics(group_under_detail(report.metrics(), METRICS))
    # An empty reason removes the reason of an earlier, interrupted part of a resumed run.
    reason = "" if result.outcome == "finished" else result.reason
    tags = {"outcome": result.outcome, "reason": reason, "device": result.device}
    if result.failed_micro_batches:
        tags["micro_batch.failed_micro_batches"] = ", ".join(map(str, result.failed_micro_batches))
    tracker.set_tags(tags | run_list_tags(result, memory_limit))
    tracker.log_json(to_json(result), "result.json")
    if result.sample:
        tracker.log_text(result.sample, "sample.txt")
    if run_folder.summary.exists():
        tracker.set_description(run_folder.summary.read_text(encoding="utf-8"))
    for file in (run_folder.stream, run_folder.curves):
        if file.exists():
            tracker.log_file(file)


def complete_orphaned_runs(run_ref: RunRef) -> None:
    """Send the missing entries of ended runs of this machine in the experiment of ``run_ref``.

    Stops at the first run whose entries cannot be sent. Never raises an exception.
    """
    with suppress(Exception):
        for orphan in incomplete_runs:
            run_folder = RunFolder.of(orphan.run_dir)
            if orphan.experiment_id == run_ref.experiment_id:
                with suppress(UserError), lock_run_dir(orphan):
                    if not _complete_run(run_folder, orphan):
                        return


def _complete_run(run_folder: RunFolder, run_ref: RunRef) -> bool:
    """Log the missing entries of an ended run from its folder, and close it; return whether all entries were sent."""
    if is_complete(run_ref):
        return True
    tracker, result, end_time = Tracker(run_ref, read_logged(run_ref)), None, None
    folder_run = run_folder.run_ref(run_ref.store)
    if folder_run and folder_run.run_id == run_ref.run_id:  # The folder may belong to a new run by now.
        with suppress(OSError, UserError):
            result = fill(tracker, run_folder)
        files = [file for file in (run_folder.cycles, run_folder.result) if file.exists()]
        end_time = max((file.stat().st_mtime for file in files), default=None)
    tracker.finish(STATUS.get(result.outcome, "FAILED") if result else "KILLED", ended=end_time, wait=False)
    return tracker.wait_until_sent()


def run_list_tags(result: RunResult, memory_limit: int | None = None) -> dict[str, str]:
    """Return the speed and memory as texts, for tags that are columns of MLflow's list of runs.

    Both tags are always set, to replace the values of an earlier part of a resumed run.
    """
    speed = speed_fact(result.throughput and result.throughput.estimate)
    memory = memory_fact(result.memory.process, memory_limit or result.memory.capacity)
    return {"memory": memory, "tokens/s": speed or "not measured"}
