"""All settings of a run as it is executed."""

from dataclasses import dataclass, field, fields
from typing import Self

from train.config.batch import Batch
from train.config.execution import Execution
from train.config.train_config import TrainConfig


@dataclass(frozen=True)
class ResolvedConfig(TrainConfig):
    """All settings of a run with nothing left to be chosen: what :func:`train.resolved.resolve` returns."""

    batch: Batch = field(default_factory=Batch)
    execution: Execution = field(default_factory=Execution)
    requested: TrainConfig = field(default_factory=TrainConfig, compare=False)
    """The settings that it was resolved from, which tell what was chosen automatically."""

    @classmethod
    def of_decided(cls, config: TrainConfig, requested: TrainConfig | None = None) -> Self:
        """``config``, which leaves nothing open, as it was resolved from ``requested``; by default from itself."""
        parts = {part.name: getattr(config, part.name) for part in fields(TrainConfig)}
        parts |= {"batch": Batch(**vars(config.batch)), "execution": Execution(**vars(config.execution))}
        return cls(**parts, requested=requested or config)
