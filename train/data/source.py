"""The data of a run: the interface of all sources of data, before and after they are opened.

A source is what a config names: it knows the flag, the fingerprint and the size of the data, and the driver hands it to
the workers. Opened, it is the windows that the loop reads. A kind of source has a file of its own, and is registered in
:mod:`train.data.sources`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, ClassVar, Protocol, Self

from infra.tracking.run_ref import RunRef
from pipeline.encoding.tokenizer import Tokenizer
from pipeline.shards import Manifest
from train.config import BatchConfig, Cycle, DatasetConfig
from train.data.windows import OrderedWindows, Windows
from train.model_config import ModelSpec


class TrainingData(Protocol):
    """The data of a run as the loop sees it."""

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
        """Fingerprint, tokenizer and totals; estimated totals become more precise as the data are read."""
        ...

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the data; None if their ids have none."""
        ...

    @property
    def epoch_windows(self) -> int | None:
        """Windows in an epoch; None if that is unknown."""
        ...

    @property
    def encoded_on(self) -> Mapping[str, int]:
        """Tokens by the machine that encoded them during the run."""
        ...

    def state_dict(self, position: int) -> dict[str, Any] | None:
        """What a checkpoint keeps in addition to ``position``, the number of windows consumed."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any] | None) -> None:
        """Continue reading from a value of :meth:`state_dict`."""
        ...

    def summary(self) -> dict[str, Any] | None:
        """What was read, for the run's folder; None if the manifest says it all."""
        ...


class DataSource(ABC):
    """The data that a config names, before they are opened. It can be pickled, and each value is computed once."""

    has_epoch: ClassVar[bool]
    """Whether the number of tokens is known, so that a run may be one epoch long."""
    reads_on_ray: ClassVar[bool]
    """Whether Ray's tasks read the data while the model trains, which takes cores."""

    def __init__(self, dataset: DatasetConfig) -> None:
        self.dataset = dataset

    @cached_property
    @abstractmethod
    def manifest(self) -> Manifest:
        """Fingerprint, tokenizer and totals. Raises ``UserError`` if there are no data."""

    @abstractmethod
    def absolute(self) -> Self:
        """This source with absolute local paths, because workers run in a folder of Ray's."""

    @abstractmethod
    def load_tokenizer(self, manifest: Manifest) -> Tokenizer | None:
        """The tokenizer of data with ``manifest``; None if their ids have none. Raises ``UserError`` if it is lost."""

    @abstractmethod
    def check_lengths(self, context_length: int, cycle: Cycle, manifest: Manifest) -> None:
        """Raise ``UserError`` if a split that a run needs is known to be shorter than a window."""

    @abstractmethod
    def check_enough_tokens(self, global_batch: int, context_length: int, manifest: Manifest) -> None:
        """Raise ``UserError`` if a step is known to need more tokens than an epoch has."""

    @abstractmethod
    def producing_run(self) -> RunRef | None:
        """The MLflow run that created the data; None if it is unknown."""

    @abstractmethod
    def check_reachable(self, host: str) -> None:
        """Raise ``UserError`` if the data cannot be read on this machine, which is named ``host``."""

    @abstractmethod
    def download(self) -> None:
        """Download what can be downloaded before the run."""

    @abstractmethod
    def open(
        self,
        model: ModelSpec,
        batch: BatchConfig,
        cycle: Cycle,
        on_download: Callable[[Manifest, int], None] = lambda manifest, number: None,
    ) -> TrainingData:
        """The windows for a run. ``on_download`` is called as :func:`pipeline.cache.ensure_local` calls it."""
