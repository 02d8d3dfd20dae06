"""All settings of a run in sections, which flags, files, suites and searches use by their names."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self, get_type_hints

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from infra.errors import UserError
from infra.schema import from_json
from infra.storage.directory import StorageDir
from train.config.checkpoints import CheckpointConfig
from train.config.checks import choices
from train.config.dataset import DatasetConfig
from train.config.duration import DurationConfig
from train.config.step import StepConfig
from train.model_config import AnyModel, Model


@dataclass(frozen=True)
class TrainConfig(StepConfig):
    """All settings of one training run: its steps, its data, its length and its checkpoints."""

    flag_groups: ClassVar[dict[str, tuple[str, ...]]] = {
        "length and checkpoints": (
            "steps", "tokens", "time_budget", "cycle", "checkpoint_every", "keep_checkpoints", "speed_tolerance",
        ),
        "model and optimizer": (
            "model", "global_batch", "seed", "learning_rate", "schedule", "warmup_steps", "weight_decay", "optimizer",
            "beta1", "beta2", "clip_norm", "mask_books", "max_loss_spike",
        ),
        "memory": ("micro_batch", "checkpointing", "loss", "loss_chunks", "allocator", "offload_optimizer"),
        "speed": ("precision", "attention", "compile", "fp8", "loader_threads", "ablate", "deterministic"),
        "device": ("device", "workers", "fsdp", "accelerator"),
        "data": ("data", "stream"),
    }  # fmt: skip

    sections: ClassVar[dict[str, type[Any]]] = {
        "dataset": DatasetConfig, **StepConfig.sections, "duration": DurationConfig, "checkpoints": CheckpointConfig,
    }  # fmt: skip

    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    duration: DurationConfig = field(default_factory=DurationConfig)
    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)

    def to_json(self) -> dict[str, Any]:
        values = super().to_json()
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
        super().__post_init__()
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

    @property
    def step(self) -> StepConfig:
        """The settings of an optimizer step alone."""
        return StepConfig(self.model, self.batch, self.optimization, self.execution)

    def with_model(self, model: AnyModel) -> Self:
        """Return this config with ``model``, and with the plain loss if the model supports no other."""
        return self.replace(model=model, **({"loss": "plain"} if model.unsupported_reason("loss", "fused") else {}))

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps of the run; None if a time budget or the end of the epoch ends it."""
        if self.duration.tokens is not None:
            return self.duration.tokens // self.step_tokens
        return self.duration.steps


SETTING_TYPES: dict[str, Any] = {"model": AnyModel}
"""The types of all settings by name."""
for _kind in TrainConfig.sections.values():
    SETTING_TYPES |= get_type_hints(_kind)

CHOICES = {name: values for kind in TrainConfig.sections.values() for name, values in choices(kind).items()}
"""The valid values of each setting whose type is a ``Literal``, by the setting's name."""


def config_from_json(values: Any, source: str) -> TrainConfig:
    """Read the config from ``values`` by setting. Raises ``UserError`` with their ``source`` if a value is invalid."""
    if not isinstance(values, dict):
        raise UserError(f"{source} is not a JSON object of settings.")
    section_of = TrainConfig.section_of()
    if unknown := next((name for name in values if name not in section_of), None):
        raise UserError(f"{source} has an unknown setting {unknown!r}. Valid settings are {', '.join(section_of)}.")
    parts: dict[str, Any] = {
        part: from_json(kind, {name: value for name, value in values.items() if section_of[name] == part}, source)
        for part, kind in TrainConfig.sections.items()
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
