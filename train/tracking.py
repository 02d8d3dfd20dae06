"""A run in MLflow: its page, its metrics, and what the page of an earlier run that has ended still lacks."""

import json
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from infra.errors import UserError
from infra.schema import from_json, to_json
from infra.storage import write_text
from infra.storage_dir import StorageDir, WorkingCopy
from infra.thinning import stride
from infra.tracking.key import RunKey
from infra.tracking.lost import held, incomplete, is_complete
from infra.tracking.names import changed, shown
from infra.tracking.store import add_to_page, last_steps
from infra.tracking.tracker import Tracker
from infra.tracking.views import model_link, page_link
from infra.units import GB
from pipeline.shards import Manifest, made_by
from train.checkpoint.run_folder import RunFolder
from train.config import TrainConfig, load_config
from train.estimate.flops import formulas
from train.model_config import format_model
from train.report import run_report
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
        content = place.read("search.json")
    except OSError:
        return
    try:
        search = from_json(RunKey, json.loads(content)["parent"], "it")
    except (ValueError, UserError, KeyError, TypeError):
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
        with suppress(OSError, ValueError, UserError):  # of files on this machine
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
