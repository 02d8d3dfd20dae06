"""A training run as its command plans it, the job of its workers, and their return value."""

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from infra.device.hardware import DeviceInfo
from infra.errors import UserError
from infra.storage.directory import StorageDir
from pipeline.shards import Manifest
from train.config import AUTO, ResolvedConfig, TrainConfig
from train.data.source import DataSource, TrainingData
from train.data.sources import source_of
from train.resolved import prepare, resolve
from train.result import RunResult
from train.run_files.lookup import find_run
from train.run_files.progress import Progress, check_not_finished, check_same_run, read_progress
from train.run_files.run_folder import RunFolder
from train.search_reference import SearchReference

DOWNLOAD_REPORT_SECONDS = 10.0
"""Interval between two lines about the data that a worker downloads."""


@dataclass(frozen=True)
class WorkerJob:
    """The work of a session. It contains no path of the driver, because the session may be on another machine."""

    config: ResolvedConfig
    memory_limit: int | None = None
    """Bytes that the worker's process may use."""
    fingerprint: str | None = None
    """Fingerprint of the data that the driver saw; None if it has not looked."""
    source: DataSource | None = None
    """The data as far as the driver has read them; None to read them here."""
    retries_smaller_batch: bool = False
    """Whether a micro-batch that does not fit is replaced by the next smaller one, because it was chosen
    automatically."""

    def open_data(self, print_line: Callable[[str], object]) -> TrainingData:
        """Open the data, which must be those that the driver saw; lines about a download are printed.

        Raises ``UserError`` if they are missing, or differ.
        """
        dataset = self.config.dataset
        source = self.source or source_of(dataset)
        host, last_report = socket.gethostname(), [0.0]
        if self.fingerprint is not None:
            source.check_reachable(host)

        def on_shard(manifest: Manifest, number: int) -> None:
            if number == 0 or time.monotonic() - last_report[0] > DOWNLOAD_REPORT_SECONDS:
                last_report[0] = time.monotonic()
                size = sum(shard.bytes for shard in manifest.shards)
                total = f"{len(manifest.shards)} shards, {size / 1e6:,.1f} MB in total"
                print_line(f"{host}: downloading {dataset.source}, {number} of {total}")

        data = source.open(self.config.model, self.config.batch, self.config.duration.cycle, on_shard)
        if self.fingerprint not in (None, data.manifest.fingerprint):
            raise UserError(
                f"{dataset.flag} {dataset.source} differs between machines: fingerprint "
                f"{data.manifest.fingerprint[:12]} on {host}, {self.fingerprint[:12]} on the driver. Use object "
                "storage, or copy the driver's data to all machines."
            )
        return data


@dataclass(frozen=True, kw_only=True)
class RunJob(WorkerJob):
    """The job of a run, which has a folder."""

    run_dir: StorageDir
    """The location of the run."""
    step: int = 0
    """The step from which the run resumes; 0 for a new run."""
    driver_marker: Path | None = None
    """A file that the driver has made in its workspace of the run; None for a worker in the driver's process."""


@dataclass(frozen=True)
class WorkerResult:
    """The return value of the first worker: a result, or the reason why there is none."""

    result: RunResult | None = None
    stream: dict[str, Any] | None = None
    """Summary of the books that a stream has read; None without a stream."""
    user_error: str = ""
    """Message of a ``UserError``; empty if there is none."""
    traceback: str = ""
    """Traceback of an unexpected exception; empty if there is none."""


@dataclass(frozen=True)
class RunPlan:
    """One planned run. Imports torch for a custom model only, whose errors are reported before anything starts."""

    requested: TrainConfig
    """The config as the user gave it, prepared for its data; the run's folder stores it."""
    manifest: Manifest
    run_folder: RunFolder
    """The run's folder, with an absolute path."""
    progress: Progress | None = None
    """Progress of the checkpoint to resume from, the newest in ``run_folder``."""
    memory_limit: int | None = None
    """Bytes that a worker's process may use, beyond which the run ends."""
    address: str | None = None
    """Address of a Ray cluster, if ``--address`` names one."""
    source: DataSource | None = None
    """The data as far as they have been read here, so that the workers need not list a stream's books again."""
    confirmed: SearchReference | None = None
    """The winner's measurements in the search that this config comes from."""

    @property
    def is_local(self) -> bool:
        """Whether it trains in the command's own process: one worker, on shards, without a cluster."""
        return (
            self.requested.batch.workers == 1
            and not source_of(self.requested.dataset).reads_on_ray
            and not (self.address or os.environ.get("RAY_ADDRESS"))
        )

    @classmethod
    def new(cls, config: TrainConfig, run_folder: RunFolder) -> "RunPlan":
        """Return a new run in ``run_folder``, which need not exist. Raises ``UserError`` for data that do not suit
        it."""
        source = source_of(config.dataset).absolute()
        manifest = source.manifest
        requested = prepare(config, manifest)
        source.check_lengths(requested.model.context_length, requested.duration.cycle, manifest)
        source.check_enough_tokens(requested.batch.global_batch, requested.model.context_length, manifest)
        return cls(requested, manifest, run_folder, source=source)

    @classmethod
    def continued(cls, config: TrainConfig, name: str, out: str) -> "RunPlan":
        """Return the run that ``--resume`` names, resumed as ``config``.

        Raises ``UserError`` if it does not exist, was another run, or has finished.
        """
        run_folder, checkpoint = find_run(name, out)
        new = cls.new(config, run_folder)
        progress, address = read_progress(checkpoint), run_folder.checkpoint_address(checkpoint)
        check_same_run(address, progress, new.requested.step, new.requested.dataset, new.manifest)
        if run_folder.is_finished(progress.step):
            check_not_finished(address, progress, new.requested.duration, new.requested.total_steps)
        return replace(new, progress=progress)

    def resolved(self, device_info: DeviceInfo) -> "ResolvedRun":
        """Return this run with everything decided for the device that will train; a resumed one keeps its decisions.

        Raises ``UserError`` as :func:`train.resolved.resolve` does.
        """
        saved_settings = self.progress.config if self.progress else None
        config = resolve(self.requested, device_info.with_memory_limit(self.memory_limit), saved_settings)
        return ResolvedRun(**vars(self), config=config)


@dataclass(frozen=True, kw_only=True)
class ResolvedRun(RunPlan):
    """A run whose settings are all decided, which its workers can train."""

    config: ResolvedConfig

    def fitted(self, result: RunResult) -> "ResolvedRun":
        """Return this run with the micro-batch of its ``result``, after larger ones did not fit."""
        return replace(self, config=self.config.with_smaller_micro_batch(result.failed_micro_batches) or self.config)

    def job(self) -> RunJob:
        """Return the job of the run's workers."""
        return RunJob(
            config=self.config,
            run_dir=self.run_folder.location,
            fingerprint=self.manifest.fingerprint,
            step=self.progress.step if self.progress else 0,
            memory_limit=self.memory_limit,
            source=self.source,
            retries_smaller_batch=self.config.requested.batch.micro_batch == AUTO,
        )
