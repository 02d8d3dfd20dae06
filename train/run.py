"""Entry: ``python -m train.run`` trains one configuration and records the measurements."""

import dataclasses
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import tyro

from infra.cli import command, flags
from infra.cli.command import INTERRUPTED
from infra.cli.console import console
from infra.cli.options import Address, ConfigFile, TrackingUri
from infra.cli.progress import IMPORTING, doing
from infra.cli.units import BytesOrNone, format_size
from infra.device.hardware import DeviceFacts
from infra.errors import UserError
from infra.ray.cluster import connected
from infra.ray.machines import refuse_unshared
from infra.storage.files import write_json
from infra.tracking.run_ref import RunKey
from train.config import TrainConfig, load_config
from train.launch.job import RunPlan
from train.model_config import short_name
from train.resolved import continued, facts_here, resolve, without
from train.run_files.lookup import resume_run, saved_config
from train.run_files.run_folder import RunFolder, make, new_run
from train.search_reference import confirmed_by


@dataclass(frozen=True)
class RunOptions:
    """Train a GPT-2 on token shards or directly on books, measure it, and record the results in MLflow."""

    main_flags: ClassVar[tuple[str, ...]] = (
        "data", "stream", "model", "steps", "global_batch", "learning_rate", "memory_limit", "device", "name", "out",
        "config", "resume",
    )  # fmt: skip
    flag_groups: ClassVar[dict[str, tuple[str, ...]]] = {"output and cluster": ("tracking_uri", "address")}

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
            raise UserError("--config and --resume both provide settings; give one of them.")
        if self.resume and self.name:
            raise UserError(f"--name {self.name}: a resumed run keeps its name; leave --name or --resume out.")


def main() -> None:
    command.run(run, RunOptions, module="train.run", default=defaults)


def defaults() -> RunOptions:
    """The options whose values flags override: those of the run to resume, or of a file."""
    given = RunOptions(**vars(flags.given(RunOptions, "name", "out", "config", "resume")))
    if given.resume:
        return dataclasses.replace(given, training=saved_config(given.resume, given.out))
    return dataclasses.replace(given, training=load_config(given.config)) if given.config else given


def run(options: RunOptions) -> int:
    """Run one training from its options; returns the exit code.

    Invalid options are refused first. torch and MLflow are then imported, while Ray starts where the run needs it.
    """
    run = planned(options)
    with ThreadPoolExecutor(max_workers=1) as background, ExitStack() as locks:
        if run.progress or run.home.remote:
            locks.enter_context(run.home.command_lock())
        store = options.tracking_uri or ((known := run.home.key()) and known.store)
        preparing = background.submit(prepare, store)
        with nullcontext() if run.is_local else connected(run.address, code=run.asked.model.code):
            with doing(IMPORTING):
                preparing.result()
            if not (run.home.remote or run.is_local):
                refuse_unshared("--out", run.home.path.parent)
            if not run.progress:
                if not run.home.remote:
                    make(run.home.path)
                    locks.enter_context(run.home.command_lock())
                locks.enter_context(run.home.removed_on_failure())
            return recorded(run, options.tracking_uri, options.config)


def planned(options: RunOptions) -> RunPlan:
    config = options.training
    if options.resume:
        run = RunPlan.continued(config, options.resume, options.out)
    else:
        run = RunPlan.new(config, new_run(options.out, options.name or default_name(config)))
    confirmed = confirmed_by(options.config, config) if options.config else None
    return dataclasses.replace(run, memory_limit=options.memory_limit, address=options.address, confirmed=confirmed)


def default_name(config: TrainConfig) -> str:
    return f"{short_name(config.model)}-{time.strftime('%Y%m%d-%H%M%S')}"


def prepare(tracking_uri: str | None) -> None:
    """Import torch and MLflow, and open the store, which takes as long as starting Ray and happens in parallel."""
    import torch  # noqa: F401

    from infra.tracking.store import open_store

    open_store(tracking_uri)


def recorded(run: RunPlan, tracking_uri: str | None, file: str | None) -> int:
    """Train on the connected Ray, by settings that a search may have left in ``file``; returns the exit code."""
    from infra.tracking.tracker import Tracker
    from infra.tracking.views import ui_link
    from train.launch.driver import train_and_record
    from train.reporting import report, tracking
    from train.reporting.charts import record_curves

    home, facts = run.home, _facts(run)
    asked = continued(run.asked, run.progress.config) if run.progress else run.asked
    config = resolve(asked, facts.within(run.memory_limit))
    key, is_new = run_in_mlflow(home, tracking_uri, starts=run.progress is None)
    write_json(home.config, run.asked.to_json())
    home.send(home.config)
    report.print_header(config, run.asked, run.manifest, home.place, facts)
    with Tracker(key) as tracker:
        tracking.complete_earlier(key)
        if is_new:
            tracking.record_start(tracker, config, run.manifest, run.asked)
        if file:
            tracking.record_search(tracker, home.path.name, file)
        if run.progress:
            tracking.record_resume(tracker, config, run.progress.step)
        if run.memory_limit:
            tracker.tags({"memory_limit": format_size(run.memory_limit)})
        try:
            result = train_and_record(run, config, tracker)
        except KeyboardInterrupt:
            if not home.has_checkpoint():
                raise
            tracker.status = "KILLED"
            console.print(f"resume with: {resume_run(home.place)}", markup=False)
            return INTERRUPTED
        config = without(config, result.too_large) or config
        record_curves(tracker, config, result, home)
    told = report.run_report(config, result, home.place, run.memory_limit)
    report.print_result(told, result, ui_link(key))
    if result.outcome == "interrupted":
        return INTERRUPTED
    return 0 if result.outcome == "finished" else 1


def _facts(run: RunPlan) -> DeviceFacts:
    if run.is_local:
        return facts_here(run.asked)
    from train.launch.placement import worker_facts

    return worker_facts(run.asked)


def run_in_mlflow(home: RunFolder, tracking_uri: str | None, *, starts: bool) -> tuple[RunKey, bool]:
    """The key of the MLflow run to record to, and whether that run is new.

    A resumed run continues its earlier MLflow run. If that is not in the store that ``--tracking-uri`` names, or not
    known on this machine, a new one records the whole run.
    """
    from infra.device import provenance
    from infra.tracking.store import create_run, has_run, reopen_run, store_uri

    key = None if starts else home.key(tracking_uri and store_uri(tracking_uri))
    if key and (tracking_uri is None or has_run(key)):
        reopen_run(key)
        return key, False
    tags = provenance.collect() | {"kind": "run"}
    place, name = home.place.address, home.path.name
    return create_run("train", name, tracking_uri=tracking_uri, home=place, tags=tags, keep=home.keep_key), True


if __name__ == "__main__":
    main()
