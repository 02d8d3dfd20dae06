"""Settings of the data of a run, and of reading them."""

from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Self

import tyro

from infra.errors import UserError
from infra.schema import strict
from infra.storage.directory import StorageDir
from pipeline.config import ReadingConfig
from train.config.checks import check_combinations, check_part, format_flag

MAX_LOADER_THREADS = 1024
"""Upper limit of ``--loader-threads``; each thread has a buffer in pinned memory."""


@strict
@dataclass(frozen=True)
class DatasetConfig:
    """Settings of the tokens or books that a run trains on, and of reading them."""

    data: Annotated[str, tyro.conf.arg(metavar="DIR")] = "data/tokens"
    """Token shards, created by python -m pipeline.tokenize: a folder, or s3://bucket/folder (gs://, az://)."""
    stream: Annotated[tuple[str, ...], tyro.conf.arg(metavar="[SOURCE ...]")] = ()
    """Books to train on directly instead of --data, given as sources of pipeline.tokenize.
    Ray Data encodes them while the model trains."""
    reading: ReadingConfig = field(default_factory=ReadingConfig)
    """Settings for reading and cleaning the books of --stream."""
    seed: int = 0
    """Seed of the weights, the order of the windows, and dropout (at least 0)."""
    loader_threads: int = 0
    """Number of threads that read batches ahead (0: the loop itself reads the next batch while the device computes)."""

    def __post_init__(self) -> None:
        check_part(self, seed=0, loader_threads=0)
        if self.loader_threads > MAX_LOADER_THREADS:
            flag = format_flag("loader_threads", self.loader_threads)
            raise UserError(f"{flag} must be at most {MAX_LOADER_THREADS:,}.")
        several_threads = ("loader_threads", self.loader_threads > 1)
        reason = "a stream is read by one thread, in the order of its books"
        check_combinations(vars(self), [(several_threads, ("stream", bool(self.stream)), reason)])
        self._check_reading()

    def _check_reading(self) -> None:
        if self.stream:
            return
        for setting in fields(ReadingConfig):
            if getattr(self.reading, setting.name) != setting.default:
                raise UserError(
                    f"--{setting.name.replace('_', '-')} only applies to books read with --stream. For --data, pass it "
                    "to 'python -m pipeline.tokenize'."
                )

    @property
    def flag(self) -> str:
        """The flag that selects the data: ``--stream`` or ``--data``."""
        return "--stream" if self.stream else "--data"

    @property
    def source(self) -> str:
        """The data as the user wrote them: the value of ``--stream`` or ``--data``."""
        return ", ".join(self.stream) or self.data

    def without_paths(self) -> Self:
        """Return these settings with names instead of paths."""
        tokenizer = self.reading.tokenizer and StorageDir.of(self.reading.tokenizer).name
        stream = tuple(StorageDir.of(source).name for source in self.stream)
        reading = replace(self.reading, tokenizer=tokenizer)
        return replace(self, data=StorageDir.of(self.data).name, stream=stream, reading=reading)
