"""The settings of an optimizer step, and the flat view of a config by the names of its settings."""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any, ClassVar, Self

from infra.errors import UserError
from infra.schema import to_json
from train.config.batch import AUTO, Batch, BatchConfig, divisors
from train.config.checks import Conflict, check_combinations, format_flag
from train.config.execution import Execution, ExecutionConfig
from train.config.optimization import OFFLOADED_OPTIMIZERS, OptimizationConfig
from train.model_config import PRESETS, Model

SWITCHES = (
    "attention", "checkpointing", "compile", "fp8", "loss", "loss_chunks", "mask_books", "optimizer", "precision",
    "fsdp",
)  # fmt: skip
"""Settings that not every model supports."""


@dataclass(frozen=True)
class StepConfig:
    """The settings of an optimizer step, which determine its memory and its time.

    The data, the length and the checkpoints of a run do not. A setting's name is unique among all sections.
    """

    sections: ClassVar[dict[str, type[Any]]] = {
        "batch": BatchConfig, "optimization": OptimizationConfig, "execution": ExecutionConfig,
    }  # fmt: skip
    """Types of the sections by field; the field ``model`` is a setting itself."""

    model: Model = PRESETS["gpt2-124m"]
    """Preset, optionally with changes (tiny,layers=4): gpt2-124m, gpt2-355m, gpt2-774m, gpt2-1558m, small, edu-3m,
    tiny. Or a custom model as package.module:callable,width=512, an nn.Module whose forward takes (inputs, targets).
    Its vocabulary follows the data unless it is set."""
    batch: BatchConfig = field(default_factory=BatchConfig)
    optimization: OptimizationConfig = field(default_factory=OptimizationConfig)
    execution: ExecutionConfig = field(default_factory=ExecutionConfig)

    @classmethod
    def of(cls, **settings: Any) -> Self:
        """Return a config with these ``settings`` by name, and the defaults of all other settings."""
        return cls().replace(**settings)

    @classmethod
    @cache
    def section_of(cls) -> dict[str, str]:
        """Name of the field that has a setting, by the setting's name."""
        names = {setting.name: section for section, kind in cls.sections.items() for setting in fields(kind)}
        return {"model": "model"} | names

    def replace(self, **settings: Any) -> Self:
        """Return a copy of this config with these ``settings``, by name, changed."""
        section_of = self.section_of()
        changes: dict[str, dict[str, Any]] = {}
        for name, value in settings.items():
            if name not in section_of:
                raise TypeError(f"{name!r} is not a setting of a {type(self).__name__}")
            changes.setdefault(section_of[name], {})[name] = value
        sections = {
            section: replace(getattr(self, section), **values) if section in self.sections else values[section]
            for section, values in changes.items()
        }
        return replace(self, **sections)

    def setting(self, name: str) -> Any:
        """Return the value of the setting ``name``."""
        section = self.section_of()[name]
        return getattr(getattr(self, section), name) if section in self.sections else getattr(self, section)

    def flat(self) -> dict[str, Any]:
        """Return all settings by name."""
        return {name: self.setting(name) for name in self.section_of()}

    def to_json(self) -> dict[str, Any]:
        """Return the settings by name as JSON values; :func:`train.config.config_from_json` reads them back."""
        values: dict[str, Any] = {"model": to_json(self.model)}
        for section in self.sections:
            values |= to_json(getattr(self, section))
        return values

    def __post_init__(self) -> None:
        self._check_batch()
        for name in SWITCHES:
            value = self.setting(name)
            if reason := self.model.unsupported_reason(name, value):
                model = self.model.text
                raise UserError(f"{format_flag(name, value)} does not apply to --model {model}: {reason}.")
        check_combinations(self.flat(), self._conflicts())

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

    def _conflicts(self) -> Iterator[Conflict]:
        """Yield the combinations of settings of different sections that are not supported."""
        optimizer, workers, precision = self.optimization.optimizer, self.batch.workers, self.execution.precision
        bf16_weights = ("optimizer", optimizer == "adamw-bf16")
        other_precision = ("precision", precision != "bf16-activations")
        yield bf16_weights, other_precision, "bf16 weights need --precision bf16-activations"
        yield bf16_weights, ("workers", workers > 1), "each worker would round its own copy of the weights"
        fsdp = ("fsdp", self.execution.fsdp)
        yield fsdp, ("workers", workers == 1), "sharding needs several workers"
        unsharded = ("optimizer", optimizer not in ("adamw", "adamw-fused"))
        yield fsdp, unsharded, "only AdamW supports sharding"
        offload = ("offload_optimizer", self.execution.offload_optimizer)
        yield offload, ("workers", workers > 1), "offloading supports one worker; use --fsdp to shard the state"
        not_offloaded = ("optimizer", optimizer not in OFFLOADED_OPTIMIZERS)
        yield offload, not_offloaded, f"the CPU only updates with {', '.join(OFFLOADED_OPTIMIZERS)}"

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


@dataclass(frozen=True)
class Step(StepConfig):
    """The settings of an optimizer step, with every ``auto`` replaced by a value."""

    batch: Batch = field(default_factory=Batch)
    execution: Execution = field(default_factory=Execution)

    @classmethod
    def from_resolved(cls, config: StepConfig) -> Self:
        """Convert the step of a ``config`` without ``auto``."""
        batch, execution = Batch(**vars(config.batch)), Execution(**vars(config.execution))
        return cls(config.model, batch, config.optimization, execution)
