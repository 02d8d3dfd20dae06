"""The plan of a ladder: its suite resolved for the device, checked before the first run."""

from dataclasses import replace
from typing import Any

from rich.markup import escape

from infra.cli.console import console
from infra.cli.table import Report, bullet_list
from infra.cli.units import format_duration
from infra.errors import UserError
from infra.storage.directory import StorageDir
from pipeline.shards import read_manifest
from train.config import load_config
from train.data.assumed import describe_data
from train.data.sources import source_of
from train.estimate.forecast import NOT_COVERED
from train.estimate.gpu_rates import load_gpu_rates
from train.estimate.prediction import merge_changes, predict, prediction_table
from train.estimate.roofline import SOURCE
from train.reporting.report import print_device_lines
from train.resolved import prepare, prepare_for_plan, resolve
from train.run_files.run_folder import new_directory
from tune.config import LadderConfig
from tune.experiment.folder import TRIALS
from tune.experiment.machines import planned_machine, trial_machines
from tune.reporting.report import START_SECONDS, format_cost
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

MAX_PLAN_ROWS = 13
"""Maximum number of rows in the table of rungs that a dry run prints; the others are one line."""


def make_ladder(config: LadderConfig) -> Ladder:
    """Resolve the ladder of ``config`` from the data's manifest and the device, without writing anything."""
    config, name = config.with_ends(), config.name or config.suite
    directory = StorageDir.of(config.out, name)
    if not (config.resume or config.dry_run):
        new_directory(config.out, name, allowed_leftovers=(TRIALS, StorageDir.LOCK_FILE))
    if config.dry_run:
        start, manifest = prepare_for_plan(config.training)
    else:
        manifest = read_manifest(config.data)
        start = prepare(config.training, manifest)
    suite = find_suite(config.suite)
    if config.suite not in SUITES:
        check_applicable(suite, start, config.suite)
    suite = choose_rungs(suite, config)
    if config.stream:  # Invalid books must be reported now, not after hours of other rungs.
        books = start.replace(stream=config.stream)
        prepare(books, source_of(books.dataset).manifest)
    if config.gpu:
        start = start.replace(device="cuda")
        machines = (planned_machine(config.gpu, config.memory_limit),)
    else:
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
    location = "" if ladder.config.dry_run else f" in {ladder.directory}"
    heading = f"[bold]{escape(suite.name)}[/bold]: {escape(suite.title)}; {len(suite.rungs)} rungs{escape(location)}"
    console.print(heading)
    if not ladder.config.dry_run:
        return
    print_plan(ladder)
    if reference == study.NAME:
        Report([], study.predict(suite)).show()
    console.print("dry run: nothing was run")


def print_plan(ladder: Ladder) -> None:
    """Print the memory and speed that are predicted for the rungs, and the maximum time of the ladder."""
    config = ladder.config
    console.print(describe_data(ladder.manifest, ladder.training.model, config.data), markup=False)
    gpu_rates = load_gpu_rates(config.gpu) if config.gpu else None
    controls, rungs = SuiteReplay(ladder, rows=None).replay()
    runs = [rung for rung in (controls[0], *rungs) if rung.config]
    limit = ladder.limit or (gpu_rates and gpu_rates.device_info.memory)
    predictions = [predict(rung.name, rung.config.step, gpu_rates, limit) for rung in runs if rung.config]
    unpredicted: list[str] = []
    if not ladder.suite.cumulative:
        baseline, *changes = predictions
        predictions = [baseline, *(change for change in changes if not baseline.is_similar(change))]
        unpredicted = [change.label for change in changes if baseline.is_similar(change)]
    merged = merge_changes(predictions)
    title = f"Predicted{f' for {gpu_rates.device_info.name}' if gpu_rates else ''}, not measured"
    prediction_table(title, "rung", merged[:MAX_PLAN_ROWS]).show()
    notes = ["rungs in one row: no difference between them is predicted"] * (len(merged) < len(predictions))
    notes += [f"no difference from the baseline is predicted: {', '.join(unpredicted)}"] * bool(unpredicted)
    hidden = [f"{prediction.label} {prediction.peak_text}" for prediction in merged[MAX_PLAN_ROWS:]]
    notes += [f"peak memory (GB) of more rungs: {', '.join(hidden)}"] * bool(hidden)
    skipped = [f"{rung.name} ({rung.reason})" for rung in rungs if not rung.config]
    notes += [f"skipped: {'; '.join(skipped)}"] * bool(skipped)
    has_speed = any(prediction.speed for prediction in predictions)
    speed = f"tokens/s: {SOURCE}" if has_speed else f"speed: {NOT_COVERED}"
    notes.append(speed if gpu_rates else "speeds are only predicted with --gpu")
    count = ladder.remaining([])
    length = f"{config.steps} steps" if config.steps else format_duration(config.time_budget or 0.0)
    text = f"about {count} runs of at most {length} each"
    if config.time_budget:
        seconds = count * (START_SECONDS + config.time_budget)
        text += f", at most {format_duration(round(seconds))} in total without compilation"
        text += format_cost(seconds, config.price)
    console.print_paragraph(bullet_list([*notes, text]))
