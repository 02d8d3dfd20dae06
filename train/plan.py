"""Entry: ``python -m train.plan`` predicts the memory, arithmetic, time and cost of a run."""

import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import tyro
from rich.table import Table

from infra.cli import command
from infra.cli.console import console
from infra.cli.table import Report
from infra.cli.units import BytesOrNone
from infra.device.first_run import SAMPLE_SECONDS, NextCommand
from infra.device.hardware import device_info
from infra.errors import UserError
from pipeline.next_command import next_command
from pipeline.shards import read_manifest
from train.config import TrainConfig
from train.resolved import resolve_for_plan


@dataclass(frozen=True)
class PlanOptions:
    """Predict the memory, arithmetic, time and cost of a training run before it starts."""

    main_flags: ClassVar[tuple[str, ...]] = (
        "model", "data", "gpu", "memory_limit", "global_batch", "micro_batch", "precision", "workers", "steps",
        "tokens_per_second", "price_per_hour", "doctor_file",
    )  # fmt: skip

    training: TrainConfig = field(default_factory=TrainConfig)
    gpu: Annotated[str | None, tyro.conf.arg(metavar="GPU|FILE")] = None
    """GPU to plan for; it need not be in this machine. Uses all of its memory and predicts its speed.
    By default plans for this machine.
    - A100, A100-80GB, H100, H200: SXM
    - A10, L4, L40S, RTX-3090, RTX-4090
    - FILE: doctor.json or gpu-report.json, written by infra.doctor on the machine with the GPU; uses its rates"""
    memory_limit: BytesOrNone = None
    """Memory that the process may use, which limits the micro-batch; at most the memory of --gpu.
    By default all memory of --gpu, or of this machine's GPU."""
    tokens_per_second: float | None = None
    """Training speed in tokens/s over all workers (above 0), to predict the time; python -m train.run measures it.
    By default the predicted speed of one --gpu."""
    price_per_hour: float | None = None
    """Price per hour of one worker's machine (above 0), in any currency."""
    doctor_file: Annotated[str, tyro.conf.arg(metavar="FILE")] = "runs/doctor.json"
    """File with the network speed measured by infra.doctor --workers; used with --workers above 1."""

    def __post_init__(self) -> None:
        for name in ("tokens_per_second", "price_per_hour"):
            value = getattr(self, name)
            if value is not None and not 1e-9 <= value <= 1e18:  # Other values would make the time or cost infinite.
                raise UserError(f"--{name.replace('_', '-')} {value:g} must be between 1e-9 and 1e18.")
        if self.price_per_hour is not None and self.tokens_per_second is None and self.gpu is None:
            raise UserError("--price-per-hour needs a speed. Use --gpu to predict it, or set --tokens-per-second.")


def main() -> None:
    command.run(plan, PlanOptions, module="train.plan")


def plan(options: PlanOptions) -> None:
    """Print all tables of the plan.

    torch is imported after the flags are checked, so that invalid flags are reported at once.
    """
    from train.estimate import forecast, network, roofline
    from train.estimate.gpu_rates import load_gpu_rates

    training, limit = options.training, options.memory_limit
    gpu_rates = load_gpu_rates(options.gpu) if options.gpu else None
    info, gpu_name = gpu_rates.device_info if gpu_rates else device_info(), gpu_rates and gpu_rates.device_info.name
    if gpu_rates:
        training, limit = training.replace(device="cuda"), info.with_memory_limit(limit).memory
    config = resolve_for_plan(training, info, limit)
    model, step, size = config.model, config.step, config.format_setting("micro_batch")
    batch = f"global batch {config.batch.global_batch} = micro-batch {size} x accumulation {config.batch.accumulation}"
    workers = f"{config.batch.workers} worker{'s' * (config.batch.workers > 1)}"
    console.print(f"[bold]{model.text}[/bold], context length {model.context_length:,} tokens; {batch} x {workers}")
    console.print(config.describe_execution(), "", sep="\n", markup=False)

    print_rows("Parameters", forecast.parameter_rows(model))
    print_rows("Predicted peak memory", forecast.memory_rows(step))
    print_rows("Largest micro-batch", forecast.limit_rows(step, limit))
    print_rows("Arithmetic", forecast.arithmetic_rows(model, config.step_tokens, config.total_steps))
    if config.execution.device == "cuda":
        tiles = forecast.tile_rows(model, config.batch.micro_batch, config.execution.precision, gpu_name)
        print_rows("Tile and wave quantization (wasted fraction)", tiles)
    speeds = (options.tokens_per_second,) if options.tokens_per_second else ()
    if gpu_rates:
        try:
            roofline_speed = roofline.roofline_speed(model, config.batch, config.execution, gpu_rates)
        except UserError as unknown:
            print_rows(f"Speed of one {gpu_name}", [("speed", str(unknown))])
        else:
            print_rows(f"Speed of one {gpu_name}", roofline.speed_rows(roofline_speed, gpu_rates))
            if not speeds and config.batch.workers == 1:
                speeds = roofline.expected_range(roofline_speed)
    if config.batch.workers > 1:
        rows = network.network_rows(model, config.batch, config.execution, options.doctor_file)
        print_rows("Network", rows)
    tokens = None if config.total_steps is None else config.total_steps * config.step_tokens
    price = options.price_per_hour and options.price_per_hour * config.batch.workers
    print_rows("Data, time and cost", forecast.time_rows(model, config.dataset.data, tokens, speeds, price))
    Report([("Next", next_step(training.dataset.data))]).show()


def next_step(data: str) -> str:
    """Format the next command that this machine can execute: a first run on the shards in ``data``, or their
    creation."""
    try:
        manifest = read_manifest(data)
    except UserError:
        return str(NextCommand(f"python -m pipeline.tokenize sample --out {shlex.quote(data)}", SAMPLE_SECONDS))
    return next_command(data, manifest, device_info())


def print_rows(title: str, rows: Iterable[tuple[str, str]]) -> None:
    """Print a table of names and values."""
    table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in rows:
        table.add_row(f"  {name}", value)
    console.print(table, "")


if __name__ == "__main__":
    main()
