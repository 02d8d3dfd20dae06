"""When a run saves checkpoints."""

from dataclasses import dataclass

from infra.schema import strict
from train.config.checks import check_part


@strict
@dataclass(frozen=True)
class CheckpointConfig:
    """When a run saves checkpoints, and how many it keeps."""

    checkpoint_every: int = 200
    """Number of steps between two checkpoints (at least 1); a run that ends also writes one."""
    keep_checkpoints: int = 2
    """Number of newest checkpoints to keep (0: write none)."""

    def __post_init__(self) -> None:
        check_part(self, checkpoint_every=1, keep_checkpoints=0)
