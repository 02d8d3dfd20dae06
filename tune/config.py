"""The settings of a search, with every default and its unit."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from infra.errors import UserError
from infra.options import Address, JoinsRay, TrackingUri
from infra.place import Place
from infra.schema import strict, to_json
from infra.units import BytesOrNone, Seconds
from train.config import TrainConfig, divisors
from tune.space import parse_knobs


@strict
@dataclass(frozen=True)
class SearchConfig(JoinsRay):
    """A search around one training run: its flags describe the control and what is held fixed.

    ``--steps``, ``--tokens`` and ``--time-budget`` are those of the run that best.json describes, not of
    the trials.
    """

    training: Annotated[TrainConfig, tyro.conf.arg(name="")] = field(default_factory=TrainConfig)
    memory_limit: BytesOrNone = None
    """Most memory that a process may use: 40GB is 40 x 10^9 bytes, 40GiB 40 x 2^30. Default: all there is."""
    knobs: tuple[str, ...] = ()
    """Settings searched in addition to the micro-batch: names such as compile checkpointing, or all."""
    free_global_batch: bool = False
    """A study of its own: a step is one micro-batch of any size up to --global-batch, without accumulation. Its winner
    trains with another batch, so it does not compare with a search that holds the batch fixed."""
    searcher: Literal["memory", "grid", "optuna"] = "memory"
    """How candidates are chosen.

    memory: by predicted memory and fitted speed
    grid: every candidate in turn
    optuna: by Optuna's TPE sampler"""
    trial_steps: int = 20
    """Most optimizer steps of one trial, at least 7; it ends earlier when its speed is known."""
    trial_time: Seconds = 60.0
    """Most time, above 0, that one trial's steps may take, after the first. Where this is too short for a speed, the
    trial runs once more with enough."""
    compile_time: Seconds = 900.0
    """Most time, above 0, that a trial may take before that, to start, to compile and to run its first step. One that
    takes longer is killed and counts as failed."""
    trial_precision: float = 0.01
    """Half-width of a speed's 95% interval, as a fraction of it between 0 and 1, that ends a trial."""
    confirm: int = 3
    """Most rounds in which the best and the control run again, interleaved, until the winner is clear; 0 trusts the
    first measurement."""
    name: str | None = None
    """Name of the search and of its folder; made from the model and the time when left out."""
    out: str = "runs"
    """Folder that holds runs and searches, or s3://bucket/folder, gs://bucket/folder."""
    config: Path | None = None
    """Read the training settings from this JSON file; flags given with it win."""
    resume: str | None = None
    """Continue the search of this name; its settings are read from its folder."""
    parallel: int = 1
    """Trials at a time, at least 1, each on a machine of its own in the cluster, whose speeds are compared over its own
    control."""
    dry_run: bool = False
    """Print the plan and run nothing."""
    tracking_uri: TrackingUri = None
    address: Address = None

    def __post_init__(self) -> None:
        parse_knobs(self.knobs)
        if self.resume == "":
            raise UserError("--resume is empty: name a search.")
        if self.training.stream:
            raise UserError("--stream cannot be combined with a search, whose trials read token shards: give --data.")
        if self.trial_steps < FEWEST + 2:
            raise UserError(f"--trial-steps {self.trial_steps} gives no speed: {FEWEST + 2} or more are needed.")
        if self.parallel < 1:
            raise UserError(f"--parallel {self.parallel} must be at least 1.")
        if self.confirm < 0:
            raise UserError(f"--confirm {self.confirm} must be at least 0.")
        if not 0 < self.trial_precision < 1:
            raise UserError(f"--trial-precision {self.trial_precision} is a fraction between 0 and 1, such as 0.01.")

    def to_json(self) -> dict[str, Any]:
        """The config as JSON values; :func:`infra.schema.from_json` reads it back."""
        training = self.training.to_json() | {"data": Place.of(self.training.data).address}
        return to_json(self) | {"training": training, "config": None, "resume": None}

    def identity(self) -> dict[str, Any]:
        """What a search over the same data must share with this one to be continued as it."""
        training = self.training.to_json()
        free = ("data", "steps", "tokens", "time_budget", "cycle")
        own = (
            "memory_limit", "free_global_batch", "searcher", "trial_steps", "trial_time", "trial_precision", "confirm",
        )  # fmt: skip
        searched = {name: getattr(self, name) for name in own} | {"knobs": ",".join(parse_knobs(self.knobs))}
        return {name: value for name, value in training.items() if name not in free} | searched


def with_global_batch(training: TrainConfig, global_batch: int) -> TrainConfig:
    """``training`` with another global batch, and the largest micro-batch that divides it and is no larger than before.

    A search's control needs some micro-batch even where the user names none. Raises ``UserError``.
    """
    if global_batch < 1:
        raise UserError(f"--global-batch {global_batch} must be at least 1.")
    micro = max(size for size in divisors(global_batch) if size <= training.micro_batch)
    return replace(training, global_batch=global_batch, micro_batch=micro)


FEWEST = 5
"""Steps after warm-up before a trial is judged: the deviation of fewer is too often far below the truth."""
