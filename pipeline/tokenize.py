"""Turn books into token shards: ``python -m pipeline.tokenize [SOURCE ...] --out data/tokens``.

Running it again finishes what a kill left undone, and does nothing when nothing is missing. Wiring only: functions of a
``-m`` file reach Ray's workers as ``__main__``, pickled by value.
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
from infra.cli.progress import doing
from infra.cli.units import format_duration
from infra.device import provenance
from infra.errors import UserError
from infra.ray.cluster import connected
from infra.ray.machines import ask_others, losses_reported, refuse_unshared
from infra.storage.directory import StorageDir, WorkingCopy
from infra.tracking.names import changed, shown
from pipeline.config import TokenizeConfig
from pipeline.job import output, processes, ray_data, report
from pipeline.job.crash_guard import forget
from pipeline.job.embedded_files import embed_local_files
from pipeline.job.plan import Job, Piece
from pipeline.shards import MANIFEST, QUARANTINE, TRACKING, Manifest

if TYPE_CHECKING:
    from infra.tracking.tracker import Tracker


def main(config: TokenizeConfig) -> int:
    output.refuse_foreign(StorageDir.of(config.out), overwrite=config.overwrite)
    progress = report.JobStats()
    with progress.wall.time("plan"), doing("listing the books"):
        job = Job(config)
    with nullcontext() if config.dry_run else output.sole_writer(job.place):
        return _continue(job, progress)


def _continue(job: Job, progress: report.JobStats) -> int:
    """Compare the plan with what the output holds, and do what is missing; returns the exit code."""
    config, place = job.config, job.place
    changed = output.changed_settings(job)
    # An output without a manifest is what an interrupted --overwrite left: this run continues it.
    fresh = bool(changed) or (config.overwrite and place.exists(MANIFEST))
    if fresh:
        why = "because settings changed" if changed else "because of --overwrite"
        assessed = output.Assessment({}, dict.fromkeys((piece.name for piece in job.pieces), why))
    else:
        assessed = output.assess(job)
    todo = [piece for piece in job.pieces if piece.name in assessed.todo]
    console.print(_intention(job, assessed, todo), markup=False)
    if changed and (config.dry_run or not config.overwrite):
        names = "; ".join(f"{name} was {there!r} and is now {now!r}" for name, (there, now) in changed.items())
        step = "it is replaced" if config.overwrite else "add --overwrite to replace it, or name another --out"
        sentence = f"{place} was made with other settings ({names}): {step}."
        if not config.dry_run:
            raise UserError(sentence)
        console.print(sentence, markup=False)
    if not config.overwrite and (missing := output.missing_sources(job)):
        sentence = (
            f"{place} holds books of {', '.join(missing[:3])}{', ...' * (len(missing) > 3)}, which the sources do not "
            "include any more. Name them as well, add --overwrite to replace the data set, or use another --out."
        )
        if not config.dry_run:
            raise UserError(sentence)
        console.print(sentence, markup=False)
    if config.dry_run:
        return 0
    if not todo and output.is_finished(job):
        console.print(f"{place} is finished; nothing to do.", markup=False)
    else:
        _make(job, todo, progress, fresh=fresh)
    return 0


def _make(job: Job, todo: list[Piece], progress: report.JobStats, *, fresh: bool) -> None:
    """Do the pieces and finish the data set. MLflow is opened meanwhile, or while Ray starts; Ray stops at the end."""
    config, place, phase = job.config, job.place, progress.wall.time
    on_ray = _on_ray(config, todo)
    with ThreadPoolExecutor(max_workers=1) as background, ExitStack() as ray:
        if on_ray:
            background.submit(_open_store, config.tracking_uri)
            with phase("ray start"):
                ray.enter_context(connected(config.address, cpus=config.parallelism, prestart=True))
                ray_data.warm_up(0 if config.cluster else min(config.parallelism, len(todo)))
            if config.cluster:
                if not place.remote:
                    refuse_unshared("--out", place.folder)
                todo = embed_local_files(todo)
        with ExitStack() as run:
            opening = background.submit(_open_run, job)
            run.push(lambda *failure: opening.result().__exit__(*failure))  # it ends as this block does
            if fresh:
                opening.result()  # a store that cannot be used is refused while what would be replaced is still there
                output.clear(place)
            output.begin(job, [piece.name for piece in todo])
            if todo:
                with phase("work"):
                    _work(job, todo, progress, opening, on_ray=on_ray)
            with phase("mlflow start"), doing("opening the MLflow store"):
                tracker = opening.result()
            place.write_json(TRACKING, tracker.key.kept_in(place.address))
            stopping = background.submit(ray.close)
            with phase("finish"), doing("checking and closing the data set"):
                manifest = output.finish(job, partial(console.print, markup=False))
            if on_ray:
                with phase("ray stop"), doing("stopping Ray"):
                    stopping.result()
            told = report.data_report(str(config.out), manifest.report, progress, manifest.fingerprint, manifest.inputs)
            tracker.note(told.markdown())
            tracker.metrics(shown(progress.metrics() | _counts(manifest), report.METRICS))
            tracker.tags({"dropped": report.dropped(manifest.report)})
            copy = WorkingCopy.of(place, fresh=False, wanted=lambda name: name in (MANIFEST, QUARANTINE))
            tracker.file(copy.folder / MANIFEST)
            tracker.file(copy.folder / QUARANTINE)
            tracker.data(place.name, manifest.fingerprint, str(place), manifest.report, "output")
    from infra.tracking.views import ui_link

    told.show()
    console.print(ui_link(tracker.key), markup=False)


def _on_ray(config: TokenizeConfig, todo: list[Piece]) -> bool:
    """Whether Ray Data does these pieces: where it was asked for. On one machine it was slower at every size."""
    return bool(todo and (config.cluster or config.workers))


def _open_store(tracking_uri: str | None) -> None:
    from infra.tracking.store import open_store  # importing MLflow takes two seconds

    open_store(tracking_uri)


def _open_run(job: Job) -> "Tracker":
    from infra.tracking.store import create_run
    from infra.tracking.tracker import Tracker

    config, home = job.config, job.place.address
    key = create_run("pipeline", job.place.name, tracking_uri=config.tracking_uri, home=home, tags=provenance.collect())
    tracker = Tracker(key)
    identity, usual = config.identity(), TokenizeConfig().identity()
    named = {"sources": identity.pop("sources"), "out": str(job.place), "workers": config.parallelism}
    tracker.params(changed(identity, usual) | named | {"pieces": len(job.pieces)})
    tracker.json(config.identity() | named, "config.json")
    return tracker


def _work(job: Job, todo: list[Piece], progress: report.JobStats, opening: "Future[Tracker]", *, on_ray: bool) -> None:
    config, total, run = job.config, len(job.pieces), uuid.uuid4().hex
    if on_ray:
        workers = config.workers if config.cluster else config.parallelism
        summaries = ray_data.do_pieces(todo, job.place, run, workers=workers, ours=not config.cluster)
    else:
        summaries = processes.do_pieces(todo, job.place, run, workers=config.parallelism)
    with doing("tokenizing") as told:
        start = time.perf_counter()
        watched = losses_reported("the others do its pieces") if config.cluster else nullcontext()
        try:
            with watched, closing(summaries):
                for number, summary in enumerate(summaries, 1):
                    progress.add(summary)
                    taken = time.perf_counter() - start
                    left = format_duration(round(taken / number * (len(todo) - number)))
                    done = f"{total - len(todo) + number:,} of {total:,} pieces"
                    told.now("tokenizing", f"{done} | {progress.bytes / 1e6 / taken:,.0f} MB/s | {left} left")
                    if opening.done():
                        opening.result()  # a store that cannot be used ends the work now
        finally:
            forget(run)
    if config.cluster:
        ask_others(forget, run)


def _intention(job: Job, assessed: output.Assessment, todo: list[Piece]) -> str:
    """What is there, what is done, what will be done and why, and what that will take."""
    config, summary, on_ray = job.config, job.inventory.summary(), _on_ray(job.config, todo)
    lines = [
        f"{summary['files']:,} files, {summary['bytes'] / 1e6:,.1f} MB, in {len(job.pieces):,} pieces -> {config.out}"
        + (", by Ray Data" if on_ray else ", without Ray" if todo else "")
    ]
    if skipped := report.skipped_files(summary):
        lines.append(f"skipped: {skipped}")
    if named := report.named_splits(summary):
        lines.append(f"files by the splits in their names: {named}")
    lines += output.source_changes(job)
    if assessed.done or config.dry_run:
        reasons = Counter(assessed.todo.values())
        why = ", ".join(f"{count:,} {reason}" for reason, count in reasons.items()) or "nothing"
        lines.append(f"done: {len(assessed.done):,} pieces; to do: {why}")
    if config.dry_run:
        lines.append(
            "estimate: "
            + report.estimate(
                job.pieces, todo, assessed.done.values(), config.parallelism,
                token_bytes=np.dtype(job.vocabulary.dtype).itemsize, on_ray=on_ray,
            )
        )  # fmt: skip
    return "\n".join(lines)


def _counts(manifest: Manifest) -> dict[str, float]:
    counts = manifest.report
    values = {"books/in": counts["books_in"], "books/kept": counts["books_kept"], "text/chars": counts["chars"]}
    values |= {f"books/dropped_{reason.replace(' ', '_')}": n for reason, n in counts["books_dropped"].items()}
    for split, sums in manifest.splits.items():
        values |= {f"tokens/{split}": sums["tokens"], f"books/{split}": sums["books"]}
    return values


if __name__ == "__main__":
    command.run(main, TokenizeConfig, module="pipeline.tokenize")
