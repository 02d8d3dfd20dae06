"""What a ladder will run, decided before anything runs. Raises ``UserError`` in one sentence for what cannot work."""

from dataclasses import replace
from typing import Any

from rich.markup import escape

from infra.console import console
from infra.errors import UserError
from infra.storage_dir import StorageDir
from infra.table import Part, Report
from infra.units import GB
from pipeline.shards import read_manifest
from train.checkpoint.run_folder import new_place
from train.config import TrainConfig, load_config
from train.data.source import estimate, stream_of
from train.data.text import with_vocabulary_of
from train.estimate.memory import known_peak
from train.resolve import looked_at, resolve
from tune.config import SHORTEST, LadderConfig
from tune.device import trial_machines
from tune.folder import TRIALS, place_of
from tune.space import Candidate
from tune.suite import study
from tune.suite.runs import Climb, Ladder
from tune.suite.suites import STREAMING, Suite, choose, find_suite, searched, short_form, streamed, with_model
from tune.trial.row import TrialRow


def make_ladder(config: LadderConfig) -> Ladder:
    """The ladder that ``config`` describes; reads the data's manifest and the device, and writes nothing."""
    config, name = config.with_ends(), config.name or config.suite
    place = place_of(config.out, name)
    if not (config.resume or config.dry_run):
        new_place(config.out, name, begun=(TRIALS, StorageDir.LOCK))
    manifest = read_manifest(config.data)
    start = looked_at(with_vocabulary_of(config.training, manifest))
    suite = chosen(config, start)
    if config.stream:  # what is wrong with the books is known now, and not after the other rungs
        books = replace(start, stream=config.stream)
        with_vocabulary_of(books, estimate(stream_of(books)))
    machines = trial_machines(start, manifest.fingerprint, cluster=config.cluster)
    facts = machines[0].device
    training = resolve(start, facts)
    if training.device == "cpu":
        suite = short_form(suite)
        model = "" if config.model else " and the model tiny"
        console.print(
            f"[yellow]No GPU is used: the suite runs in its short form, batches an eighth the size{model}.[/]"
        )
    best = [searched(resolve(load_config(config.best, "--best"), facts))] if config.best else []
    last = [streamed(config.stream)] if config.stream else []
    suite = replace(suite, rungs=(*suite.rungs, *best, *last))
    if config.model:
        suite = with_model(suite, start.model)
    training = replace(training, stream=config.stream)  # for whose books every trial leaves cores
    ladder = Ladder(config, place, machines, manifest, training, config.memory_limit, suite, start)
    ladder.request(machines[0].name, 1, [], [])  # a baseline that cannot be run is refused before anything is made
    return ladder


def chosen(config: LadderConfig, start: TrainConfig) -> Suite:
    """The suite, reduced to the chosen rungs."""
    suite = find_suite(config.suite, start)
    if STREAMING in config.rungs and not config.stream:
        raise UserError(f"--rungs {STREAMING} needs books: name them with --stream.")
    if config.rungs:
        suite = choose(suite, [name for name in config.rungs if name != STREAMING])
    suite = replace(suite, seeds=config.seeds or suite.seeds)
    if suite.seeds > 1 and (config.steps is None or not config.cycle.val):
        raise UserError(
            f"held-out losses over {suite.seeds} seeds are compared after equal steps: give --steps, and a --cycle "
            "with validation batches; or --seeds 1 to compare none."
        )
    return suite


def introduce(ladder: Ladder, before: dict[str, Any] | str | None) -> None:
    """Print what will run; for a dry run, with the memory that is predicted, beside what the study says if asked for.

    Raises ``UserError`` where ``before``, what the ladder is to be compared with, is of another suite.
    """
    suite = ladder.suite
    if before == study.NAME and suite.name not in (known := ("a100", *study.EFFECTS)):
        raise UserError(f"--compare study is of the suites {', '.join(known)}, not of {suite.name}: give one of them.")
    if before == study.NAME and ladder.start.model.described:
        raise UserError("--compare study is of GPT-2: leave it out, or --model.")
    heading = f"[bold]{escape(suite.name)}[/bold]: {escape(suite.title)}; {len(suite.rungs)} rungs in"
    console.print(heading, escape(str(ladder.place)))
    if not ladder.config.dry_run:
        return
    fine = TrialRow(
        "", 1, "rung", 0, Candidate(1), 1, "ok", "", 0.0, node="", step_seconds=[1.0] * SHORTEST,
        tokens_per_second=1.0, low=1.0, high=1.0,
    )  # fmt: skip
    controls, rungs = Climb(ladder, lambda key: fine).to_the_end()  # as if every run went well
    lines: list[tuple[str, str, str]] = []
    for rung in (controls[0], *rungs):
        if rung.config:
            peak = known_peak(rung.config)
            lines.append((rung.name, rung.batch, f"{peak.total / GB:.2f}" if peak else "measured"))
        else:
            console.print(f"{rung.name}: not run, {rung.reason}.", markup=False)
    Part("", ("rung", "batch", "predicted GB"), lines).show()
    if before == study.NAME and suite.name in study.EFFECTS:
        Report([], [study.effects(suite.name, []), study.SAID[suite.name]]).show()
    elif before == study.NAME:
        Report([], [study.memory({}), study.MEMORY, study.rooflines(), study.ROOFLINES]).show()
    console.print("nothing was run")
