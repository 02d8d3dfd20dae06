"""One training run as its command hands it on, and what of it crosses to its workers and comes back."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from infra.storage.directory import StorageDir
from pipeline.shards import Manifest
from train.config import ResolvedConfig, TrainConfig
from train.data.source import DataSource
from train.data.sources import source_of
from train.resolved import prepare
from train.result import RunResult
from train.run_files.lookup import find_run
from train.run_files.progress import Progress, check_not_finished, check_same_run, read_progress
from train.run_files.run_folder import RunFolder
from train.search_reference import SearchReference


@dataclass(frozen=True)
class WorkerJob:
    """All that a worker is told. It may be on another machine, so that no path of the driver's need exist there."""

    config: ResolvedConfig
    """The resolved run, with whole paths."""
    run_dir: StorageDir
    """Where the run's folder is."""
    fingerprint: str
    """That of the data that the driver saw."""
    step: int = 0
    """The step that the run continues from; 0 is its beginning."""
    memory_limit: int | None = None
    """Bytes that the worker's process may use."""
    source: DataSource | None = None
    """The data as the driver has read them; None to read them here."""
    retries_smaller_batch: bool = False
    """Whether a micro-batch that does not fit is replaced by the next smaller one, because none was asked for."""
    driver_marker: Path | None = None
    """A file that the driver has made in its workspace of the run; None for a worker in the driver's process."""


@dataclass(frozen=True)
class WorkerResult:
    """What the first worker returns at the end: a result, or why there is none."""

    result: RunResult | None = None
    stream: dict[str, Any] | None = None
    """What a run straight from books has read."""
    user_error: str = ""
    """The user's mistake."""
    traceback: str = ""
    """The traceback of a bug of ours."""


@dataclass(frozen=True)
class RunPlan:
    """One training run. Imports torch for a custom model only, so that what is wrong with it is said at once."""

    requested: TrainConfig
    """As the user gave it, prepared for its data; the run's folder keeps it."""
    manifest: Manifest
    run_folder: RunFolder
    """With a whole path."""
    progress: Progress | None = None
    """That of the checkpoint to continue from, the newest in ``run_folder``."""
    memory_limit: int | None = None
    """Bytes that a worker's process may use; more ends the run."""
    address: str | None = None
    source: DataSource | None = None
    """The data as far as they have been read here, so that the workers need not list a stream's books again."""
    confirmed: SearchReference | None = None
    """What the search found whose winner this is."""

    @property
    def is_local(self) -> bool:
        """Whether it trains in the command's own process: one worker on shards, and no cluster is named."""
        return (
            self.requested.batch.workers == 1
            and not source_of(self.requested.dataset).reads_on_ray
            and not (self.address or os.environ.get("RAY_ADDRESS"))
        )

    @classmethod
    def new(cls, config: TrainConfig, run_folder: RunFolder) -> "RunPlan":
        """A run that begins in ``run_folder``, which need not exist. Raises ``UserError`` for data that do not fit
        it."""
        source = source_of(config.dataset).absolute()
        manifest = source.manifest
        requested = prepare(config, manifest)
        source.check_lengths(requested.model.context_length, requested.duration.cycle, manifest)
        source.check_enough_tokens(requested.batch.global_batch, requested.model.context_length, manifest)
        return cls(requested, manifest, run_folder, source=source)

    @classmethod
    def continued(cls, config: TrainConfig, name: str, out: str) -> "RunPlan":
        """The run that ``--resume`` names, to be trained on as ``config``.

        Raises ``UserError`` when there is none, it is another run, or it has come to its end.
        """
        run_folder, checkpoint = find_run(name, out)
        new = cls.new(config, run_folder)
        progress, named = read_progress(checkpoint), run_folder.checkpoint_address(checkpoint)
        check_same_run(named, progress, new.requested, new.manifest)
        if run_folder.is_finished(progress.step):
            check_not_finished(named, progress, new.requested.duration, new.requested.total_steps)
        return replace(new, progress=progress)
