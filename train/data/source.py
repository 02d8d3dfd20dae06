"""The interface of all sources of training data, before and after they are opened.

A :class:`DataSource` has the flag, the fingerprint and the size of the data in a config; the driver sends it to the
workers. Opened there, it becomes :class:`TrainingData`, whose windows the loop reads. Each kind of source is in a file
of its own and is registered in :mod:`train.data.sources`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, ClassVar, Protocol, Self

import numpy as np

from infra.tracking.run_ref import RunRef
from pipeline.encoding.tokenizer import Tokenizer
from pipeline.shards import Manifest
from train.config import BatchConfig, Cycle, DatasetConfig
from train.data.windows import OrderedWindows, Windows
from train.model_config import ModelSpec


class TrainingData(Protocol):
    """The opened data of a run, which the training loop reads."""

    @property
    def windows(self) -> OrderedWindows:
        """The windows for training."""
        ...

    @property
    def validation(self) -> Windows | None:
        """The windows for validation; None if the config has no validation."""
        ...

    @property
    def manifest(self) -> Manifest:
        """Fingerprint, tokenizer and totals; estimated totals become more precise as the data are read."""
        ...

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the data; None if the data set was created without one."""
        ...

    @property
    def epoch_windows(self) -> int | None:
        """Number of windows in an epoch; None if it is unknown."""
        ...

    @property
    def encoded_on(self) -> Mapping[str, int]:
        """Number of tokens encoded during the run, by machine."""
        ...

    @property
    def first_batch_activity(self) -> str:
        """What the loop does until its first batch, as a phrase."""
        ...

    def count_ids(self, vocab_size: int) -> np.ndarray:
        """Return how often each of ``vocab_size`` ids occurs in the training tokens, or in a sample of them."""
        ...

    def state_dict(self, position: int) -> dict[str, Any] | None:
        """Return the state for a checkpoint in addition to ``position``, the number of windows consumed."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any] | None) -> None:
        """Continue from the state that :meth:`state_dict` returned."""
        ...

    def summary(self) -> dict[str, Any] | None:
        """Return counts of the books that were read, for the run's folder; None if the manifest has them."""
        ...


class DataSource(ABC):
    """The data of a config, before they are opened. A source can be pickled, and computes each value once."""

    has_epoch: ClassVar[bool]
    """Whether the number of tokens is known, so that a run can be one epoch long."""
    reads_on_ray: ClassVar[bool]
    """Whether Ray's tasks read the data while the model trains, which takes cores."""

    def __init__(self, dataset: DatasetConfig) -> None:
        self.dataset = dataset

    @cached_property
    @abstractmethod
    def manifest(self) -> Manifest:
        """Fingerprint, tokenizer and totals of the data. Raises ``UserError`` if there are none."""

    @abstractmethod
    def absolute(self) -> Self:
        """Return this source with absolute local paths, because workers run in a folder of Ray."""

    @abstractmethod
    def load_tokenizer(self, manifest: Manifest) -> Tokenizer | None:
        """Load the tokenizer of the data with this ``manifest``; None if the data were created without one.

        Raises ``UserError`` if its file is missing.
        """

    @abstractmethod
    def check_lengths(self, context_length: int, cycle: Cycle, manifest: Manifest) -> None:
        """Raise ``UserError`` if a required split is known to be shorter than a window."""

    @abstractmethod
    def check_enough_tokens(self, global_batch: int, context_length: int, manifest: Manifest) -> None:
        """Raise ``UserError`` if a step is known to need more tokens than an epoch has."""

    @abstractmethod
    def producing_run(self) -> RunRef | None:
        """Return the MLflow run that created the data; None if it is unknown."""

    @abstractmethod
    def check_reachable(self, host: str) -> None:
        """Raise ``UserError`` if the data cannot be read on this machine, whose name is ``host``."""

    @abstractmethod
    def download(self) -> None:
        """Download the data that can be downloaded before the run."""

    @abstractmethod
    def open(
        self,
        model: ModelSpec,
        batch: BatchConfig,
        cycle: Cycle,
        on_download: Callable[[Manifest, int], None] = lambda manifest, number: None,
    ) -> TrainingData:
        """Open the windows for a run. ``on_download`` is called as :func:`pipeline.cache.ensure_local` calls it."""
