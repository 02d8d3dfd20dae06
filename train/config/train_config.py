"""All settings of a run in sections, and their flat view by name, which flags, files, suites and searches use."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Self, get_type_hints

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from infra.errors import UserError
from infra.schema import from_json, to_json
from infra.storage.directory import StorageDir
from train.config.batch import AUTO, BatchConfig, divisors
from train.config.checkpoints import CheckpointConfig
from train.config.checks import Conflict, check_combinations, choices, format_flag
from train.config.dataset import DatasetConfig
from train.config.duration import DurationConfig
from train.config.execution import ExecutionConfig
from train.config.optimization import TORCHAO_OPTIMIZERS, OptimizationConfig
from train.model_config import PRESETS, AnyModel, Model

SWITCHES = (
    "attention", "checkpointing", "compile", "fp8", "loss", "loss_chunks", "mask_books", "optimizer", "precision",
    "fsdp",
)  # fmt: skip
"""Settings that not every model supports."""


@dataclass(frozen=True)
class TrainConfig:
    """All settings of one training run: its mathematics, its execution, and its length."""

    flag_groups: ClassVar[dict[str, tuple[str, ...]]] = {
        "data": ("data", "stream"),
        "model and optimizer": (
            "model", "global_batch", "seed", "learning_rate", "schedule", "warmup_steps", "weight_decay", "optimizer",
            "beta1", "beta2", "clip_norm", "mask_books", "max_loss_spike",
        ),
        "memory": ("micro_batch", "checkpointing", "loss", "loss_chunks", "allocator"),
        "speed": ("precision", "attention", "compile", "fp8", "loader_threads", "ablate"),
        "device": ("device", "workers", "fsdp", "accelerator"),
        "length and checkpoints": (
            "steps", "tokens", "time_budget", "speed_tolerance", "cycle", "checkpoint_every", "keep_checkpoints",
        ),
    }  # fmt: skip

    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    model: Model = PRESETS["gpt2-124m"]
    """Preset, optionally with changes (tiny,layers=4): gpt2-124m, gpt2-355m, gpt2-774m, gpt2-1558m, small, edu-3m,
    tiny. Or a custom model as package.module:callable,width=512, an nn.Module whose forward takes (inputs, targets).
    Its vocabulary follows the data unless it is set."""
    batch: BatchConfig = field(default_factory=BatchConfig)
    optimization: OptimizationConfig = field(default_factory=OptimizationConfig)
    execution: ExecutionConfig = field(default_factory=ExecutionConfig)
    duration: DurationConfig = field(default_factory=DurationConfig)
    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)

    @classmethod
    def of(cls, **settings: Any) -> Self:
        """A config with these ``settings`` by name, and the defaults of all other settings."""
        return cls().replace(**settings)

    def replace(self, **settings: Any) -> Self:
        """A copy of this config with these ``settings``, by name, changed."""
        changes: dict[str, dict[str, Any]] = {}
        for name, value in settings.items():
            if name not in _PART_OF:
                raise TypeError(f"{name!r} is not a setting of a run")
            changes.setdefault(_PART_OF[name], {})[name] = value
        parts = {
            part: replace(getattr(self, part), **values) if part in _PARTS else values[part]
            for part, values in changes.items()
        }
        return replace(self, **parts)

    def setting(self, name: str) -> Any:
        """The value of the setting ``name``."""
        part = getattr(self, _PART_OF[name])
        return getattr(part, name) if _PART_OF[name] in _PARTS else part

    def flat(self) -> dict[str, Any]:
        """All settings by name."""
        return {name: self.setting(name) for name in _PART_OF}

    def to_json(self) -> dict[str, Any]:
        """The settings by name as JSON values; :func:`config_from_json` reads them back."""
        values: dict[str, Any] = {"model": to_json(self.model)}
        for part in _PARTS:
            values |= to_json(getattr(self, part))
        if not self.dataset.stream:
            del values["reading"]  # It has no effect then.
        return values

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Let pydantic read and write a config inside another dataclass by its flat view."""
        return core_schema.no_info_plain_validator_function(
            lambda values: config_from_json(values, "training"),
            serialization=core_schema.plain_serializer_function_ser_schema(cls.to_json),
        )

    def __post_init__(self) -> None:
        self._check_batch()
        self._check_length()
        settings = self.flat()
        for name in SWITCHES:
            if reason := self.model.unsupported_reason(name, settings[name]):
                model = self.model.text
                raise UserError(f"{format_flag(name, settings[name])} does not apply to --model {model}: {reason}.")
        check_combinations(settings, self._conflicts())

    def _check_batch(self) -> None:
        batch, chunks = self.batch, self.execution.loss_chunks
        if batch.micro_batch == AUTO and not self.micro_batches:
            tokens = batch.global_batch // batch.workers * self.model.context_length
            raise UserError(
                f"--loss-chunks {chunks} does not divide the {tokens:,} tokens of --global-batch {batch.global_batch} "
                "on each worker. Use a divisor of this number."
            )
        if batch.micro_batch != AUTO and (tokens := batch.micro_batch * self.model.context_length) % chunks:
            raise UserError(
                f"--loss-chunks {chunks} does not divide the {tokens:,} tokens of --micro-batch {batch.micro_batch}. "
                "Use a divisor of this number."
            )

    def _check_length(self) -> None:
        tokens = self.duration.tokens
        if self.dataset.stream and not self.duration.ends:
            raise UserError(
                f"--stream {' '.join(self.dataset.stream)} has no known length. Set --steps, --tokens or --time-budget."
            )
        if tokens is not None and tokens < self.step_tokens:
            raise UserError(
                f"--tokens {tokens:,} is less than the {self.step_tokens:,} tokens of one step "
                f"(--global-batch {self.batch.global_batch} x context length {self.model.context_length}). Increase "
                "--tokens or reduce --global-batch."
            )

    def _conflicts(self) -> Iterator[Conflict]:
        """Combinations of settings of different sections that are not supported."""
        optimizer, workers, precision = self.optimization.optimizer, self.batch.workers, self.execution.precision
        bf16_weights = ("optimizer", optimizer == "adamw-bf16")
        other_precision = ("precision", precision != "bf16-activations")
        yield bf16_weights, other_precision, "bf16 weights need --precision bf16-activations"
        yield bf16_weights, ("workers", workers > 1), "each worker would round its own copy of the weights"
        fsdp = ("fsdp", self.execution.fsdp)
        yield fsdp, ("workers", workers == 1), "sharding needs several workers"
        unsharded = ("optimizer", optimizer in (*TORCHAO_OPTIMIZERS, "adafactor", "muon"))
        yield fsdp, unsharded, "only AdamW supports sharding"

    @property
    def micro_batches(self) -> list[int]:
        """Micro-batches that divide each worker's global batch into whole loss chunks, in ascending order."""
        length, chunks = self.model.context_length, self.execution.loss_chunks
        sizes = divisors(self.batch.global_batch // self.batch.workers)
        return [size for size in sizes if size * length % chunks == 0]

    @property
    def step_tokens(self) -> int:
        """Training tokens per optimizer step, over all workers."""
        return self.batch.global_batch * self.model.context_length

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps of the run; None if a time budget or the end of the epoch ends it."""
        if self.duration.tokens is not None:
            return self.duration.tokens // self.step_tokens
        return self.duration.steps


_PARTS: dict[str, type[Any]] = {
    "dataset": DatasetConfig, "batch": BatchConfig, "optimization": OptimizationConfig, "execution": ExecutionConfig,
    "duration": DurationConfig, "checkpoints": CheckpointConfig,
}  # fmt: skip

_PART_OF = {"model": "model"} | {setting.name: part for part, kind in _PARTS.items() for setting in fields(kind)}
"""Name of the config's section that has a setting, by the setting's name."""

SETTING_TYPES: dict[str, Any] = {"model": AnyModel}
"""The types of all settings by name."""
for _kind in _PARTS.values():
    SETTING_TYPES |= get_type_hints(_kind)

CHOICES = {name: values for kind in _PARTS.values() for name, values in choices(kind).items()}
"""The valid values of each setting whose type is a ``Literal``, by the setting's name."""


def config_from_json(values: Any, source: str) -> TrainConfig:
    """Read the config from ``values`` by setting. Raises ``UserError`` with their ``source`` if a value is invalid."""
    if not isinstance(values, dict):
        raise UserError(f"{source} is not a JSON object of settings.")
    if unknown := next((name for name in values if name not in _PART_OF), None):
        raise UserError(f"{source} has an unknown setting {unknown!r}. Valid settings are {', '.join(_PART_OF)}.")
    parts: dict[str, Any] = {
        part: from_json(kind, {name: value for name, value in values.items() if _PART_OF[name] == part}, source)
        for part, kind in _PARTS.items()
    }
    if "model" in values:
        parts["model"] = from_json(Model, values["model"], source)  # type: ignore[arg-type]
    try:
        return TrainConfig(**parts)
    except UserError as mistake:
        raise UserError(f"{source}: {mistake}") from None


def load_config(path: Path | str, flag: str = "--config") -> TrainConfig:
    """Load the file that ``flag`` names: ``config.json`` of a run or ``best.json`` of a search, in any storage."""
    location = StorageDir.of(path)
    try:
        values = json.loads(location.parent.read(location.name))
    except FileNotFoundError:
        raise UserError(
            f"{flag} {path} does not exist. Use runs/NAME/config.json of a run, or runs/NAME/best.json of a search."
        ) from None
    except (OSError, ValueError, RecursionError) as damage:  # RecursionError: JSON that is nested too deeply.
        raise UserError(f"{flag} {path} cannot be read as JSON: {damage}.") from damage
    if not isinstance(values, dict):
        raise UserError(f"{flag} {path} is not a JSON object of settings.")
    return config_from_json(values.get("config", values), str(path))
