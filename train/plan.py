"""Entry: ``python -m train.plan`` predicts what a run will need: memory, arithmetic, time, cost."""

from dataclasses import dataclass, field, replace

from rich.table import Table

from infra import command
from infra.console import console
from infra.errors import UserError
from infra.hardware import device_facts
from infra.units import BytesOrNone
from train.config import TrainConfig
from train.model_config import format_model
from train.resolve import choices, resolve_for_plan, said


@dataclass(frozen=True)
class PlanOptions:
    """Predict what a training run needs in memory, arithmetic, time and money, before it starts."""

    training: TrainConfig = field(default_factory=TrainConfig)
    gpu: str | None = None
    """Plan for this GPU, which need not be here: for all its memory, and with the speed to expect of it.
    - None: for this machine
    - A100: with 40 GB
    - H100: with 80 GB, as SXM
    - H200: with 141 GB
    - FILE: for the one on which infra.doctor saved this file, such as runs/doctor.json, and by the rates in it"""
    memory_limit: BytesOrNone = None
    """Memory that the process may use, to find the largest micro-batch; of --gpu at most what it has.
    None: all of --gpu or of this machine's GPU."""
    tokens_per_second: float | None = None
    """Training speed in tokens/s over all workers, above 0, to predict hours; python -m train.run measures it."""
    price: float | None = None
    """Price per hour of one worker's machine, above 0, in any currency."""
    doctor: str = "runs/doctor.json"
    """What infra.doctor --workers measured, to predict with --workers whether the network slows training down."""

    def __post_init__(self) -> None:
        for name in ("tokens_per_second", "price"):
            value = getattr(self, name)
            if value is not None and not 1e-9 <= value <= 1e18:  # beyond, a time or a cost would not be finite
                raise UserError(f"--{name.replace('_', '-')} {value:g} must be above 0, between 1e-9 and 1e18.")
        if self.price is not None and self.tokens_per_second is None:
            raise UserError("--price needs --tokens-per-second: without a speed there are no hours to pay for.")


def main() -> None:
    command.run(plan, PlanOptions, module="train.plan")


def plan(options: PlanOptions) -> None:
    """Print every table of the plan. torch is imported only now, when the flags are known to be valid."""
    from train.estimate import forecast, network, roofline
    from train.estimate.card import planned

    training, limit = _of_its_data(options.training), options.memory_limit
    card = planned(options.gpu) if options.gpu else None
    facts, name = card.facts if card else device_facts(), card and card.facts.name
    if card:
        training, limit = replace(training, device="cuda"), facts.within(limit).memory
    config = resolve_for_plan(training, facts, limit)
    size = said("micro_batch", config, training)
    batch = f"micro-batch {size} x {config.accumulation} accumulated"
    workers = f"{config.workers} worker{'s' * (config.workers > 1)}"
    console.print(
        f"[bold]{format_model(config.model)}[/bold], {batch}, of {config.model.context_length:,} tokens, on {workers}"
    )
    console.print(choices(config, training), "", sep="\n", markup=False)
    for title, rows in (
        ("Parameters", forecast.parameter_rows(config)),
        ("Predicted peak memory", forecast.memory_rows(config)),
        ("Largest micro-batch", forecast.limit_rows(config, limit)),
        ("Arithmetic", forecast.arithmetic_rows(config)),
        *([("Waste of tiles and waves", forecast.tile_rows(config, name))] if config.device == "cuda" else []),
        *([(f"Speed of one {name}", roofline.speed_rows(config, card))] if card else []),
        *([("Network", network.network_rows(config, options.doctor))] if config.workers > 1 else []),
        ("Data, time and cost", forecast.time_rows(config, options.tokens_per_second, options.price)),
    ):
        table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
        for name, value in rows:
            table.add_row(f"  {name}", value)
        console.print(table, "")


def _of_its_data(training: TrainConfig) -> TrainConfig:
    """``training`` with the vocabulary of its data, as it would run, where there are data that fit the model."""
    from pipeline.shards import read_manifest
    from train.data.text import with_vocabulary_of

    try:
        return with_vocabulary_of(training, read_manifest(training.data))
    except UserError:
        return training


if __name__ == "__main__":
    main()
