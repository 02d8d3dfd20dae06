"""Turn books into token shards: ``python -m pipeline.tokenize [SOURCE ...] --out data/tokens``.

In: sources. Out: a finished data set (see ``pipeline.shards``), a report, and a run in MLflow. Running
it again finishes what a kill left undone, and does nothing when nothing is missing. Wiring only:
functions of a ``-m`` file reach Ray's workers as ``__main__``, pickled by value.
"""

import shutil
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markdown import Markdown
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from infra import command, provenance
from infra.cluster import connected
from infra.command import console
from infra.errors import UserError
from infra.storage import locate
from pipeline.books.sources import Inventory, find
from pipeline.config import TokenizeConfig
from pipeline.encoding import VOCABULARY_SHA256
from pipeline.job import output, report
from pipeline.job.crash_guard import notes_folder
from pipeline.job.dedup import drop_duplicates, find_duplicates
from pipeline.job.plan import Piece, make_plan
from pipeline.job.ray_data import do_pieces, warm_up
from pipeline.shards import MANIFEST, QUARANTINE, Manifest, read_manifest

if TYPE_CHECKING:
    from infra.tracking.tracker import Tracker


def main(config: TokenizeConfig) -> int:
    """Run the command; returns its exit code."""
    folder = config.out.absolute()
    if not config.overwrite:
        output.refuse_foreign(folder)
    if config.copy_to:
        locate(config.copy_to)  # what cannot be an address is refused before the work
    timings = report.Progress()
    with _phase(timings, "plan"):
        inventory = find(config.sources, config.mirror)
        plan = make_plan(inventory, config)
    with nullcontext() if config.dry_run else output.sole_writer(folder):
        return _continue(config, folder, inventory, plan, timings)


def _continue(
    config: TokenizeConfig, folder: Path, inventory: Inventory, plan: list[Piece], timings: report.Progress
) -> int:
    """Compare ``plan`` with what ``folder`` holds, and do what is missing; returns the exit code."""
    changed = output.changed_settings(folder, config)
    # A folder without a manifest is what an interrupted --overwrite left: it goes on with that.
    fresh = bool(changed) or (config.overwrite and (folder / MANIFEST).exists())
    if fresh:
        why = "because settings changed" if changed else "because of --overwrite"
        assessed = output.Assessment({}, dict.fromkeys((piece.name for piece in plan), why))
    else:
        assessed = output.assess(folder, plan)
    todo = [piece for piece in plan if piece.name in assessed.todo]
    console.print(_intention(config, inventory, plan, assessed), markup=False)
    if changed and (config.dry_run or not config.overwrite):
        names = "; ".join(f"{name} was {there!r} and is now {now!r}" for name, (there, now) in changed.items())
        step = "it is replaced" if config.overwrite else "add --overwrite to replace it, or name another --out"
        sentence = f"{folder} was made with other settings ({names}): {step}."
        if not config.dry_run:
            raise UserError(sentence)
        console.print(sentence, markup=False)
    if config.dry_run:
        return 0
    if not todo and _is_finished(folder, inventory):
        console.print(f"{folder} is finished; nothing to do.", markup=False)
    else:
        _make(config, folder, inventory, plan, todo, timings, fresh=fresh)
    if config.copy_to:
        _copy(folder, config.copy_to)
    return 0


def _make(
    config: TokenizeConfig,
    folder: Path,
    inventory: Inventory,
    plan: list[Piece],
    todo: list[Piece],
    timings: report.Progress,
    *,
    fresh: bool,
) -> None:
    """Do the pieces and finish the data set. MLflow is imported while Ray starts, and Ray stops while we finish."""
    with ThreadPoolExecutor(max_workers=1) as background, ExitStack() as ray:
        opening = background.submit(_open_store, config.tracking_uri)
        if todo:
            with _phase(timings, "ray start"):
                ray.enter_context(connected(config.cluster, cpus=config.parallelism))
                warm_up(0 if config.cluster else min(config.parallelism, len(todo)))
        with _phase(timings, "mlflow start"):
            opening.result()
            tracker = _open_run(config, folder)
        if fresh:
            output.clear(folder)
        output.begin(folder, config, [piece.name for piece in todo])
        tracker.params(config.identity() | {"out": folder, "workers": config.parallelism, "pieces": len(plan)})
        try:
            if todo:
                with _phase(timings, "work"):
                    _work(config, folder, plan, todo, timings, tracker.key.run_id)
            stopping = background.submit(ray.close)
            with _phase(timings, "finish"):
                manifest = _finish(config, folder, inventory, plan)
            with _phase(timings, "ray stop"):
                stopping.result()
        except BaseException as failure:
            tracker.finish("KILLED" if isinstance(failure, KeyboardInterrupt) else "FAILED")
            raise
        finally:
            shutil.rmtree(notes_folder(tracker.key.run_id), ignore_errors=True)
    from infra.tracking.views import ui_link

    note = report.as_markdown(str(config.out), manifest.report, timings, manifest.fingerprint)
    tracker.note(note)
    tracker.metrics(timings.metrics() | _counts(manifest))
    tracker.file(folder / MANIFEST)
    tracker.file(folder / QUARANTINE)
    tracker.data(folder.name, manifest.fingerprint, str(folder), manifest.report, "output")
    tracker.finish()
    console.print(Markdown(note), soft_wrap=False)
    console.print(ui_link(tracker.key), markup=False)


def _open_store(tracking_uri: str | None) -> None:
    from infra.tracking.store import open_store

    open_store(tracking_uri)


def _open_run(config: TokenizeConfig, folder: Path) -> "Tracker":
    from infra.tracking.store import create_run
    from infra.tracking.tracker import Tracker

    return Tracker(create_run("pipeline", folder.name, tracking_uri=config.tracking_uri, tags=provenance.collect()))


def _work(
    config: TokenizeConfig, folder: Path, plan: list[Piece], todo: list[Piece], timings: report.Progress, run: str
) -> None:
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("pieces, {task.fields[rate]}"),
        TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("tokenizing", total=len(plan), completed=len(plan) - len(todo), rate="starting")
        start = time.perf_counter()
        workers = config.workers if config.cluster else config.parallelism
        for summary in do_pieces(todo, folder, run, workers=workers, ours=not config.cluster):
            timings.add(summary)
            rate = f"{timings.bytes / 1e6 / (time.perf_counter() - start):,.0f} MB/s"
            bar.update(task, advance=1, rate=rate)


def _finish(config: TokenizeConfig, folder: Path, inventory: Inventory, plan: list[Piece]) -> Manifest:
    """Write quarantine and manifest from the records.

    Raises ``UserError`` when a piece's record did not arrive here, and when no book was kept.
    """
    records = output.collect(folder, plan)
    if config.duplicates != "keep":
        records = drop_duplicates(folder, records, find_duplicates(records))
    output.remove_strays(folder, records, plan)
    dropped = output.write_quarantine(folder, records.values())
    counts = report.totals(records.values())
    if not counts["books_kept"]:
        first = f" Of {dropped[0].book} it is: {dropped[0].detail}." if dropped else ""
        raise UserError(
            f"none of {counts['books_in']:,} books could be kept: {folder / QUARANTINE} gives the reason for each."
            f"{first}"
        )
    shards = [shard for record in records.values() for shard in record.shards]
    manifest = Manifest.of(
        shards,
        config=config.identity(),
        vocabulary_sha256=VOCABULARY_SHA256,
        inputs=inventory.summary(),
        report=counts,
    )
    manifest.write(folder)
    return manifest


def _copy(folder: Path, uri: str) -> None:
    from pipeline.copies import upload  # most runs are on one machine

    with Progress(console=console) as bar:
        task = bar.add_task("copying", total=len(read_manifest(folder).shards))
        sent = upload(folder, uri, lambda: bar.advance(task))
    console.print(f"{uri} is a copy of it: {sent:,} shards sent, the others were there.", markup=False)


def _is_finished(folder: Path, inventory: Inventory) -> bool:
    try:
        return read_manifest(folder).inputs == inventory.summary()
    except UserError:
        return False


def _intention(config: TokenizeConfig, inventory: Inventory, plan: list[Piece], assessed: output.Assessment) -> str:
    """What is there, what is done, what will be done and why, and what that will take."""
    summary = inventory.summary()
    lines = [f"{summary['files']:,} files, {summary['bytes'] / 1e6:,.1f} MB, in {len(plan):,} pieces -> {config.out}"]
    if inventory.skipped:
        lines.append("left aside: " + ", ".join(f"{n:,} {suffix}" for suffix, n in inventory.skipped.items()))
    if assessed.done or config.dry_run:
        reasons = Counter(assessed.todo.values())
        why = ", ".join(f"{count:,} {reason}" for reason, count in reasons.items()) or "nothing"
        lines.append(f"done: {len(assessed.done):,} pieces; to do: {why}")
    if config.dry_run:
        todo = [piece for piece in plan if piece.name in assessed.todo]
        lines.append("estimate: " + report.estimate(plan, todo, assessed.done.values(), config.parallelism))
    return "\n".join(lines)


def _counts(manifest: Manifest) -> dict[str, float]:
    counts = manifest.report
    values = {"books/in": counts["books_in"], "books/kept": counts["books_kept"], "text/chars": counts["chars"]}
    values |= {f"books/dropped_{reason.replace(' ', '_')}": n for reason, n in counts["books_dropped"].items()}
    for split, sums in manifest.splits.items():
        values |= {f"tokens/{split}": sums["tokens"], f"books/{split}": sums["books"]}
    return values


@contextmanager
def _phase(timings: report.Progress, name: str) -> Iterator[None]:
    start = time.perf_counter()
    try:
        yield
    finally:
        timings.wall[name] = time.perf_counter() - start


if __name__ == "__main__":
    command.run(main, TokenizeConfig, module="pipeline.tokenize", description=__doc__ or "")
