"""Entry: ``python -m train.run`` trains one configuration and records the measurements."""

import dataclasses
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import tyro

from infra.cli import command, flags
from infra.cli.console import console
from infra.cli.interrupts import EXIT_INTERRUPTED
from infra.cli.options import Address, ConfigFile, TrackingUri
from infra.cli.progress import IMPORTING_ACTIVITY, status
from infra.cli.units import BytesOrNone
from infra.device.hardware import DeviceInfo
from infra.errors import UserError
from infra.ray.cluster import ray_session
from infra.ray.machines import check_shared
from infra.tracking.run_ref import RunRef
from train.callbacks import Callback
from train.config import TrainConfig, load_config
from train.launch.job import RunPlan
from train.model_config import ModelSpec, short_name
from train.resolved import local_device_info
from train.run_files.lookup import format_resume_command, load_run_config
from train.run_files.run_folder import RunFolder, new_run
from train.search_reference import read_search_reference

if TYPE_CHECKING:
    from infra.tracking.tracker import Logged


@dataclass(frozen=True)
class RunOptions:
    """Train a GPT-2 on token shards or directly on books, measure it, and record the results in MLflow."""

    main_flags: ClassVar[tuple[str, ...]] = (
        "data", "model", "time_budget", "steps", "global_batch", "micro_batch", "memory_limit", "learning_rate", "name",
        "resume", "config", "device",
    )  # fmt: skip
    flag_groups: ClassVar[dict[str, tuple[str, ...]]] = {
        **TrainConfig.flag_groups, "output and cluster": ("out", "tracking_uri", "address"),
    }  # fmt: skip

    training: TrainConfig = field(default_factory=TrainConfig)
    name: str | None = None
    """Name of the run and of its folder. By default the model with the time."""
    out: Annotated[str, tyro.conf.arg(metavar="DIR")] = "runs"
    """Folder that contains runs: local, or s3://bucket/runs (gs://, az://).
    Checkpoints are uploaded there while training continues, and any machine can resume a run from there."""
    config: ConfigFile = None
    resume: Annotated[str | None, tyro.conf.arg(metavar="NAME|DIR")] = None
    """Run to resume: its name, or the path or address of its folder or newest checkpoint."""
    tracking_uri: TrackingUri = None
    memory_limit: BytesOrNone = None
    """Maximum memory of a worker's process, such as 40GB or 40GiB: GPU memory, or the resident set on a CPU.
    A run that needs more ends with the outcome over_limit, unless its micro-batch is auto and a smaller one fits.
    Set it again for a resumed run. By default there is no limit."""
    address: Address = None

    def __post_init__(self) -> None:
        if self.resume and self.config:
            raise UserError("--config and --resume both provide settings. Use only one of them.")
        if self.resume and self.name:
            raise UserError(f"--name {self.name}: a resumed run keeps its name. Remove --name or --resume.")


def main() -> None:
    command.run(run, RunOptions, module="train.run", default=defaults)


def defaults() -> RunOptions:
    """Return the options that flags override: the defaults, with the settings of ``--resume`` or ``--config``."""
    options = RunOptions(**vars(flags.parse_only(RunOptions, "name", "out", "config", "resume")))
    if options.resume:
        return dataclasses.replace(options, training=load_run_config(options.resume, options.out))
    return dataclasses.replace(options, training=load_config(options.config)) if options.config else options


def run(options: RunOptions, callbacks: Sequence[Callback] = ()) -> int:
    """Train by ``options``, call the ``callbacks`` of a Python program meanwhile, and return the exit code.

    Invalid options are rejected first. Then torch and MLflow are imported, while Ray starts if the run needs it.
    """
    run = plan_run(options)
    if callbacks and not run.is_local:
        raise UserError(
            "Callbacks run in this process, but this run trains in processes of Ray (several workers, a book stream or "
            "a cluster). Remove callbacks, or train with one worker on shards."
        )
    with ThreadPoolExecutor(max_workers=2) as background, ExitStack() as locks:
        if run.progress:
            locks.enter_context(run.run_folder.command_lock())
        store = options.tracking_uri or ((run_ref := run.run_folder.run_ref()) and run_ref.store)
        preparing: list[Future[Any]] = [background.submit(import_and_open_store, store)]
        if run.is_local:  # The first examination takes seconds, and its result is kept.
            preparing.append(background.submit(local_device_info, run.requested.execution))
        with nullcontext() if run.is_local else ray_session(run.address, code=run.requested.model.source_paths):
            with status(IMPORTING_ACTIVITY):
                for preparation in preparing:
                    preparation.result()
            if not run.is_local:
                check_shared("--out", run.run_folder.location.parent)
            if not run.progress:
                locks.enter_context(run.run_folder.create())
            return train_and_report(run, options.tracking_uri, options.config, callbacks)


def plan_run(options: RunOptions) -> RunPlan:
    """Check ``options``, and collect the settings, data and folder of the run."""
    config = options.training
    if options.resume:
        run = RunPlan.continued(config, options.resume, options.out)
    else:
        run = RunPlan.new(config, new_run(options.out, options.name or default_name(config.model)))
    confirmed = read_search_reference(options.config, config.flat()) if options.config else None
    return dataclasses.replace(run, memory_limit=options.memory_limit, address=options.address, confirmed=confirmed)


def default_name(model: ModelSpec) -> str:
    """Format the default name of a run of ``model``, with the time."""
    return f"{short_name(model)}-{time.strftime('%Y%m%d-%H%M%S')}"


def import_and_open_store(tracking_uri: str | None) -> None:
    """Import torch and MLflow, and open the store, which takes as long as starting Ray and happens in parallel."""
    import torch  # noqa: F401

    from infra.tracking.store import open_store

    open_store(tracking_uri)


def train_and_report(
    run: RunPlan, tracking_uri: str | None, file: str | None, callbacks: Sequence[Callback] = ()
) -> int:
    """Train, record and report the run, and return the exit code; ``file`` is the value of ``--config``."""
    from infra.tracking.tracker import Tracker
    from infra.tracking.views import ui_link
    from train.launch.driver import train_and_record
    from train.reporting import report, tracking
    from train.reporting.duration import duration_lines

    run_folder, device_info = run.run_folder, _device_info(run)
    resolved = run.resolved(device_info)
    run_ref, logged = open_mlflow_run(run_folder, tracking_uri, starts=run.progress is None)
    report.print_header(resolved.config, run.manifest, run_folder.location, device_info)
    for line in duration_lines(resolved.config, run.manifest):
        console.print(line, markup=False)
    with Tracker(run_ref, logged) as tracker:
        tracking.complete_orphaned_runs(run_ref)
        if file:
            tracking.link_search(tracker, run_folder.path.name, file)
        try:
            result, final_report = train_and_record(resolved, tracker, callbacks=callbacks)
        except KeyboardInterrupt:
            if not run_folder.has_checkpoint():
                raise
            tracker.status = "KILLED"
            console.print(f"resume with: {format_resume_command(run_folder.location)}", markup=False)
            return EXIT_INTERRUPTED
    report.print_result(final_report, result, ui_link(run_ref))
    if result.outcome == "interrupted":
        return EXIT_INTERRUPTED
    return 0 if result.outcome == "finished" else 1


def _device_info(run: RunPlan) -> DeviceInfo:
    if run.is_local:
        return local_device_info(run.requested.execution)
    from train.launch.cluster import worker_device_info

    return worker_device_info(run.requested.execution, run.requested.batch.workers)


def open_mlflow_run(run_folder: RunFolder, tracking_uri: str | None, *, starts: bool) -> "tuple[RunRef, Logged | None]":
    """Open the MLflow run to log to. A resumed run continues its MLflow run.

    If that MLflow run is unknown on this machine, or is not in the store of ``--tracking-uri``, a new one records the
    whole run.

    Returns: (MLflow run, its logged entries; None for a new MLflow run).
    """
    from infra.device import provenance
    from infra.tracking.store import create_run, read_logged, reopen_run, run_exists, store_uri

    run_ref = None if starts else run_folder.run_ref(tracking_uri and store_uri(tracking_uri))
    if run_ref and (tracking_uri is None or run_exists(run_ref)):
        reopen_run(run_ref)
        return run_ref, read_logged(run_ref)
    tags = provenance.collect_tags() | {"kind": "run"}
    run_dir, name = run_folder.location.address, run_folder.path.name
    return create_run(
        "train", name, tracking_uri=tracking_uri, run_dir=run_dir, tags=tags, keep=run_folder.save_run_ref
    ), None


if __name__ == "__main__":
    main()
