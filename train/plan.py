"""Entry: ``python -m train.plan`` says what a run will need before anything is spent: memory, arithmetic, time, cost.

In: the flags of ``train.run``, a memory limit, and if known a speed and a price. Out: tables. It needs
neither the GPU nor the data that it speaks of. Wiring and tables only.
"""

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import torch
import tyro
from rich.table import Table

from infra import command
from infra.command import UserError, console
from infra.units import GIB, Bytes, format_duration, format_size
from train import flops
from train.anatomy import device_kind, largest_micro_batch, predict_peak
from train.config import TrainConfig, format_model
from train.model import GPT, parameter_count

CHINCHILLA = 20
"""Training tokens a parameter that use a given amount of arithmetic best (arXiv 2203.15556, table 3)."""
BAR = 40

Rows = list[tuple[str, str]]


@dataclass(frozen=True)
class PlanOptions:
    """The run to plan, and what is known about the machine."""

    training: Annotated[TrainConfig, tyro.conf.arg(name="")] = field(default_factory=TrainConfig)
    memory_limit: Bytes | None = None
    """Memory that the process may take, to find the largest micro-batch; default this machine's GPU, if any."""
    tokens_per_second: float | None = None
    """Training speed over all workers, to tell hours; python -m train.run measures it."""
    price: float | None = None
    """Price of an hour of one worker's machine, in any currency."""

    def __post_init__(self) -> None:
        for name in ("tokens_per_second", "price"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise UserError(f"--{name.replace('_', '-')} {value:g} must be above 0.")
        if self.price is not None and self.tokens_per_second is None:
            raise UserError("--price needs --tokens-per-second: without a speed there are no hours to pay for.")


def main() -> None:
    """Parse, compute, print, exit."""
    command.run(
        plan,
        PlanOptions,
        module="train.plan",
        description="Say what a training run needs in memory, arithmetic, time and money, before it starts.",
        default=PlanOptions(),
    )


def plan(options: PlanOptions) -> None:
    """Print every table of the plan."""
    config = options.training
    console.print(f"[bold]{format_model(config.model)}[/bold], {config.micro_batch} x {config.accumulation} sequences "
                  f"of {config.model.context_length} on each of {config.workers}")  # fmt: skip
    for title, rows in (
        ("Parameters", parameter_rows(config)),
        ("Memory at its peak, predicted", memory_rows(config)),
        ("Largest micro-batch", limit_rows(options)),
        ("Arithmetic", arithmetic_rows(config)),
        ("Data, time and cost", time_rows(options)),
    ):
        table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
        for name, value in rows:
            table.add_row(f"  {name}", value)
        console.print(table, "")


def parameter_rows(config: TrainConfig) -> Rows:
    """Parameters by part of the model."""
    with torch.device("meta"):
        model = GPT(config.model)

    def size(module: torch.nn.Module) -> int:
        return sum(p.numel() for p in module.parameters())

    blocks = size(model.blocks)
    total = parameter_count(config.model)
    rows = [
        ("token embedding", f"{size(model.token_embedding):,}" + (" (the head's too)" if config.model.tied else "")),
        ("position embedding", f"{size(model.position_embedding):,}"),
        (f"{config.model.layers} blocks", f"{blocks:,} ({blocks // config.model.layers:,} each)"),
        ("final norm", f"{size(model.norm):,}"),
    ]
    if not config.model.tied:
        rows.append(("head", f"{size(model.head):,}"))
    return [*rows, ("total", f"[bold]{total:,}[/bold]")]


def memory_rows(config: TrainConfig) -> Rows:
    """The anatomy of peak memory, with a bar."""
    anatomy = predict_peak(config)
    rows = [
        (part, f"{size / GIB:8.3f} GiB  {'█' * round(BAR * size / anatomy.total)}")
        for part, size in anatomy.parts().items()
        if size
    ]
    kind = device_kind(config)
    return [
        *rows,
        ("total", f"[bold]{anatomy.total / GIB:8.3f} GiB[/bold]  of one worker's process on {kind}"),
        ("", f"at {anatomy.moment}; {anatomy.allocated / GIB:.3f} GiB of it in torch's allocator"),
    ]


def limit_rows(options: PlanOptions) -> Rows:
    """The largest micro-batches that fit the limit, plain and with what saves memory."""
    config, limit = options.training, options.memory_limit
    if limit is None and torch.cuda.is_available():
        limit = torch.cuda.get_device_properties(0).total_memory
    if limit is None:
        return [("", "give --memory-limit, for example 40GB, to learn what fits")]
    rows = []
    for name, variant in (("as configured", config), *savings(config)):
        size = largest_micro_batch(variant, limit)
        if size is None:
            rows.append((name, "not even one sequence fits"))
        else:
            rows.append((name, f"{size} sequences x {config.global_batch // config.workers // size} accumulated"))
    return [("limit", format_size(limit)), *rows]


def savings(config: TrainConfig) -> list[tuple[str, TrainConfig]]:
    """``config`` with one more thing that saves memory, each on its own, where it is not in it already."""
    found = []
    if config.checkpointing != "full":
        found.append(("with --checkpointing full", replace(config, checkpointing="full")))
    if config.loss == "plain" and config.loss_chunks == 1 and config.model.context_length % 8 == 0:
        found.append(("with --loss-chunks 8", replace(config, loss_chunks=8)))
    return found


def arithmetic_rows(config: TrainConfig) -> Rows:
    """FLOPs by every formula, and the planned run's total."""
    parameters = parameter_count(config.model)
    rows = [
        (formula.name, f"{formula.flops / 1e6:,.1f} MFLOP a token: {formula.text}")
        for formula in flops.formulas(config.model, parameters)
    ]
    steps = config.total_steps
    if steps is not None:
        total = flops.palm(config.model) * steps * config.step_tokens
        rows.append((f"{steps:,} steps", f"{total:.3e} FLOP = {petaflop_days(total):.4g} PF-days (PaLM)"))
    return rows


def petaflop_days(total: float) -> float:
    """FLOPs in days of 10^15 FLOP/s."""
    return total / (1e15 * 86400)


def time_rows(options: PlanOptions) -> Rows:
    """Tokens at hand and tokens wanted, each with its time and cost where a speed and a price are known."""
    config = options.training
    amounts: list[tuple[str, int]] = []
    rows: Rows = []
    tokens = epoch_tokens(config.data)
    if tokens is None:
        rows.append(("an epoch", f"unknown: there are no token shards at --data {config.data}"))
    else:
        amounts.append(("an epoch of the data", tokens))
    if config.total_steps is not None:
        amounts.append(("the planned run", config.total_steps * config.step_tokens))
    amounts.append((f"Chinchilla, {CHINCHILLA} a parameter", CHINCHILLA * parameter_count(config.model)))
    for name, amount in amounts:
        text = f"{amount:,} tokens, {petaflop_days(flops.palm(config.model) * amount):.3g} PF-days"
        if tokens:
            text += f", {amount / tokens:.3g} epochs"
        if options.tokens_per_second:
            seconds = amount / options.tokens_per_second
            text += f", {format_duration(round(seconds))}"
            if options.price:
                text += f", cost {seconds / 3600 * config.workers * options.price:,.2f}"
        rows.append((name, text))
    if not options.tokens_per_second:
        rows.append(("", "give --tokens-per-second (and --price) to learn hours (and cost)"))
    return rows


def epoch_tokens(data: Path) -> int | None:
    """Training tokens of the shards at ``data``; None where there are none."""
    from pipeline.shards import read_manifest

    try:
        return int(read_manifest(data).splits["train"]["tokens"])
    except UserError:
        return None


if __name__ == "__main__":
    main()
