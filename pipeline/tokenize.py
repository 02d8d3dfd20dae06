"""The command ``python -m pipeline.tokenize [SOURCE ...] --out data/tokens``, which turns books into token shards.

Running it again finishes an interrupted data set; a finished data set does not change. This module only connects the
parts of the job, because Ray's workers would receive functions of a ``-m`` file as ``__main__``, pickled by value.
"""

import time
import uuid
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, nullcontext
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from infra.cli import command
from infra.cli.console import console
from infra.cli.progress import status
from infra.cli.units import format_count, format_duration
from infra.device import provenance
from infra.device.hardware import device_info
from infra.errors import UserError
from infra.ray.cluster import ray_session
from infra.ray.machines import check_shared, report_lost_nodes, run_on_other_nodes
from infra.storage.directory import StorageDir
from infra.storage.workspace import Workspace
from infra.tracking.names import group_under_detail, non_default_params
from pipeline.config import TokenizeConfig
from pipeline.job import output, processes, ray_data, report
from pipeline.job.crash_guard import remove_notes
from pipeline.job.embedded_files import embed_local_files, machines_without_files
from pipeline.job.plan import Job, Partition
from pipeline.next_command import next_command
from pipeline.shards import MANIFEST_FILE, QUARANTINE_FILE, TRACKING_FILE, Manifest

if TYPE_CHECKING:
    from infra.tracking.tracker import Tracker


def main(config: TokenizeConfig) -> int:
    output.check_own_output(StorageDir.of(config.out), overwrite=config.overwrite)
    progress = report.JobStats()
    with progress.wall.time("plan"), status("listing books"):
        job = Job(config)
    with nullcontext() if config.dry_run else output.exclusive_writer(job.out_dir):
        return _continue_job(job, progress)


def _continue_job(job: Job, progress: report.JobStats) -> int:
    """Compare the plan with the output, and process the missing partitions; return the exit code."""
    config, out_dir = job.config, job.out_dir
    changed_settings = output.changed_settings(job)
    # Without a manifest, an earlier --overwrite may have been interrupted, which this command continues.
    is_replaced = bool(changed_settings) or (config.overwrite and out_dir.exists(MANIFEST_FILE))
    if is_replaced:
        reason = "because settings changed" if changed_settings else "because of --overwrite"
        plan_status = output.PlanStatus({}, dict.fromkeys((partition.name for partition in job.partitions), reason))
    else:
        plan_status = output.compare_with_plan(job)
    todo = [partition for partition in job.partitions if partition.name in plan_status.todo]
    console.print(_describe_plan(job, plan_status, todo), markup=False)
    if changed_settings and (config.dry_run or not config.overwrite):
        changes = "; ".join(f"{name}: {stored!r} → {new!r}" for name, (stored, new) in changed_settings.items())
        advice = "Use --overwrite to replace it, or choose another --out."
        if config.overwrite:
            advice = "It will be replaced."
        message = f"{out_dir} was created with other settings ({changes}). {advice}"
        if not config.dry_run:
            raise UserError(message)
        console.print(message, markup=False)
    if not config.overwrite and (missing := output.missing_sources(job)):
        message = (
            f"{out_dir} contains books from {', '.join(missing[:3])}{', ...' * (len(missing) > 3)}, which the sources "
            "no longer include. Add these sources, use --overwrite to replace the data set, or choose another --out."
        )
        if not config.dry_run:
            raise UserError(message)
        console.print(message, markup=False)
    if config.dry_run:
        return 0
    if not todo and output.is_finished(job):
        console.print(f"{out_dir} is up to date; nothing to do.", markup=False)
    else:
        _run_job(job, todo, progress, is_replaced=is_replaced)
    return 0


def _run_job(job: Job, todo: list[Partition], progress: report.JobStats, *, is_replaced: bool) -> None:
    """Process the partitions and finish the data set.

    The MLflow store is opened in the background while Ray starts or partitions are processed, and so is the device for
    the next command examined, for which torch is tried on a GPU. Ray is stopped in the background while the data set is
    finished.
    """
    config, out_dir, phase = job.config, job.out_dir, progress.wall.time
    uses_ray = _should_use_ray(config, todo)
    with ThreadPoolExecutor(max_workers=1) as background, ExitStack() as ray:
        if uses_ray:
            background.submit(_open_store, config.tracking_uri)
            with phase("ray start"):
                ray.enter_context(ray_session(config.address, cpus=config.num_workers, prestart=True))
                ray_data.warm_up(0 if config.cluster else min(config.num_workers, len(todo)))
            if config.cluster:
                check_shared("--out", out_dir)
                todo = embed_local_files(todo, machines_without_files(todo))
        with ExitStack() as run:
            tracker_future = background.submit(_open_run, job)
            device_future = background.submit(device_info)
            run.push(
                lambda *failure: tracker_future.result().__exit__(*failure)
            )  # The MLflow run ends with this block.
            if is_replaced:
                tracker_future.result()  # An unusable store must raise before the old data set is deleted.
                output.clear(out_dir)
            output.mark_unfinished(job, [partition.name for partition in todo])
            if todo:
                with phase("work"):
                    _run_partitions(job, todo, progress, tracker_future, uses_ray=uses_ray)
            with phase("mlflow start"), status("opening the MLflow store"):
                tracker = tracker_future.result()
            out_dir.write_json(TRACKING_FILE, tracker.run_ref.to_json_for(out_dir.address))
            ray_stop = background.submit(ray.close)
            with phase("finish"), status("checking and finishing the data set"):
                manifest = output.finish(job, partial(console.print, markup=False))
            if uses_ray:
                with phase("ray stop"), status("stopping Ray"):
                    ray_stop.result()
            job_report = report.make_report(
                str(config.out), manifest.report, progress, manifest.fingerprint, manifest.inputs,
                next_command(str(config.out), manifest, device_future.result()),
            )  # fmt: skip
            tracker.set_description(job_report.markdown())
            tracker.log_metrics(group_under_detail(progress.metrics() | _count_metrics(manifest), report.METRICS))
            tracker.set_tags({"dropped": report.format_dropped(manifest.report)})
            workspace = Workspace.of(out_dir)
            workspace.refresh(lambda name: name in (MANIFEST_FILE, QUARANTINE_FILE))
            tracker.log_file(workspace.path / MANIFEST_FILE)
            tracker.log_file(workspace.path / QUARANTINE_FILE)
            tracker.log_dataset(out_dir.name, manifest.fingerprint, str(out_dir), manifest.report, "output")
    from infra.tracking.views import ui_link

    job_report.show()
    console.print(ui_link(tracker.run_ref), markup=False)


def _should_use_ray(config: TokenizeConfig, todo: list[Partition]) -> bool:
    """Return whether Ray Data processes the partitions; only if a flag requests it, because it is slower on one
    machine."""
    return bool(todo and (config.cluster or config.workers))


def _open_store(tracking_uri: str | None) -> None:
    from infra.tracking.store import open_store  # Imported here, because importing MLflow takes two seconds.

    open_store(tracking_uri)


def _open_run(job: Job) -> "Tracker":
    from infra.tracking.store import create_run
    from infra.tracking.tracker import Tracker

    config, run_dir = job.config, job.out_dir.address
    run_ref = create_run(
        "pipeline", job.out_dir.name, tracking_uri=config.tracking_uri, run_dir=run_dir, tags=provenance.collect_tags()
    )
    tracker = Tracker(run_ref)
    identity, defaults = config.identity(), TokenizeConfig().identity()
    params = {"sources": identity.pop("sources"), "out": str(job.out_dir), "workers": config.num_workers}
    tracker.log_params(non_default_params(identity, defaults) | params | {"partitions": len(job.partitions)})
    tracker.log_json(config.identity() | params, "config.json")
    return tracker


def _run_partitions(
    job: Job, todo: list[Partition], progress: report.JobStats, tracker_future: "Future[Tracker]", *, uses_ray: bool
) -> None:
    config, total, run = job.config, len(job.partitions), uuid.uuid4().hex
    if uses_ray:
        workers = config.workers if config.cluster else config.num_workers
        summaries = ray_data.run_partitions(todo, job.out_dir, run, workers=workers, is_own_ray=not config.cluster)
    else:
        summaries = processes.run_partitions(todo, job.out_dir, run, workers=config.num_workers)
    with status("tokenizing") as live_status:
        start = time.perf_counter()
        lost_nodes = nullcontext()
        if config.cluster:
            lost_nodes = report_lost_nodes("the remaining machines take over its partitions")
        try:
            with lost_nodes, closing(summaries):
                for number, summary in enumerate(summaries, 1):
                    progress.add(summary)
                    seconds = time.perf_counter() - start
                    time_left = format_duration(round(seconds / number * (len(todo) - number)))
                    progress_text = f"{total - len(todo) + number:,} of {format_count(total, 'partition')}"
                    rate = f"{progress.bytes / 1e6 / seconds:,.0f} MB/s"
                    live_status.update("tokenizing", f"{progress_text} | {rate} | {time_left} left")
                    if tracker_future.done():
                        tracker_future.result()  # An unusable store raises here, and not after hours of work.
        finally:
            remove_notes(run)
    if config.cluster:
        run_on_other_nodes(remove_notes, run)


def _describe_plan(job: Job, plan_status: output.PlanStatus, todo: list[Partition]) -> str:
    """Describe the sources, the finished and the remaining partitions and, for a dry run, the expected time."""
    config, summary, uses_ray = job.config, job.inventory.summary(), _should_use_ray(job.config, todo)
    lines = [
        f"{format_count(summary['files'], 'file')}, {summary['bytes'] / 1e6:,.1f} MB, "
        f"{format_count(len(job.partitions), 'partition')} -> {config.out}"
        + (" (Ray Data)" if uses_ray else " (local processes)" if todo else "")
    ]
    if skipped := report.format_skipped_files(summary):
        lines.append(f"skipped files: {skipped}")
    if named_files := report.format_named_splits(summary):
        lines.append(f"files by the split in their names: {named_files}")
    lines += output.source_changes(job)
    if plan_status.done or config.dry_run:
        reasons = Counter(plan_status.todo.values())
        remaining = ", ".join(f"{count:,} {reason}" for reason, count in reasons.items()) or "none"
        lines.append(f"finished: {format_count(len(plan_status.done), 'partition')}; remaining: {remaining}")
    if config.dry_run:
        lines.append(
            "estimate: "
            + report.format_estimate(
                job.partitions, todo, plan_status.done.values(), config.num_workers,
                token_bytes=np.dtype(job.tokenizer.dtype).itemsize, uses_ray=uses_ray,
            )
        )  # fmt: skip
    return "\n".join(lines)


def _count_metrics(manifest: Manifest) -> dict[str, float]:
    counts = manifest.report
    values = {"books/read": counts["books_read"], "books/kept": counts["books_kept"], "text/chars": counts["chars"]}
    values |= {f"books/dropped_{reason.replace(' ', '_')}": n for reason, n in counts["books_dropped"].items()}
    for split, sums in manifest.splits.items():
        values |= {f"tokens/{split}": sums["tokens"], f"books/{split}": sums["books"]}
    return values


if __name__ == "__main__":
    command.run(main, TokenizeConfig, module="pipeline.tokenize")
