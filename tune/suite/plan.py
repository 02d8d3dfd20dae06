"""The plan of a ladder: its suite resolved for the device, checked before the first run."""

from dataclasses import replace
from typing import Any

from rich.markup import escape

from infra.cli.console import console
from infra.cli.table import Report, Table
from infra.cli.units import GB
from infra.errors import UserError
from infra.storage.directory import StorageDir
from pipeline.shards import read_manifest
from train.config import load_config
from train.data.sources import source_of
from train.estimate.memory import peak_if_known
from train.reporting.report import print_device_lines
from train.resolved import prepare, resolve
from train.run_files.run_folder import new_directory
from tune.config import LadderConfig
from tune.experiment.folder import TRIALS
from tune.experiment.machines import trial_machines
from tune.suite import study
from tune.suite.catalog import SUITES, check_applicable, find_suite
from tune.suite.profiles import check_profiled_rungs
from tune.suite.replay import BASELINE, Ladder, SuiteReplay
from tune.suite.suites import (
    STREAMING,
    Suite,
    choose,
    replace_model,
    search_result_rung,
    shorten_for_cpu,
    streaming_rung,
)


def make_ladder(config: LadderConfig) -> Ladder:
    """Resolve the ladder of ``config`` from the data's manifest and the device, without writing anything."""
    config, name = config.with_ends(), config.name or config.suite
    directory = StorageDir.of(config.out, name)
    if not (config.resume or config.dry_run):
        new_directory(config.out, name, allowed_leftovers=(TRIALS, StorageDir.LOCK_FILE))
    manifest = read_manifest(config.data)
    start = prepare(config.training, manifest)
    suite = find_suite(config.suite)
    if config.suite not in SUITES:
        check_applicable(suite, start, config.suite)
    suite = choose_rungs(suite, config)
    if config.stream:  # Invalid books must be reported now, not after hours of other rungs.
        books = start.replace(stream=config.stream)
        prepare(books, source_of(books.dataset).manifest)
    machines = trial_machines(start.dataset, start.execution, manifest.fingerprint, cluster=config.cluster)
    device_info = machines[0].device
    training = resolve(start, device_info)
    if training.execution.device == "cpu":
        suite = shorten_for_cpu(suite)
        model = "" if config.model else " with the model tiny and"
        console.print(
            f"[yellow]No GPU is used: the suite runs in a short form,{model} batches one eighth of the size.[/]"
        )
    else:
        print_device_lines(training, device_info)
    searched = (
        [search_result_rung(resolve(load_config(config.search_result, "--search-result"), device_info).flat())]
        if config.search_result
        else []
    )
    streaming = [streaming_rung(config.stream)] if config.stream else []
    suite = replace(suite, rungs=(*suite.rungs, *searched, *streaming))
    if config.model:
        suite = replace_model(suite, start.model)
    training = training.replace(stream=config.stream)  # Every trial then leaves cores for reading the books.
    if config.profile:
        check_profiled_rungs(config.profile, [BASELINE, *(rung.name for rung in suite.rungs)])
        if config.cluster:
            raise UserError("--profile records on this machine, not on a cluster. Remove --profile or --address.")
    ladder = Ladder(config, directory, machines, manifest, training, config.memory_limit, suite)
    ladder.request(machines[0].name, 1, [], [])  # A baseline that cannot run is rejected before anything is created.
    return ladder


def choose_rungs(suite: Suite, config: LadderConfig) -> Suite:
    """Return ``suite`` with only the rungs of ``--rungs``, if it is set, and with the number of seeds."""
    if STREAMING in config.rungs and not config.stream:
        raise UserError(f"--rungs {STREAMING} needs books. Set their sources with --stream.")
    if config.rungs:
        suite = choose(suite, [name for name in config.rungs if name != STREAMING])
    suite = replace(suite, seeds=config.seeds or suite.seeds)
    if suite.seeds > 1 and (config.steps is None or not config.cycle.val_batches):
        raise UserError(
            f"Comparing validation losses over {suite.seeds} seeds needs a fixed number of steps. Set --steps and a "
            "--cycle with validation batches, or --seeds 1."
        )
    return suite


def introduce(ladder: Ladder, reference: dict[str, Any] | str | None) -> None:
    """Print the suite; for a dry run, also the predicted memory of its rungs and the published study, if requested.

    ``reference`` is the ladder to compare with, or the name of the study. Raises ``UserError`` if there is no study of
    the suite.
    """
    suite = ladder.suite
    if reference == study.NAME:
        study.check_has_study(suite, ladder.training.model)
    heading = f"[bold]{escape(suite.name)}[/bold]: {escape(suite.title)}; {len(suite.rungs)} rungs in"
    console.print(heading, escape(str(ladder.directory)))
    if not ladder.config.dry_run:
        return
    controls, rungs = SuiteReplay(ladder, rows=None).replay()
    rows: list[tuple[str, str, str]] = []
    for rung in (controls[0], *rungs):
        if rung.config:
            peak = peak_if_known(rung.config.step)
            rows.append((rung.name, rung.batch, f"{peak.total / GB:.2f}" if peak else "measured by probes"))
        else:
            console.print(f"{rung.name}: skipped; {rung.reason}.", markup=False)
    Table("", ("rung", "batch (sequences)", "predicted peak memory (GB)"), rows).show()
    if reference == study.NAME:
        Report([], study.predict(suite)).show()
    console.print("dry run: nothing was run")
