"""The settings of a search and of a ladder, with every default and its unit."""

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from infra.errors import UserError
from infra.options import Address, ConfigFile, JoinsRay, TrackingUri
from infra.schema import strict, to_json
from infra.storage_dir import StorageDir
from infra.units import BytesOrNone, Seconds, SecondsOrNone, check_numbers
from train.config import Cycle, CycleText, Device, TrainConfig
from train.model_config import ModelOrNone
from tune.space import parse_knobs

FEWEST = 5
"""Steps after warm-up before a trial is judged: the deviation of fewer is too often far below the truth."""

SHORTEST = 8
"""Steps that a rung needs: one compiles, three warm up, four are measured."""


@strict
@dataclass(frozen=True, kw_only=True)
class ExperimentConfig(JoinsRay):
    """What a search and a ladder have in common."""

    kind: ClassVar[str]
    free: ClassVar[tuple[str, ...]]
    """Other settings that may change when it is continued."""

    name: str | None = None
    """Name of the search or ladder and of its folder; made from what it is about and the time when left out."""
    out: str = "runs"
    """Folder that holds runs, searches and ladders, or s3://bucket/folder (gs://, az://)."""
    resume: str | None = None
    """Continue the one of this name; its settings are read from its folder, and what has run is kept."""
    dry_run: bool = False
    """Print the plan and run nothing."""
    tracking_uri: TrackingUri = None
    address: Address = None

    def to_json(self) -> dict[str, Any]:
        return to_json(self) | {"resume": None}

    def identity(self) -> dict[str, Any]:
        """What an experiment over the same data must share with this one to be continued as it."""
        values = self.to_json()
        values |= values.pop("training", {})
        free = {*self.free, *(field.name for field in fields(ExperimentConfig))}
        return {n: " ".join(map(str, v)) if isinstance(v, list) else v for n, v in values.items() if n not in free}


@strict
@dataclass(frozen=True)
class SearchConfig(ExperimentConfig):
    """Find the micro-batch, and the knobs, with the most tokens per second under a memory limit."""

    kind = "search"
    free = ("data", "steps", "tokens", "time_budget", "cycle", "compile_time", "config", "parallel", "gpu")

    training: TrainConfig = field(default_factory=TrainConfig)
    """The control and what is held fixed.
    --steps, --tokens and --time-budget are those of the run that best.json describes, not of the trials."""
    memory_limit: BytesOrNone = None
    """Most memory that a process may use: 40GB is 40 x 10^9 bytes, 40GiB 40 x 2^30. None: all there is."""
    accumulations: tuple[int, ...] = ()
    """Search these numbers of micro-batches per step, at least 1, with any micro-batch, such as 1 2 4 8.
    The global batch then varies, and the winner may train with another than the control. None given: it is fixed."""
    knobs: tuple[str, ...] = ()
    """Settings searched too, each with the values to try besides the control's: compile=off,whole checkpointing=full.
    There are allocator, attention, checkpointing, compile, fp8, loader_workers, loss, loss_chunks, optimizer and
    precision."""
    searcher: Literal["memory", "grid", "optuna"] = "memory"
    """How candidates are chosen.
    - memory: by predicted memory and fitted speed
    - grid: every candidate in turn
    - optuna: by Optuna's TPE sampler"""
    trial_steps: int = 20
    """Most optimizer steps of one trial, at least 7; it ends earlier when its speed is known."""
    trial_time: Seconds = 60.0
    """Most time, above 0, that one trial's steps may take, after the first.
    Where this is too short for a speed, the trial runs once more with enough."""
    compile_time: Seconds = 900.0
    """Most time, above 0, that a trial may take before that, to start, to compile and to run its first step.
    One that takes longer is killed and counts as failed."""
    trial_precision: float = 0.01
    """Half-width of a speed's 95% interval, as a fraction of it between 0 and 1, that ends a trial."""
    confirm: int = 3
    """Most rounds in which the best and the control run again, interleaved, until the winner is clear.
    0 trusts the first measurement."""
    config: ConfigFile = None
    parallel: int = 1
    """Trials at a time, at least 1, each on a machine of its own in the cluster.
    The speeds of a machine are compared over its own control."""
    gpu: str | None = None
    """With --dry-run, the GPU to plan for, which need not be here: as train.plan --gpu.
    The candidates that should fit are listed with the memory and the speed to expect."""

    def __post_init__(self) -> None:
        parse_knobs(self.knobs)
        if self.gpu and not self.dry_run:
            raise UserError(f"--gpu {self.gpu} is for planning: add --dry-run, or leave it out to search on the GPU.")
        if wrong := [n for n in self.accumulations if n < 1 or self.accumulations.count(n) > 1]:
            raise UserError(f"--accumulations {wrong[0]} must be {'given once' if wrong[0] > 0 else 'at least 1'}.")
        if max(self.accumulations, default=1) >= 2**31:
            raise UserError(
                f"--accumulations {max(self.accumulations)} is too many micro-batches: give less than 2^31."
            )
        if self.training.stream:
            raise UserError("--stream cannot be combined with a search, whose trials read token shards: give --data.")
        refuse_below(self, trial_steps=FEWEST + 2, parallel=1, confirm=0)
        check_numbers(self)
        if not 0 < self.trial_precision < 1:
            raise UserError(f"--trial-precision {self.trial_precision} is a fraction between 0 and 1, such as 0.01.")

    def to_json(self) -> dict[str, Any]:
        training = self.training.to_json() | {"data": StorageDir.of(self.training.data).address}
        return super().to_json() | {"training": training, "config": None}


CYCLE = Cycle()
TIME_BUDGET, WITHIN = 300.0, 0.005
"""Most seconds per rung, and the precision of its speed at which it ends earlier, unless --steps is given."""

BATCH = 32
"""Micro-batch of a suite that names none."""

FITTED = 40 * 10**9
"""Memory limit of --fit, in bytes, unless --memory-limit is given."""


@strict
@dataclass(frozen=True)
class LadderConfig(ExperimentConfig):
    """Measure what each optimisation of a suite gains on this machine."""

    kind = "ladder"
    free = ("data", "compare")

    suite: str = "a100"
    """Name of a suite, or a Python file with SUITE = [Rung(...), ...].
    - a100: a published study of GPT-2 124M, from the textbook loop upwards
    - loop: what each habit of a training loop costs, on a small model
    - memory: what saves memory, and what it costs in speed
    - kernels: how torch.compile chooses and launches kernels
    - accumulation: four micro-batches per step, from eager to max-autotune
    - loader: threads that read batches ahead
    - precision: what fewer bits cost in held-out loss
    - sizes: sizes that fill a GPU's tiles and waves, and sizes that do not
    - aa: the same run ten times, to see how often the verdict is a false alarm"""
    rungs: tuple[str, ...] = ()
    """Only these rungs of the suite, by name. None given: all.
    In a suite whose rungs keep those before them, what is left out is not kept either."""
    data: str = "data/tokens"
    """Token shards, made by python -m pipeline.tokenize: a folder, or s3://bucket/folder (gs://, az://)."""
    model: ModelOrNone = None
    """Model instead of the suite's: a preset, with changes if any."""
    steps: int | None = None
    """Optimizer steps per rung, at least 8."""
    time_budget: SecondsOrNone = None
    """Time per rung, above 0, from its first step on. None: 5m, unless --steps is given."""
    within: float | None = None
    """End a rung early, at the end of a cycle, once its speed is known to this fraction, below 1; 0 never does.
    None: 0.005, half a percent; 0 with --steps, which are for comparing losses."""
    cycle: CycleText = CYCLE
    """Training steps, at least 1, then validation batches, between two reports."""
    fit: bool = False
    """Give every rung the largest batch predicted to fit --memory-limit instead of the suite's."""
    memory_limit: BytesOrNone = None
    """Most memory that the process of a rung may use; a rung that uses more fails. 40GB if only --fit is given."""
    device: Device = "auto"
    """Device to train on; auto is a CUDA GPU if there is one, else the CPU."""
    accelerator: str | None = None
    """Type of GPU that rungs need, by Ray's name for it: A100, H200. On a cluster without one, it is waited for."""
    seed: int = 0
    """Seed of every rung; at least 0."""
    seeds: int | None = None
    """Seeds, at least 1, with which rungs of another precision or other numerics are run.
    Their held-out losses are compared with those of the rung before at equal steps.
    None: 3 in the suite precision; 1, which compares none, in others."""
    best: Path | None = None
    """best.json of a search, whose batch and execution settings become a last rung."""
    stream: tuple[str, ...] = ()
    """Books, as any source of pipeline.tokenize.
    A last rung, called streaming, trains straight from them instead of from --data."""
    compare: str | None = None
    """Compare with this ladder, by name or folder; or with what the suite (a100, loop or memory) repeats: study."""

    def __post_init__(self) -> None:
        if self.steps is not None and self.time_budget is not None:
            raise UserError("--steps and --time-budget both end a rung; give one of them.")
        refuse_below(self, steps=SHORTEST, seeds=1, seed=0)
        if self.within is not None and not 0 <= self.within < 1:
            raise UserError(f"--within {self.within} must be a fraction below 1, or 0.")
        check_numbers(self)

    def to_json(self) -> dict[str, Any]:
        from pipeline.books.sources import whole_path

        whole = replace(
            self,
            suite=str(Path(self.suite).resolve()) if Path(self.suite).suffix else self.suite,
            data=StorageDir.of(self.data).address,
            best=self.best and self.best.resolve(),
            stream=tuple(map(whole_path, self.stream)),
        )
        return to_json(whole) | {"resume": None, "compare": None}

    def with_ends(self) -> "LadderConfig":
        """This one with the defaults of what ends a rung, and of the memory limit that --fit needs."""
        limit = FITTED if self.fit and self.memory_limit is None else self.memory_limit
        if self.steps is not None:
            return replace(self, memory_limit=limit)
        within = WITHIN if self.within is None else self.within
        return replace(self, memory_limit=limit, time_budget=self.time_budget or TIME_BUDGET, within=within)

    @property
    def training(self) -> TrainConfig:
        """The run that the suite's baseline is derived from; nothing that a rung may be about is left to be decided."""
        return TrainConfig(
            micro_batch=BATCH, compile="off", loss="plain", data=StorageDir.of(self.data).address,
            model=self.model or TrainConfig.model, seed=self.seed, device=self.device, accelerator=self.accelerator,
            cycle=self.cycle, keep_checkpoints=0, within=self.within or None, steps=self.steps,
            time_budget=self.time_budget,
        )  # fmt: skip


def refuse_below(config: ExperimentConfig, **least: int) -> None:
    """Raise ``UserError`` for a setting that is below its ``least`` value."""
    for name, bound in least.items():
        value = getattr(config, name)
        if value is not None and value < bound:
            raise UserError(f"--{name.replace('_', '-')} {value} must be {bound} or more.")
