"""Settings of a search and of a ladder."""

import math
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import tyro

from infra.cli.options import Address, ConfigFile, JoinsRay, Switch, TrackingUri
from infra.cli.units import BytesOrNone, Seconds, SecondsOrNone, check_numbers
from infra.errors import UserError
from infra.schema import strict, to_json
from infra.storage.directory import StorageDir
from train.config import Cycle, CycleText, Device, PlannedGpu, Prices, TrainConfig, parse_prices
from train.model_config import ModelOrNone
from tune.knobs import parse_knobs, parse_learning_knobs

MIN_MEASURED_STEPS = 5
"""Minimum number of steps after warm-up in a trial; the deviation of fewer steps is often far too small."""

MIN_RUNG_STEPS = 8
"""Minimum number of steps of a rung: one compiles, three warm up, and four are measured."""


@strict
@dataclass(frozen=True, kw_only=True)
class ExperimentConfig(JoinsRay):
    """Settings that a search and a ladder have in common."""

    kind: ClassVar[str]
    """Noun for the experiment in messages and file names: search or ladder."""
    resumable_changes: ClassVar[tuple[str, ...]]
    """Settings of the subclass that may change when the experiment is resumed."""

    name: str | None = None
    """Name of the search or ladder and of its folder. By default the name of the suite, or "search", with the time."""
    out: Annotated[str, tyro.conf.arg(metavar="DIR")] = "runs"
    """Folder that contains runs, searches and ladders: local, or s3://bucket/folder (gs://, az://)."""
    resume: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """Resume the search or ladder with this name.
    Its settings are read from its folder, and finished trials are reused."""
    dry_run: Switch = False
    """Print the plan and run nothing. It needs no data."""
    gpu: PlannedGpu = None
    price_per_hour: Prices = ()
    tracking_uri: TrackingUri = None
    address: Address = None

    def check_plan(self) -> None:
        """Raise ``UserError`` for flags of a plan without ``--dry-run``, and for invalid prices."""
        for flag, value in (("--gpu", self.gpu), ("--price-per-hour", " ".join(self.price_per_hour))):
            if value and not self.dry_run:
                raise UserError(f"{flag} {value} only plans a {self.kind}. Add --dry-run, or remove {flag} to run it.")
        parse_prices(self.price_per_hour, self.gpu)

    @property
    def price(self) -> float | None:
        """Price per hour of the machine that is planned for; None if it is unknown."""
        return parse_prices(self.price_per_hour, self.gpu).get(self.gpu or "")

    def to_json(self) -> dict[str, Any]:
        """Return the settings by name as JSON values, as the experiment's folder stores them."""
        return to_json(self) | {"resume": None}

    def identity(self) -> dict[str, Any]:
        """Return the settings that cannot be changed when the experiment is resumed."""
        values = self.to_json()
        values = values.pop("training", {}) | values
        ignored = {*self.resumable_changes, *(field.name for field in fields(ExperimentConfig))}
        return {n: " ".join(map(str, v)) if isinstance(v, list) else v for n, v in values.items() if n not in ignored}


@strict
@dataclass(frozen=True)
class SearchConfig(ExperimentConfig):
    """Find the micro-batch and the knobs with the most tokens per second under a memory limit, or, with --objective
    loss, the settings that learn fastest.

    The training flags describe the control; settings that are not searched keep these values. --steps, --tokens and
    --time-budget set the length of the run that best.json describes, not of the trials.
    """

    kind = "search"
    resumable_changes = (
        "data", "steps", "tokens", "time_budget", "cycle", "compile_time", "config", "max_concurrent_trials",
        "search_time",
    )  # fmt: skip
    main_flags = (
        "objective", "data", "model", "global_batch", "memory_limit", "knobs", "train_time", "accumulations",
        "searcher", "device", "name", "resume", "dry_run", "gpu", "price_per_hour",
    )  # fmt: skip
    flag_groups: ClassVar[dict[str, tuple[str, ...]]] = {
        "lowest loss": ("target_loss", "search_time"),
        "trial": ("trial_steps", "trial_time", "compile_time", "speed_tolerance", "confirm_rounds"),
        "output and cluster": (
            "out",
            "config",
            "tracking_uri",
            "address",
            "max_concurrent_trials",
            "accelerator",
        ),
    }  # fmt: skip

    training: TrainConfig = field(default_factory=TrainConfig)
    """Settings of the control; settings that are not searched keep these values."""
    objective: Literal["speed", "loss"] = "speed"
    """Goal of the search.
    - speed: most tokens per second; the knobs are settings of the execution
    - loss: lowest held-out loss after --train-time; the knobs are settings of the mathematics of training"""
    train_time: SecondsOrNone = None
    """With --objective loss, the training time of the run to find settings for (above 0), such as 30m.
    Candidates train for up to half of it; their losses at the full time are extrapolated."""
    target_loss: float | None = None
    """With --objective loss, held-out loss in nats/token to reach soonest (above 0).
    By default the goal is the lowest loss after --train-time."""
    search_time: SecondsOrNone = None
    """With --objective loss, approximate time of the search (above 0): after half of it, only the finalists train.
    By default the search ends once no candidate near the best one is untried."""
    memory_limit: BytesOrNone = None
    """Maximum memory of a process: 40GB is 40 x 10^9 bytes, 40GiB is 40 x 2^30. By default all available memory."""
    accumulations: tuple[int, ...] = ()
    """Accumulation values to search (each at least 1), each with any micro-batch; for example 1 2 4 8.
    The global batch then varies between candidates, so the winner's may differ from the control's.
    By default the global batch is fixed."""
    knobs: Annotated[tuple[str, ...], tyro.conf.arg(metavar="[NAME=VALUE,... ...]")] = ()
    """Other settings to search, each with the values to try in addition to the control's value.
    Of --objective speed: allocator, attention, checkpointing, compile, fp8, loader_threads, loss, loss_chunks,
    optimizer and precision; for example compile=off,whole. checkpointing=auto stands for all of its values.
    Of --objective loss: learning_rate, global_batch, schedule, warmup_steps, weight_decay, beta1, beta2, optimizer,
    clip_norm, and layers, heads, width and dropout of a preset; for example learning_rate=3e-4,1e-3."""
    searcher: Literal["memory", "grid", "optuna"] = "memory"
    """Strategy that chooses candidates.
    - memory: by predicted memory and fitted speed
    - grid: every candidate in turn
    - optuna: by Optuna's TPE sampler"""
    trial_steps: int = 20
    """Maximum number of optimizer steps of a trial (at least 7); a trial ends earlier once its speed is known."""
    trial_time: Seconds = 60.0
    """Maximum time of a trial's steps after the first one (above 0).
    If it is too short to measure a speed, the trial runs once more with enough time."""
    compile_time: Seconds = 900.0
    """Maximum time of a trial for startup, compilation and its first step (above 0).
    A trial that exceeds it is killed and counts as failed."""
    speed_tolerance: float = 0.01
    """Relative half-width of a speed's 95% confidence interval at which a trial ends (between 0 and 1)."""
    confirm_rounds: int = 3
    """Maximum number of rounds in which the best candidates and the control run again, interleaved, until the winner is
    clear (0: rely on the first measurement)."""
    config: ConfigFile = None
    max_concurrent_trials: int = 1
    """Number of concurrent trials (at least 1), each on its own machine of the cluster.
    Speeds are compared relative to the control on the same machine."""

    def __post_init__(self) -> None:
        self._check_objective()
        self.check_plan()
        if invalid := [n for n in self.accumulations if n < 1]:
            raise UserError(f"--accumulations {invalid[0]} must be at least 1.")
        if repeated := [n for n in self.accumulations if self.accumulations.count(n) > 1]:
            raise UserError(f"--accumulations contains {repeated[0]} twice. Remove one of them.")
        if max(self.accumulations, default=1) >= 2**31:
            raise UserError(f"--accumulations {max(self.accumulations)} is too large. Use values below 2^31.")
        if self.training.dataset.stream:
            raise UserError("--stream is not supported by a search. Use token shards with --data.")
        check_minimum(self, trial_steps=MIN_MEASURED_STEPS + 2, max_concurrent_trials=1, confirm_rounds=0)
        check_numbers(self)
        if not 0 < self.speed_tolerance < 1:
            raise UserError(
                f"--speed-tolerance {self.speed_tolerance} must be between 0 and 1. Use a fraction such as 0.01."
            )

    def _check_objective(self) -> None:
        """Raise ``UserError`` for knobs or flags of another objective."""
        learning = {"train_time": self.train_time, "target_loss": self.target_loss, "search_time": self.search_time}
        for name, value in learning.items():
            flag = f"--{name.replace('_', '-')}"
            if value is not None and self.objective == "speed":
                raise UserError(f"{flag} {value:g} is only for --objective loss. Add it, or remove {flag}.")
            if value is not None and not 0 < value < math.inf:
                raise UserError(f"{flag} {value:g} must be above 0.")
        if self.objective == "speed":
            parse_knobs(self.knobs)
            return
        parse_learning_knobs(self.knobs)
        if self.train_time is None:
            raise UserError("--objective loss needs the time of the final run. Use for example --train-time 1h.")
        if self.accumulations:
            raise UserError("--accumulations is only for --objective speed. Search --knobs global_batch instead.")
        if self.searcher != "memory":
            raise UserError(f"--searcher {self.searcher} is only for --objective speed. Remove it.")

    def to_json(self) -> dict[str, Any]:
        training = self.training.to_json() | {"data": StorageDir.of(self.training.dataset.data).address}
        return super().to_json() | {"training": training, "config": None}


DEFAULT_CYCLE = Cycle(200, 20)
"""Cycle of a ladder's rungs by default. All rungs validate on the same windows, so that their losses are comparable."""
TIME_BUDGET_SECONDS = 300.0
"""Time per rung of a ladder with neither --steps nor --time-budget."""
SPEED_TOLERANCE = 0.005
"""Relative half-width of the speed's interval at which a rung of a ladder without --steps ends early."""

BATCH = 32
"""Micro-batch of a suite that does not set one."""

FIT_MEMORY_LIMIT_BYTES = 40 * 10**9
"""Memory limit of --fit-batch if --memory-limit is not set."""


@strict
@dataclass(frozen=True)
class LadderConfig(ExperimentConfig):
    """Measure how much each optimization of a suite gains on this machine.

    A ladder is an ablation study. Each rung, one change of the configuration, runs in a fresh process between two runs
    of the baseline.
    """

    kind = "ladder"
    resumable_changes = ("data", "compare", "profile")
    main_flags = (
        "suite", "rungs", "data", "model", "steps", "time_budget", "memory_limit", "device", "compare", "name",
        "resume", "dry_run", "gpu", "price_per_hour",
    )  # fmt: skip
    flag_groups: ClassVar[dict[str, tuple[str, ...]]] = {
        "measurement": ("speed_tolerance", "cycle", "seed", "seeds", "fit_batch", "search_result", "stream", "profile"),
        "output and cluster": ("out", "tracking_uri", "address", "accelerator"),
    }

    suite: Annotated[str, tyro.conf.arg(metavar="NAME|FILE")] = "a100"
    """Name of a suite, or a Python file with SUITE = [Rung(...), ...].
    - a100: a published study of GPT-2 124M, starting from the textbook loop
    - loop: cost of each habit of a training loop, on a small model
    - memory: techniques that save memory, and their cost in speed
    - kernels: how torch.compile chooses and launches kernels
    - accumulation: four micro-batches per step, from eager to max-autotune
    - loader: threads that read batches ahead
    - precision: cost of fewer bits in validation loss
    - sizes: sizes that fill a GPU's tiles and waves, and sizes that do not
    - aa: the same run ten times, to measure how often the verdict is a false alarm"""
    rungs: Annotated[tuple[str, ...], tyro.conf.arg(metavar="[NAME ...]")] = ()
    """Names of the suite's rungs to run. By default all of them.
    In a cumulative suite, the changes of rungs that are not named are not applied either."""
    data: Annotated[str, tyro.conf.arg(metavar="DIR")] = "data/tokens"
    """Token shards, created by python -m pipeline.tokenize: a folder, or s3://bucket/folder (gs://, az://)."""
    model: ModelOrNone = None
    """Model to use instead of the suite's: a preset, optionally with changes, or package.module:callable."""
    steps: int | None = None
    """Optimizer steps per rung (at least 8)."""
    time_budget: SecondsOrNone = None
    """Time per rung after its first step, including its validation (above 0). By default 5m, unless --steps is set."""
    speed_tolerance: float | None = None
    """Relative half-width of the speed's confidence interval at which a rung ends early, checked after each cycle (0:
    never; below 1). By default 0.005, or 0 with --steps, because losses are compared after equal steps."""
    cycle: CycleText = DEFAULT_CYCLE
    """Training and validation between two reports: a number of steps or a time, then a number of validation batches, as
    in 200+20 or 20s+20 (+0: no validation), because all rungs validate on the same windows."""
    fit_batch: bool = False
    """Use the largest batch that is predicted to fit --memory-limit in every rung, instead of the suite's batch."""
    memory_limit: BytesOrNone = None
    """Maximum memory of a rung's process; a rung that needs more fails. By default none, or 40GB with --fit-batch."""
    device: Literal["auto", Device] = "auto"
    """Device to train on; auto is a CUDA GPU if there is one, else the CPU."""
    accelerator: Annotated[str | None, tyro.conf.arg(metavar="GPU")] = None
    """Type of GPU that rungs need, by Ray's name, such as A100 or H200. Waits until the cluster has one."""
    seed: int = 0
    """Seed of every rung (at least 0)."""
    seeds: int | None = None
    """Number of seeds for rungs that change the precision or the numerics (at least 1).
    Their validation losses are compared with those of the previous rung after equal steps.
    By default 3 in the suite precision, and 1, which compares no losses, in the other suites."""
    search_result: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """The best.json of a search; its batch and execution settings become the last rung."""
    stream: Annotated[tuple[str, ...], tyro.conf.arg(metavar="[SOURCE ...]")] = ()
    """Books, given as sources of pipeline.tokenize.
    The additional last rung "streaming" trains directly from them instead of from --data."""
    profile: Annotated[tuple[str, ...], tyro.conf.arg(metavar="[RUNG RUNG]")] = ()
    """Names of two rungs, or "baseline" and a rung, whose time and memory to show side by side.
    At the end of the ladder, or with --resume of a finished one, two steps of each are recorded as by train.profile."""
    compare: Annotated[str | None, tyro.conf.arg(metavar="NAME|DIR|study")] = None
    """Ladder to compare with, by name or folder; or "study", the published study that the suite repeats (a100, loop and
    memory only)."""

    def __post_init__(self) -> None:
        if self.steps is not None and self.time_budget is not None:
            raise UserError("--steps and --time-budget both set the length of a rung. Use only one of them.")
        if self.profile and len(set(self.profile)) != 2:
            names = " ".join(map(repr, self.profile))
            raise UserError(f"--profile {names} must name two rungs, such as --profile baseline compile.")
        self.check_plan()
        check_minimum(self, steps=MIN_RUNG_STEPS, seeds=1, seed=0)
        check_same_windows(self.cycle)
        if self.speed_tolerance is not None and not 0 <= self.speed_tolerance < 1:
            raise UserError(f"--speed-tolerance {self.speed_tolerance} must be 0, or a fraction below 1.")
        check_numbers(self)

    def to_json(self) -> dict[str, Any]:
        from pipeline.books.sources import to_absolute_source

        absolute = replace(
            self,
            suite=str(Path(self.suite).resolve()) if Path(self.suite).suffix else self.suite,
            data=StorageDir.of(self.data).address,
            search_result=self.search_result and self.search_result.resolve(),
            stream=tuple(map(to_absolute_source, self.stream)),
        )
        return to_json(absolute) | {"resume": None, "compare": None}

    def with_ends(self) -> "LadderConfig":
        """Return this config with the default length of a rung and the default memory limit of --fit-batch."""
        limit = FIT_MEMORY_LIMIT_BYTES if self.fit_batch and self.memory_limit is None else self.memory_limit
        if self.steps is not None:
            return replace(self, memory_limit=limit)
        speed_tolerance = SPEED_TOLERANCE if self.speed_tolerance is None else self.speed_tolerance
        return replace(
            self,
            memory_limit=limit,
            time_budget=self.time_budget or TIME_BUDGET_SECONDS,
            speed_tolerance=speed_tolerance,
        )

    @property
    def training(self) -> TrainConfig:
        """Settings from which the suite's baseline is derived; those that a rung may change are never ``auto``."""
        return TrainConfig.of(
            micro_batch=BATCH, compile="off", loss="plain", data=StorageDir.of(self.data).address,
            model=self.model or TrainConfig.model, seed=self.seed, device=self.device, accelerator=self.accelerator,
            cycle=self.cycle, keep_checkpoints=0, speed_tolerance=self.speed_tolerance or None, steps=self.steps,
            time_budget=self.time_budget,
        )  # fmt: skip


def check_same_windows(cycle: Cycle) -> None:
    """Raise ``UserError`` if each rung of a ladder would choose its number of validation windows by its own speed."""
    if cycle.val_batches is None:
        raise UserError(
            f"--cycle {cycle} has no number of validation batches, so rungs would validate on different windows. "
            f"Use {cycle}+20, or another number."
        )


def check_minimum(config: ExperimentConfig, **minimums: int) -> None:
    """Raise ``UserError`` if a setting is below its minimum."""
    for name, minimum in minimums.items():
        value = getattr(config, name)
        if value is not None and value < minimum:
            raise UserError(f"--{name.replace('_', '-')} {value} must be at least {minimum}.")
