"""One training run as its command hands it on, and what of it crosses to its workers and comes back."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from infra.storage.directory import StorageDir
from pipeline.shards import Manifest, read_manifest
from pipeline.stream import Stream
from train.config import TrainConfig
from train.data.source import absolute, estimate, refuse_short_splits, refuse_vast_steps, stream_of
from train.data.tokenizer import with_vocabulary_of
from train.resolved import looked_at
from train.result import RunResult
from train.run_files.lookup import find_run
from train.run_files.progress import Progress, read_progress, refuse_finished, refuse_other_run
from train.run_files.run_folder import RunFolder
from train.search_reference import Confirmed


@dataclass(frozen=True)
class Assignment:
    """All that a worker is told. It may be on another machine, so that no path of the driver's need exist there."""

    config: TrainConfig
    """The resolved run, with whole paths."""
    place: StorageDir
    """Where the run's folder is."""
    fingerprint: str
    """That of the data that the driver saw."""
    step: int = 0
    """The step that the run continues from; 0 is its beginning."""
    memory_limit: int | None = None
    """Bytes that the worker's process may use."""
    stream: Stream | None = None
    tries_smaller: bool = False
    """Whether a micro-batch that does not fit is replaced by the next smaller one, because none was asked for."""
    marker: Path | None = None
    """A file that the driver has made in the run's folder; None for a run in object storage."""


@dataclass(frozen=True)
class Returned:
    """What the first worker returns at the end: a result, or why there is none."""

    result: RunResult | None = None
    stream: dict[str, Any] | None = None
    """What a run straight from books has read."""
    refused: str = ""
    """The user's mistake."""
    failed: str = ""
    """The traceback of a bug of ours."""


@dataclass(frozen=True)
class RunPlan:
    """One training run. Imports torch for a custom model only, so that what is wrong with it is said at once."""

    asked: TrainConfig
    """As the user gave it, with whole paths; the run's folder keeps it."""
    manifest: Manifest
    home: RunFolder
    """With a whole path."""
    progress: Progress | None = None
    """That of the checkpoint to continue from, the newest in ``home``."""
    memory_limit: int | None = None
    """Bytes that a worker's process may use; more ends the run."""
    address: str | None = None
    stream: Stream | None = None
    """Of a run straight from books: its inventory is taken once, here, and the workers get it."""
    confirmed: Confirmed | None = None
    """What the search found whose winner this is."""

    @property
    def is_local(self) -> bool:
        """Whether it trains in the command's own process: one worker on shards, and no cluster is named."""
        return self.asked.workers == 1 and not self.stream and not (self.address or os.environ.get("RAY_ADDRESS"))

    @classmethod
    def new(cls, config: TrainConfig, home: RunFolder) -> "RunPlan":
        """A run that begins in ``home``, which need not exist. Raises ``UserError`` for data that do not fit it."""
        asked = absolute(config)
        stream = stream_of(asked) if asked.stream else None
        manifest = estimate(stream) if stream else read_manifest(asked.data)
        asked = looked_at(with_vocabulary_of(asked, manifest))
        refuse_short_splits(asked, manifest)
        refuse_vast_steps(asked, manifest)
        return cls(asked, manifest, home, stream=stream)

    @classmethod
    def continued(cls, config: TrainConfig, name: str, out: str) -> "RunPlan":
        """The run that ``--resume`` names, to be trained on as ``config``.

        Raises ``UserError`` when there is none, it is another run, or it has come to its end.
        """
        home = find_run(name, out)
        new = cls.new(config, home)
        checkpoint = home.newest()
        progress, named = read_progress(checkpoint), home.named(checkpoint)
        refuse_other_run(named, progress, new.asked, new.manifest)
        if home.is_finished(progress.step):
            refuse_finished(named, progress, new.asked)
        return replace(new, progress=progress)
