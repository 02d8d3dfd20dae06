"""The settings of a run as it is executed."""

from dataclasses import dataclass, field, fields
from typing import Self

from train.config.batch import Batch
from train.config.execution import Execution
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
        parts |= {"batch": Batch(**vars(config.batch)), "execution": Execution(**vars(config.execution))}
        return cls(**parts, requested=requested or config)
