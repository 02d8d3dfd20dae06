"""Flags of all commands that predict a run: train.plan, and tune.search and tune.ladder with --dry-run."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import tyro
from typing_extensions import Doc

from infra.cli.units import BytesOrNone
from infra.device.hardware import KNOWN_GPUS
from infra.errors import UserError
from train.config.train_config import TrainConfig

ALL_GPUS = "all"
"""Value of ``--gpu`` that means all known GPUs."""

PlannedGpu = Annotated[
    str | None,
    tyro.conf.arg(metavar="GPU|FILE"),
    Doc(
        "GPU to plan for; it need not be in this machine. Its speed is predicted, too. By default this machine.\n"
        f"- {', '.join(KNOWN_GPUS)}: SXM where there are several\n"
        "- all: a table of these GPUs (train.plan only)\n"
        "- FILE: doctor.json or gpu-report.json, written by infra.doctor on the machine with the GPU; uses its rates"
    ),
]

Prices = Annotated[
    tuple[str, ...],
    tyro.conf.arg(metavar="[PRICE|GPU=PRICE ...]"),
    Doc(
        "Price per hour of one GPU's machine (above 0), in any currency, to predict the cost.\n"
        "With --gpu all one price per GPU, such as A100=1.2 H100=2.5."
    ),
]


def parse_prices(words: Sequence[str], gpu: str | None) -> dict[str, float]:
    """Parse ``--price-per-hour``.

    Returns: prices by the name of the GPU; a single price is that of ``gpu``, or of "" without ``--gpu``.
    """
    prices: dict[str, float] = {}
    for word in words:
        name, equals, text = word.rpartition("=")
        try:
            price = float(text)
        except ValueError:
            price = math.nan
        if not 1e-9 <= price <= 1e18:  # Other values would make the cost infinite.
            raise UserError(f"--price-per-hour {word} is not a price between 1e-9 and 1e18. Use a number such as 1.2.")
        if equals and name not in KNOWN_GPUS:
            raise UserError(f"--price-per-hour {word}: {name} is not a known GPU. Use {', '.join(KNOWN_GPUS)}.")
        if not equals and (gpu == ALL_GPUS or len(words) > 1):
            raise UserError(
                f"--price-per-hour {word} does not name its GPU. For several GPUs, use for example A100=1.2 T4=0.5."
            )
        prices[name if equals else gpu or ""] = price
    unplanned = next((name for name in prices if gpu != ALL_GPUS and name != (gpu or "")), None)
    if unplanned:
        raise UserError(
            f"--price-per-hour {unplanned}={prices[unplanned]:g} is the price of a GPU that is not planned for. Use "
            f"--gpu {unplanned}, or --gpu {ALL_GPUS} to compare GPUs."
        )
    return prices


@dataclass(frozen=True)
class PlanOptions:
    """Predict the memory, arithmetic, time and cost of a training run before it starts."""

    main_flags: ClassVar[tuple[str, ...]] = (
        "model", "data", "gpu", "memory_limit", "price_per_hour", "global_batch", "micro_batch", "precision", "workers",
        "steps", "tokens_per_second", "budget", "hours", "from_runs", "doctor_file",
    )  # fmt: skip

    training: TrainConfig = field(default_factory=TrainConfig)
    gpu: PlannedGpu = None
    memory_limit: BytesOrNone = None
    """Memory that the process may use, which limits the micro-batch; at most the memory of --gpu.
    By default all memory of --gpu, or of this machine's GPU."""
    price_per_hour: Prices = ()
    tokens_per_second: float | None = None
    """Training speed in tokens/s over all workers (above 0), to predict the time; python -m train.run measures it.
    By default the predicted speed of one --gpu."""
    budget: float | None = None
    """Money for a run (above 0), in the currency of --price-per-hour. Plans the compute-optimal GPT-2 for it: its size
    and its tokens; --model sets its vocabulary and context length."""
    hours: float | None = None
    """Hours for a run (above 0), instead of --budget."""
    from_runs: Annotated[tuple[str, ...], tyro.conf.arg(metavar="[DIR ...]")] = ()
    """At least three finished runs of different compute, or a folder of runs, such as runs.
    The law of their validation losses predicts the loss of the planned run, and is drawn to a chart beside them."""
    doctor_file: Annotated[str, tyro.conf.arg(metavar="FILE")] = "runs/doctor.json"
    """File with the network speed measured by infra.doctor --workers; used with --workers above 1."""

    def __post_init__(self) -> None:
        speed = self.tokens_per_second
        if speed is not None and not 1e-9 <= speed <= 1e18:  # Other values would make the time or cost infinite.
            raise UserError(f"--tokens-per-second {speed:g} must be between 1e-9 and 1e18.")
        if self.price_per_hour and speed is None and self.gpu is None:
            raise UserError("--price-per-hour needs a speed. Use --gpu to predict it, or set --tokens-per-second.")
        if self.gpu == ALL_GPUS and (speed is not None or self.training.batch.workers > 1):
            flag = "--tokens-per-second" if speed is not None else "--workers"
            raise UserError(
                f"--gpu {ALL_GPUS} predicts the speed of one GPU of each type. Remove {flag}, or use one --gpu."
            )
        parse_prices(self.price_per_hour, self.gpu)
        if self.budget is not None or self.hours is not None:
            self._check_budget()

    def _check_budget(self) -> None:
        flag, value = ("--budget", self.budget) if self.budget is not None else ("--hours", self.hours)
        training = self.training
        if self.budget is not None and self.hours is not None:
            raise UserError("--budget and --hours both limit the run. Use only one of them.")
        if value is None or not 1e-6 <= value <= 1e12:
            raise UserError(f"{flag} {value} must be between 1e-6 and 1e12.")
        if self.gpu is None:
            raise UserError(f"{flag} needs a speed, which is predicted for --gpu. Use --gpu A100, or --gpu {ALL_GPUS}.")
        if self.budget is not None and not self.price_per_hour:
            price = "1.2" if self.gpu != ALL_GPUS else "A100=1.2 H100=2.5"
            raise UserError(f"--budget {value:g} needs a price. Set --price-per-hour, such as {price}, or use --hours.")
        if training.duration.ends or training.batch.workers > 1 or self.tokens_per_second is not None:
            names = [*training.duration.ends, *["workers"] * (training.batch.workers > 1), "tokens_per_second"]
            raise UserError(f"{flag} sets the length of a run on one GPU. Remove --{names[0].replace('_', '-')}.")
        if training.model.unsupported_reason("model.layers", 1) or training.model.initial_weights:
            raise UserError(f"{flag} chooses the size of a GPT-2. Remove --model {training.model.text}.")

    @property
    def prices(self) -> dict[str, float]:
        """Prices per hour by the name of the GPU; without --gpu by an empty name."""
        return parse_prices(self.price_per_hour, self.gpu)
