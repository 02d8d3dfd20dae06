"""A search from its config to its files: check, plan, drive, and say what was found."""

import dataclasses
import os
import shlex
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from infra import provenance
from infra.cluster import connected
from infra.command import INTERRUPTED, console, errors, escape
from infra.tracking.store import open_store
from infra.tracking.tracker import Tracker
from infra.tracking.views import ui_link
from infra.units import format_duration, format_size
from pipeline.shards import Manifest, read_manifest
from train.checkpoint.run_folder import new_folder
from train.loop.execution import worker_environment
from train.model_config import format_model
from train.resolve import resolve
from tune import charts, report
from tune import folder as folders
from tune.config import SearchConfig
from tune.device import make_prior, memory_limit, trial_device
from tune.ray_tune import Listener, Proposals, drive, trial_resources
from tune.space import Space, make_space, parse_knobs
from tune.strategy.base import Confirmed, Grid, Retrying, Strategy, enough_seconds
from tune.strategy.memory_aware import MemorySearcher
from tune.strategy.ranking import standings
from tune.tracking import Evidence, describe, open_parent, summary_metrics
from tune.trial.row import Proposal, Row, read_rows
from tune.trial.run import Request
from tune.watchdog import CLUSTER_GRACE, OWN_GRACE, watching


def search(config: SearchConfig) -> int:
    """Run the command; returns its exit code. Raises ``UserError``."""
    manifest = read_manifest(config.training.data)
    name = config.resume or config.name or f"search-{time.strftime('%Y%m%d-%H%M%S')}"
    if config.resume or config.dry_run:
        folder = (config.out / name).resolve()
    else:
        folder = new_folder(config.out, name, begun=(folders.TRIALS, folders.LOCK))
    if config.cluster:
        with connected(config.address):
            return _search(config, manifest, folder)
    return _search(config, manifest, folder)


def _search(config: SearchConfig, manifest: Manifest, folder: Path) -> int:
    training = resolve(config.training, trial_device(config))
    device = training.device
    if config.cluster:
        trial_resources(device == "cuda")  # of a cluster without any, before anything is made
    limit = memory_limit(config.memory_limit, training)
    named = format_size(limit) if config.memory_limit else f"{limit / 1e9:.1f} GB (all there is)"
    space = make_space(training, parse_knobs(config.knobs), free=config.free_global_batch)
    memory = MemorySearcher(space, make_prior(space), limit)
    strategy = Confirmed(Retrying(make_strategy(config, space, memory)), space, config.confirm)
    console.print(
        f"[bold]{format_model(config.training.model)}[/bold]: {len(space.candidates())} candidates for "
        f"{space.batch_label}, limit {named} a process, on {device}"
    )
    if config.dry_run:
        report.print_plan(config, space, memory, strategy)
        return 0
    open_store(config.tracking_uri)  # one that cannot be used is refused before anything is made
    with folders.held(folder):
        return _run(config, manifest, folder, space, memory, strategy)


def make_strategy(config: SearchConfig, space: Space, memory: MemorySearcher) -> Strategy:
    """The strategy that ``--searcher`` names. Raises ``UserError`` when Optuna is not installed."""
    if config.searcher == "memory":
        return memory
    if config.searcher == "grid":
        return Grid(space)
    from tune.strategy.optuna_tpe import OptunaSearcher

    return OptunaSearcher(space, report.optuna_trials(space), config.training.seed)


def _run(
    config: SearchConfig, manifest: Manifest, folder: Path, space: Space, memory: MemorySearcher,
    strategy: Strategy,
) -> int:  # fmt: skip
    """Drive the strategy to its end in ``folder``, which this process holds; the exit code is 1 without a winner."""
    limit, device = int(memory.limit), space.base.device
    trials, data = folder / folders.TRIALS, config.training.data.resolve()
    kept = read_rows(trials)
    identity = config.identity() | {"data": manifest.fingerprint, "memory_limit": limit, "device": device}
    if config.resume:
        parent = folders.resumed_parent(folder, identity)
    else:
        parent = open_parent(
            folder.name, config.tracking_uri, provenance.collect(), space,
            keep=lambda parent: folders.begin(folder, config, identity, parent),
        )  # fmt: skip
    evidence = Evidence(parent, manifest, data, space)

    def ended(row: Row, rows: Sequence[Row]) -> None:
        evidence.catch_up(rows)
        console.print(report.row_text(row, space, limit), markup=False)
        console.print(report.progress_text(rows, space, strategy.remaining(rows)), markup=False)

    def request(proposal: Proposal, rows: Sequence[Row]) -> Request:
        if proposal.predicted_memory is None:  # a grid's, Optuna's, a repetition, or a confirmation
            curves = memory.curves(rows)
            proposal = dataclasses.replace(proposal, predicted_memory=curves.memory(proposal.candidate))
        seconds = enough_seconds(rows, config.trial_time)
        if seconds > config.trial_time:
            console.print(f"    its steps get {format_duration(round(seconds, 1))}, because --trial-time was too short")
        trial = space.config(proposal.candidate).to_json() | {"data": str(data)}
        return Request(
            proposal.key(folder.name), len(rows) + 1, proposal, trial, limit, config.trial_steps, seconds,
            config.trial_precision, str(trials), time.time(),
        )  # fmt: skip

    with Tracker(parent) as tracker:

        def lost(part: str) -> NoReturn:
            """Leave from the watchdog's thread, because the main one waits for an answer that will not come."""
            evidence.abandon()
            tracker.finish("KILLED")
            errors.print(
                f"[red]error:[/red] Ray died: its {part} no longer answers. Finished trials are kept; continue with: "
                f"{escape(resume_command(folder))}"
            )
            os._exit(1)

        describe(tracker, identity, manifest, data)
        evidence.catch_up(kept)
        grace = CLUSTER_GRACE if config.cluster else OWN_GRACE
        # Tune takes Ctrl-C between two of its events; where it falls elsewhere, the rows say as well where to go on.
        environment = worker_environment(space.base)
        with (
            suppress(KeyboardInterrupt),
            connected(config.address, environment=environment),
            watching(lost, grace=grace),
        ):
            proposals = Proposals(strategy, trials, Listener(evidence.start, ended), request, config.compile_time)
            drive(proposals, folder, trial_resources(device == "cuda"))
        rows = read_rows(trials)
        evidence.catch_up(rows)
        if strategy.propose(rows) is not None:
            console.print(f"stopped; continue with: {resume_command(folder)}", markup=False)
            evidence.abandon()
            tracker.finish("KILLED")
            return INTERRUPTED
        tracker.metrics(summary_metrics(rows, space))
        for file in report.write_files(rows, space, memory, config, folder):
            tracker.file(file)
        for chart, figure in charts.draw(rows, memory).items():
            figure.savefig(folder / f"{chart}.png", dpi=120)
            tracker.file(folder / f"{chart}.png", "charts")
        tracker.note(report.summary(rows, space, memory, config, folder))
        won = bool(standings(rows))
        tracker.finish("FINISHED" if won else "FAILED")
    report.print_end(rows, space, memory, folder)
    console.print(ui_link(parent, children_by="result/tokens_per_second"), markup=False)
    return 0 if won else 1


def resume_command(folder: Path) -> str:
    """The line that continues the search in ``folder``."""
    place = [] if folder.parent == Path("runs").resolve() else ["--out", str(folder.parent)]
    return shlex.join(["python", "-m", "tune.search", "--resume", folder.name, *place])
