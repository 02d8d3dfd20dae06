"""The data of a run as the loop sees it: windows for training and validation, and what is known about them.

There are two kinds: token shards, here, and a stream of books (:mod:`train.data.stream`), which reads through Ray and
is therefore created by the worker and passed to the loop.
"""

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import numpy as np

from infra.errors import UserError
from infra.storage.directory import StorageDir
from pipeline.cache import ensure_local
from pipeline.shards import Manifest, TokenShards
from train.config import Cycle, DatasetConfig
from train.data.tokenizer import load_tokenizer
from train.data.windows import VALIDATION_SEED, OrderedWindows, Windows
from train.model_config import AnyModel


class TrainingData(Protocol):
    """The data of a run."""

    @property
    def windows(self) -> OrderedWindows:
        """The windows for training."""
        ...

    @property
    def validation(self) -> Windows | None:
        """The windows for validation; None when the config does not validate."""
        ...

    @property
    def manifest(self) -> Manifest:
        """Fingerprint, tokenizer and totals; a stream's totals are estimates that sharpen as it is read."""
        ...

    @property
    def epoch_windows(self) -> int | None:
        """Windows in an epoch; None if that is unknown."""
        ...

    def state_dict(self, position: int) -> dict[str, Any] | None:
        """What a checkpoint keeps in addition to ``position``, the number of windows consumed."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any] | None) -> None:
        """Continue reading from a value of :meth:`state_dict`."""
        ...


class ShardData:
    """Token shards: any window can be read at once, so a position is enough to continue.

    ``on_download`` is called as :func:`ensure_local` calls it.
    """

    def __init__(
        self,
        dataset: DatasetConfig,
        model: AnyModel,
        cycle: Cycle,
        on_download: Callable[[Manifest, int], None] = lambda manifest, number: None,
    ) -> None:
        if dataset.stream:
            raise UserError("--stream is for 'python -m train.run' alone: here, give token shards with --data.")
        shards = TokenShards(ensure_local(StorageDir.of(dataset.data), on_download))
        length = model.context_length
        self.manifest = shards.manifest
        self.windows = Windows(shards.streams("train"), length, dataset.seed)
        self.epoch_windows = self.windows.count
        self.validation = None
        if cycle.val:
            self.validation = Windows(shards.streams("val"), length, VALIDATION_SEED, split="val")
        if load_tokenizer(dataset, self.manifest) is None:  # which would tell its ids
            _check_token_ids(
                dataset.source,
                model.vocab_size,
                [*self.windows.streams, *(self.validation.streams if self.validation else ())],
            )

    def state_dict(self, position: int) -> None:
        """Always None: the position is enough."""

    def load_state_dict(self, state_dict: dict[str, Any] | None) -> None:
        """Do nothing: every window can be read at any time."""


def _check_token_ids(source: str, vocab_size: int, streams: Iterable[np.ndarray]) -> None:
    """Raise ``UserError`` when a token of ``streams`` is none of the model's."""
    largest = max(int(stream.max(initial=0)) for stream in streams)
    if largest >= vocab_size:
        raise UserError(
            f"{source} has the token id {largest:,} and --model has vocab_size={vocab_size:,}: give --model "
            f"with vocab_size={largest + 1} or more."
        )
