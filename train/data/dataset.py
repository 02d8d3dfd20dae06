"""What a run trains on, as the loop sees it: windows for training and validation, and what is known of them.

Two things are: token shards, here, and a stream of books (:mod:`train.data.stream`), which reads through Ray and
is therefore made by the worker and handed to the loop.
"""

from typing import Any, Protocol

from infra.errors import UserError
from pipeline.shards import Manifest, TokenShards
from train.config import TrainConfig
from train.data.windows import OrderedWindows, Windows


class Data(Protocol):
    """The data of a run."""

    @property
    def windows(self) -> OrderedWindows:
        """For training."""
        ...

    @property
    def validation(self) -> Windows | None:
        """For validation; None when the config asks for none."""
        ...

    @property
    def manifest(self) -> Manifest:
        """Fingerprint, vocabulary and totals; a stream's totals are estimates that sharpen as it is read."""
        ...

    @property
    def epoch_windows(self) -> int | None:
        """Windows in an epoch; None while nobody knows."""
        ...

    def place(self, position: int) -> dict[str, Any] | None:
        """What a checkpoint keeps beside ``position``, the number of windows consumed."""
        ...

    def go_to(self, place: dict[str, Any] | None) -> None:
        """Let reading begin where :meth:`place` was."""
        ...


class ShardData:
    """Token shards: any window can be read at once, so the position says it all."""

    def __init__(self, config: TrainConfig) -> None:
        if config.stream:
            raise UserError("--stream is for 'python -m train.run' alone: here, give token shards with --data.")
        shards = TokenShards(config.data)
        length = config.model.context_length
        self.manifest = shards.manifest
        self.windows = Windows(shards.streams("train"), length, config.seed)
        self.epoch_windows = self.windows.count
        self.validation = None
        if config.cycle.val:
            self.validation = Windows(shards.streams("val"), length, config.seed, split="val")

    def place(self, position: int) -> None:
        """Nothing: the position is enough."""

    def go_to(self, place: dict[str, Any] | None) -> None:
        """Nothing: every place is at hand."""
