"""Token shards as the data of a run."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cached_property
from typing import Any, Self

import numpy as np

from infra.errors import UserError
from infra.storage.directory import StorageDir
from infra.tracking.run_ref import RunRef
from pipeline.cache import ensure_local
from pipeline.encoding.tokenizer import Tokenizer, load_from
from pipeline.shards import MANIFEST_FILE, TOKENIZER_FILE, Manifest, TokenShards, find_producing_run, read_manifest
from train.config import BatchConfig, Cycle, DatasetConfig
from train.data.source import DataSource
from train.data.windows import VALIDATION_SEED, Windows, check_window_fits, count_ids
from train.model_config import ModelSpec


class ShardSource(DataSource):
    """The token shards in a folder or in object storage."""

    has_epoch = True
    reads_on_ray = False

    @property
    def directory(self) -> StorageDir:
        """The folder of the shards."""
        return StorageDir.of(self.dataset.data)

    @cached_property
    def manifest(self) -> Manifest:
        return read_manifest(self.dataset.data)

    def absolute(self) -> Self:
        return type(self)(replace(self.dataset, data=self.directory.address))

    def load_tokenizer(self, manifest: Manifest) -> Tokenizer | None:
        return _load_tokenizer(self.dataset, manifest)

    def check_lengths(self, context_length: int, cycle: Cycle, manifest: Manifest) -> None:
        for split in ("train", "val") if cycle.validates else ("train",):
            lengths = (shard.tokens for shard in manifest.shards if shard.split == split)
            check_window_fits(split, lengths, context_length)

    def check_enough_tokens(self, global_batch: int, context_length: int, manifest: Manifest) -> None:
        available = manifest.splits["train"]["tokens"]
        available_windows = available // context_length
        if 0 < available_windows < global_batch:
            raise UserError(
                f"--global-batch {global_batch:,} needs {global_batch * context_length:,} tokens per step, but "
                f"{self.dataset.data} has only {available:,} training tokens. Use at most {available_windows:,}."
            )

    def producing_run(self) -> RunRef | None:
        return find_producing_run(self.dataset.data)

    def check_reachable(self, host: str) -> None:
        if not self.directory.exists(MANIFEST_FILE):
            raise UserError(
                f"--data {self.directory} is not on {host}, where Ray placed the worker. Use object storage, such as "
                "--data s3://bucket/tokens, or a disk that all machines share."
            )

    def download(self) -> None:
        ensure_local(self.directory)

    def open(
        self,
        model: ModelSpec,
        batch: BatchConfig,
        cycle: Cycle,
        on_download: Callable[[Manifest, int], None] = lambda manifest, number: None,
    ) -> "ShardData":
        return ShardData(self.dataset, model, cycle, on_download)


class ShardData:
    """Opened token shards, in which any window can be read directly, so that a position is the whole state.

    ``on_download`` is called as :func:`ensure_local` calls it.
    """

    first_batch_activity = "loading the first batch"

    def __init__(
        self,
        dataset: DatasetConfig,
        model: ModelSpec,
        cycle: Cycle,
        on_download: Callable[[Manifest, int], None] = lambda manifest, number: None,
    ) -> None:
        shards = TokenShards(ensure_local(StorageDir.of(dataset.data), on_download))
        length = model.context_length
        self.manifest = shards.manifest
        self.windows = Windows(shards.streams("train"), length, dataset.seed)
        self.epoch_windows = self.windows.count
        self.tokenizer = _load_tokenizer(dataset, self.manifest)
        self.encoded_on: dict[str, int] = {}
        self.validation = None
        if cycle.validates:
            self.validation = Windows(shards.streams("val"), length, VALIDATION_SEED, split="val")
        if self.tokenizer is None:  # A tokenizer has been compared with the model's vocabulary already.
            _check_token_ids(
                dataset.source,
                model.vocab_size,
                [*self.windows.streams, *(self.validation.streams if self.validation else ())],
            )

    def count_ids(self, vocab_size: int) -> np.ndarray:
        """Return how often each of ``vocab_size`` ids occurs in the training tokens, or in blocks of every part."""
        return count_ids(self.windows.streams, vocab_size)

    def state_dict(self, position: int) -> None:
        """Return None, because the position is the whole state."""

    def load_state_dict(self, state_dict: dict[str, Any] | None) -> None:
        """Do nothing, because the position is the whole state."""

    def summary(self) -> None:
        """Return None, because the manifest describes all shards."""


def _check_token_ids(source: str, vocab_size: int, streams: Iterable[np.ndarray]) -> None:
    """Raise ``UserError`` if a token id in ``streams`` is not below ``vocab_size``."""
    largest = max(int(stream.max(initial=0)) for stream in streams)
    if largest >= vocab_size:
        raise UserError(
            f"{source} contains token id {largest:,}, but --model has vocab_size={vocab_size:,}. Use "
            f"vocab_size={largest + 1} or more."
        )


def _load_tokenizer(dataset: DatasetConfig, manifest: Manifest) -> Tokenizer | None:
    tokenizer = load_from(StorageDir.of(dataset.data), manifest.tokenizer_sha256)
    if tokenizer is None and "tokenizer" in manifest.config:
        raise UserError(
            f"{dataset.source} has no {TOKENIZER_FILE}, which its token ids need. Restore the file, or re-create the "
            "data with 'python -m pipeline.tokenize --overwrite'."
        )
    return tokenizer
