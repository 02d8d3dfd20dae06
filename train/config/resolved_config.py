"""The settings of a run as it is executed."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Self

from train.config.batch import AUTO, Batch
from train.config.execution import Execution
from train.config.step import Step
from train.config.train_config import TrainConfig


@dataclass(frozen=True)
class ResolvedConfig(TrainConfig):
    """All settings of a run, with every ``auto`` replaced by a value; :func:`train.resolved.resolve` returns it."""

    batch: Batch = field(default_factory=Batch)
    execution: Execution = field(default_factory=Execution)
    requested: TrainConfig = field(default_factory=TrainConfig, compare=False)
    """The settings as the user requested them, which show what was chosen automatically."""

    @classmethod
    def from_resolved(cls, config: TrainConfig, requested: TrainConfig | None = None) -> Self:
        """Convert a ``config`` without ``auto``, which ``requested`` was resolved to (by default ``config`` itself)."""
        parts = {part.name: getattr(config, part.name) for part in fields(TrainConfig)}
        return cls(**parts | vars(Step.from_resolved(config)), requested=requested or config)

    @property
    def step(self) -> Step:
        """The settings of an optimizer step alone."""
        return Step(self.model, self.batch, self.optimization, self.execution)

    def with_smaller_micro_batch(self, failed_micro_batches: Sequence[int]) -> Self | None:
        """Return this config with the next micro-batch below all ``failed_micro_batches``, for the same global batch.

        Returns this config if none failed, and None if there is no smaller one.
        """
        below = min(failed_micro_batches, default=self.batch.micro_batch + 1)
        sizes = [size for size in self.micro_batches if size < below]
        return self.replace(micro_batch=sizes[-1]) if sizes else None

    def format_setting(self, name: str) -> str:
        """Format the value of the setting ``name``, and whether it was chosen automatically: ``whole (auto)``."""
        value = self.setting(name)
        return f"{value} (auto)" if self.requested.setting(name) == AUTO and value != AUTO else f"{value}"

    def describe_execution(self) -> str:
        """Describe the execution in one line."""
        names = ("device", "precision", "attention", "compile", "loss", "checkpointing", "optimizer")
        return ", ".join(f"{name} {self.format_setting(name)}" for name in names)
