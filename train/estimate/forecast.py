"""Predictions for a run: parameters, peak memory, the largest micro-batch, arithmetic, time and cost.

They need neither the GPU nor the data of the run.
"""

from collections.abc import Sequence

import torch

from infra.cli.units import GB, format_duration, format_size
from infra.errors import UserError
from pipeline.shards import read_manifest
from train.config import Precision, Step
from train.estimate.estimates import estimates_of
from train.estimate.memory import (
    largest_micro_batch,
    largest_unconstrained_micro_batch,
    margin,
    predict_peak,
)
from train.estimate.tiles import MULTIPROCESSORS, products, warnings
from train.model_config import ModelSpec

CHINCHILLA = 20
"""Compute-optimal number of training tokens per parameter (arXiv 2203.15556, table 3)."""
BAR_WIDTH = 40
"""Maximum length in characters of a bar in the table of memory."""

Rows = list[tuple[str, str]]


def parameter_rows(model: ModelSpec) -> Rows:
    """Return the number of parameters by part of the model, and their total, for a table."""
    return [*model.parameter_rows(), ("total", f"[bold]{model.parameters:,}[/bold]")]


def memory_rows(step: Step) -> Rows:
    """Return the predicted peak memory by part, with bars."""
    breakdown = predict_peak(step)
    formula = estimates_of(step.model).activation_formula(step.batch.micro_batch, step.execution.precision)
    rows = [
        (part, f"{size / GB:8.3f} GB  {'█' * round(BAR_WIDTH * size / breakdown.total)}")
        for part, size in breakdown.parts().items()
        if size
    ]
    return [
        *rows,
        ("total", f"[bold]{breakdown.total / GB:8.3f} GB[/bold]  in one worker's process on {step.execution.device}"),
        ("peak", f"{breakdown.moment}; {breakdown.allocated / GB:.3f} GB in torch's allocator"),
        *([("published formula", f"{formula[0] / GB:8.3f} GB  for activations: {formula[1]}")] if formula else []),
    ]


def limit_rows(step: Step, limit: int | None) -> Rows:
    """Return the largest micro-batches that fit the limit, as configured and with settings that save memory."""
    limit_text = format_size(limit) if limit else ""
    if limit is None and torch.cuda.is_available():
        limit = int(torch.cuda.get_device_properties(0).total_memory)
        limit_text = f"{limit / GB:.1f} GB (all of this GPU)"
    if limit is None:
        return [("limit", "unknown; set --memory-limit, for example 40GB, to see what fits")]
    rows = []
    for name, variant in (("as configured", step), *_memory_saving_variants(step)):
        size = largest_micro_batch(variant, limit)
        if size is None:
            rows.append((name, "no micro-batch fits"))
        else:
            fitted = variant.replace(micro_batch=size)
            rows.append((name, f"micro-batch {size} x accumulation {fitted.batch.accumulation}{_cap(fitted, limit)}"))
    return [("limit", f"{limit_text}, with a margin of {margin(step.execution):.0%} of the reserved memory"), *rows]


def _cap(step: Step, limit: int) -> str:
    """Return the reason other than memory why the micro-batch of ``step`` cannot be larger; empty if there is none."""
    unconstrained = largest_unconstrained_micro_batch(step, limit)
    if unconstrained <= step.batch.micro_batch:
        return ""
    is_whole_batch = step.batch.micro_batch == step.micro_batches[-1]
    reason = "all" if is_whole_batch else "the largest divisor"
    return f", {reason} of --global-batch {step.batch.global_batch}; micro-batch {unconstrained} would fit"


def _memory_saving_variants(step: Step) -> list[tuple[str, Step]]:
    """Return the variants of ``step``, each with one more setting that saves memory."""
    variants = []
    if step.execution.checkpointing != "full" and not step.model.unsupported_reason("checkpointing", "full"):
        variants.append(("with --checkpointing full", step.replace(checkpointing="full")))
    can_chunk = step.model.context_length % 8 == 0 and not step.model.unsupported_reason("loss_chunks", 8)
    if step.execution.loss == "plain" and step.execution.loss_chunks == 1 and can_chunk:
        variants.append(("with --loss-chunks 8", step.replace(loss_chunks=8)))
    return variants


def arithmetic_rows(model: ModelSpec, step_tokens: int, total_steps: int | None) -> Rows:
    """Return the FLOPs per token by each formula, and FLOPs of the whole run if ``total_steps`` is given, for a
    table."""
    counts = model.flops_formulas()
    rows = [(count.name, f"{count.flops / 1e6:,.1f} MFLOP per token: {count.text}") for count in counts]
    if total_steps is not None:
        total = model.flops_per_token * total_steps * step_tokens
        rows.append(
            (f"{total_steps:,} steps", f"{total:.3e} FLOP = {petaflop_days(total):.4g} PF-days ({counts[0].name})")
        )
    return rows


def tile_rows(model: ModelSpec, micro_batch: int, precision: Precision, gpu_name: str | None = None) -> Rows:
    """Return the wasted fractions by matrix product, with warnings, for the GPU ``gpu_name``, this machine's GPU, or an
    A100."""
    if not model.matrices:
        return [("matrix products", "unknown for a custom model")]
    words = f" {gpu_name or 'A100'} ".replace("-", " ")
    name = next((name for name in MULTIPROCESSORS if f" {name} " in words), None)
    if name is None:
        return [("multiprocessors", f"unknown for {gpu_name}")]
    count = MULTIPROCESSORS[name]
    if gpu_name is None and torch.cuda.is_available():
        count = torch.cuda.get_device_properties(0).multi_processor_count
    rows = [
        (waste.name, f"{waste.rows:,} x {waste.columns:,}: tiles {waste.tiles:.1%}, waves {waste.waves:.1%}")
        for waste in products(model, micro_batch, count)
    ]
    warning_rows = [
        ("[yellow]warning[/yellow]", sentence) for sentence in warnings(model, micro_batch, precision, count)
    ]
    return [("multiprocessors", str(count)), *rows, *warning_rows]


def petaflop_days(total: float) -> float:
    """Return the FLOPs in days of 10^15 FLOP/s."""
    return total / (1e15 * 86400)


def time_rows(
    model: ModelSpec, data: str, run_tokens: int | None, speeds: Sequence[float], price_per_hour: float | None
) -> Rows:
    """Return the tokens of an epoch, of the run and of a compute-optimal run, with time and cost if they are known.

    Args:
        run_tokens: tokens of the run; None if a time budget or the end of the epoch ends it.
        speeds: the speed in tokens/s over all workers, or the lowest and highest speed to expect; empty if unknown.
        price_per_hour: price of all workers.
    """
    amounts: list[tuple[str, int]] = []
    rows: Rows = []
    tokens = epoch_tokens(data)
    if tokens is None:
        rows.append(("epoch", f"unknown, no token shards in --data {data}"))
    else:
        amounts.append(("epoch", tokens))
    if run_tokens is not None:
        amounts.append(("planned run", run_tokens))
    amounts.append((f"Chinchilla ({CHINCHILLA} tokens per parameter)", CHINCHILLA * model.parameters))
    for name, amount in amounts:
        text = f"{amount:,} tokens, {petaflop_days(model.flops_per_token * amount):.3g} PF-days"
        if tokens:
            text += f", {amount / tokens:.3g} epochs"
        if seconds := sorted(amount / speed for speed in speeds):
            text += ", " + " to ".join(format_duration(round(value)) for value in seconds)
            if price_per_hour:
                text += ", cost " + " to ".join(f"{value / 3600 * price_per_hour:,.2f}" for value in seconds)
        rows.append((name, text))
    if not speeds:
        rows.append(("time and cost", "unknown; use --gpu to predict the speed, or set --tokens-per-second"))
    return rows


def epoch_tokens(data: str) -> int | None:
    """Return the training tokens of the shards in ``data``; None if there are none."""
    try:
        return int(read_manifest(data).splits["train"]["tokens"])
    except UserError:
        return None
