"""Entry: ``python -m train.ladder`` measures what each change of a suite gains, against a control that is repeated.

In: a suite, token shards, and a budget per rung. Out: ``OUT/NAME/``, a folder or in object storage, with a folder per
run, ``ladder.json``, ``summary.md`` and two charts; in MLflow a parent run with a child per run. Wiring only.
"""

import math
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rich.markup import escape

from infra import command
from infra.cluster import connected, refuse_unshared
from infra.command import INTERRUPTED
from infra.console import console
from infra.errors import UserError
from infra.hardware import DeviceFacts, device_facts
from infra.options import Address, JoinsRay, TrackingUri
from infra.place import Place, WorkingCopy
from infra.progress import IMPORTING, doing
from infra.schema import from_json, strict, to_json
from infra.tracking.key import RunKey
from infra.units import BytesOrNone, SecondsOrNone
from pipeline.shards import MANIFEST
from train.checkpoint.run_folder import new_place, resume_command
from train.config import Cycle, CycleText, Device, TrainConfig, load_config
from train.ladder.folder import begin, damaged, kept, opened
from train.ladder.suites import (
    STREAMING,
    Suite,
    choose,
    find_suite,
    searched,
    short_form,
    streamed,
    without_model,
)
from train.model_config import ModelOrNone
from train.resolve import resolve

CYCLE = Cycle()
TIME_BUDGET, WITHIN = 300.0, 0.005
"""Most seconds per rung, and the precision of its speed at which it ends earlier, unless --steps is given."""

FITTED = 40 * 10**9
"""Memory limit of --fit, in bytes, unless --memory-limit is given."""


@strict
@dataclass(frozen=True)
class LadderOptions(JoinsRay):
    """A suite, and how long each of its rungs runs."""

    suite: str = "a100"
    """Name of a suite, or a Python file with SUITE = [Rung(...), ...].

    a100: a published study of GPT-2 124M, from the textbook loop upwards
    loop: what each habit of a training loop costs, on a small model
    memory: what saves memory, and what it costs in speed
    kernels: how torch.compile chooses and launches kernels
    accumulation: four micro-batches per step, from eager to max-autotune
    loader: threads that read batches ahead
    precision: what fewer bits cost in held-out loss
    sizes: sizes that fill a GPU's tiles and waves, and sizes that do not
    aa: the same run ten times, to see how often the verdict is a false alarm"""
    rungs: tuple[str, ...] = ()
    """Only these rungs of the suite, by name; default all. In a suite whose rungs keep those before them, what is left
    out is not kept either."""
    data: str = "data/tokens"
    """Token shards, made by python -m pipeline.tokenize: a folder, or s3://bucket/folder, gs://bucket/folder."""
    model: ModelOrNone = None
    """Model instead of the suite's: a preset, with changes if any."""
    steps: int | None = None
    """Optimizer steps per rung, at least 8."""
    time_budget: SecondsOrNone = None
    """Time per rung, above 0, from its first step on. Default: 5m, unless --steps is given."""
    within: float | None = None
    """End a rung early, at the end of a cycle, once its speed is known to this fraction, below 1; 0 never does.
    Default: 0.005, half a percent; 0 with --steps, which are for comparing losses."""
    cycle: CycleText = CYCLE
    """Training steps, at least 1, then validation batches, between two reports."""
    fit: bool = False
    """Give every rung the largest batch predicted to fit --memory-limit instead of the suite's."""
    memory_limit: BytesOrNone = None
    """Most memory that the process of a rung may use; a rung that uses more fails. 40GB if only --fit is given."""
    device: Device = "auto"
    """Device to train on; auto is a CUDA GPU if there is one, else the CPU."""
    accelerator: str | None = None
    """Type of GPU that rungs need, by Ray's name for it: A100, H200. On a cluster without one, it is waited for."""
    seed: int = 0
    """Seed of every rung; at least 0."""
    seeds: int | None = None
    """Seeds, at least 1, with which rungs of another precision or other numerics are run, to compare their held-out
    losses with those of the rung before at equal steps. Default: 3 in the suite precision; 1, which compares none, in
    others."""
    name: str | None = None
    """Name of the ladder and its folder; made from the suite and the time when left out."""
    out: str = "runs"
    """Folder that holds runs and ladders, or s3://bucket/folder, gs://bucket/folder."""
    resume: str | None = None
    """Continue an earlier ladder, by name, with its settings: finished rungs are kept."""
    best: Path | None = None
    """best.json of a search, whose batch and execution settings become a last rung."""
    stream: tuple[str, ...] = ()
    """Books, as any source of python -m pipeline.tokenize: a last rung, called streaming, trains straight from them
    instead of from --data."""
    compare: str | None = None
    """Compare with this ladder, by name or folder; or with the published figures that the suite a100 repeats: study."""
    tracking_uri: TrackingUri = None
    address: Address = None

    def __post_init__(self) -> None:
        if self.resume == "":
            raise UserError("--resume is empty: name a ladder.")
        if self.steps is not None and self.time_budget is not None:
            raise UserError("--steps and --time-budget both end a rung; give one of them.")
        if self.steps is not None and self.steps < 8:
            raise UserError(f"--steps {self.steps} is too few to leave warm-up: a rung needs 8 or more.")
        if self.seeds is not None and self.seeds < 1:
            raise UserError(f"--seeds {self.seeds} must be at least 1.")
        if self.time_budget is not None and not (self.time_budget > 0 and math.isfinite(self.time_budget)):
            raise UserError(f"--time-budget {self.time_budget}s must be above 0.")


def main() -> None:
    """Parse, run the rungs, print the table, exit."""
    command.run(
        run,
        LadderOptions,
        module="train.ladder",
        description="Measure what each optimisation of a suite gains on this machine.",
        default=LadderOptions(),
    )


def run(options: LadderOptions) -> int:
    """Run a ladder from its options; returns the exit code."""
    with doing(IMPORTING):
        from infra import provenance
        from infra.tracking.store import create_run, open_store
        from infra.tracking.tracker import Tracker
        from infra.tracking.views import ui_link
        from pipeline.shards import read_manifest
        from pipeline.stream import Stream, whole_path
        from train.data.source import estimate
        from train.data.text import refuse_foreign_ids
        from train.ladder import report
        from train.ladder.published import NAME
        from train.ladder.runner import Ladder, has_begun
        from train.launch.there import ControllerDied

    before = report.load(options.compare, options.out) if options.compare else None
    with ExitStack() as stack:
        if options.resume:
            place = Place.of(options.out) / options.resume
            copy = stack.enter_context(opened(place, fresh=False))
            options, key = continued(options, copy)
        else:
            options = with_ends(options)
            name = options.name or f"{Path(options.suite).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
            place, copy, key = new_place(options.out, name), None, None
        options = replace(options, stream=tuple(map(whole_path, options.stream)))
        start = starting(options)
        if options.cluster:
            from train.launch.placement import worker_facts

            stack.enter_context(connected(options.address))
            if not place.remote:
                refuse_unshared("--out", place.folder.parent)
            facts = worker_facts(start)
        else:
            facts = device_facts()
        suite = chosen(options, start, facts)
        if before == NAME and suite.name != "a100":
            raise UserError(f"--compare study is of the suite a100, not of {suite.name}: give --suite a100.")
        manifest = read_manifest(options.data)
        if options.stream:
            books = estimate(Stream(options.stream, start.seed, start.reading))
            refuse_foreign_ids(start, books)  # now, and not after the other rungs
        if copy is None or key is None:
            tags = provenance.collect() | {"kind": "ladder", "suite": suite.name}
            with doing("opening MLflow's store"):
                open_store(options.tracking_uri)
            copy = stack.enter_context(opened(place, fresh=True))
            key = create_run(
                "ladder", place.name, tracking_uri=options.tracking_uri, home=place.address, tags=tags,
                keep=partial(begin, copy, saved(options)),
            )  # fmt: skip
        ladder = Ladder(
            copy, key, suite, start, manifest, facts, options.address, options.memory_limit, options.fit, console.print
        )
        heading = f"[bold]{escape(suite.name)}[/bold]: {escape(suite.title)}; {len(suite.rungs)} rungs in"
        console.print(heading, escape(str(place)))
        try:
            with Tracker(key) as tracker:
                splits = manifest.splits
                tracker.data(Place.of(options.data).name, manifest.fingerprint, options.data, splits, "training")
                controls, rungs = ladder.run()
                report.publish(ladder, controls, rungs, tracker, before)
        except KeyboardInterrupt:
            console.print(f"continue with: {resume_command('train.ladder', place)}", markup=False)
            return INTERRUPTED
        except UserError as refused:
            if not (options.resume or has_begun(copy.folder) or isinstance(refused, ControllerDied)):
                copy.discard()  # its name is free for the corrected command
            raise
    console.print(ui_link(key, children=True), markup=False)
    return 0


def with_ends(options: LadderOptions) -> LadderOptions:
    """``options`` with the defaults of what ends a rung, and of the memory limit that --fit needs."""
    if options.fit and options.memory_limit is None:
        options = replace(options, memory_limit=FITTED)
    if options.steps is not None:
        return options
    within = WITHIN if options.within is None else options.within
    return replace(options, time_budget=options.time_budget or TIME_BUDGET, within=within)


def starting(options: LadderOptions) -> TrainConfig:
    """The config that the suite's baseline is derived from."""
    return TrainConfig(
        data=Place.of(options.data).address,
        model=options.model or TrainConfig.model,
        seed=options.seed,
        device=options.device,
        accelerator=options.accelerator,
        cycle=options.cycle,
        keep_checkpoints=0,
        within=options.within or None,
        steps=options.steps,
        time_budget=None if options.steps is not None else options.time_budget or TIME_BUDGET,
    )


def chosen(options: LadderOptions, config: TrainConfig, facts: DeviceFacts) -> Suite:
    """The suite, reduced to the chosen rungs and on a CPU to its short form."""
    suite = find_suite(options.suite, config)
    if STREAMING in options.rungs and not options.stream:
        raise UserError(f"--rungs {STREAMING} needs books: name them with --stream.")
    if options.rungs:
        suite = choose(suite, [name for name in options.rungs if name != STREAMING])
    suite = replace(suite, seeds=options.seeds or suite.seeds)
    if suite.seeds > 1 and (options.steps is None or not options.cycle.val):
        raise UserError(
            f"held-out losses over {suite.seeds} seeds are compared after equal steps: give --steps, and a --cycle "
            "with validation batches; or --seeds 1 to compare none."
        )
    if resolve(config, facts).device == "cpu":
        suite = short_form(suite)
        console.print("[yellow]No GPU is used: the suite runs in its short form, batches an eighth the size"
                      + ("" if options.model else " and the model tiny") + ".[/yellow]")  # fmt: skip
    if options.best:
        suite = replace(suite, rungs=(*suite.rungs, searched(load_config(options.best, "--best"))))
    if options.stream:
        suite = replace(suite, rungs=(*suite.rungs, streamed(options.stream)))
    if options.model:
        suite = without_model(suite)
    return suite


def saved(options: LadderOptions) -> dict[str, object]:
    """The options that a resumed ladder needs, as JSON values."""
    whole = replace(
        options,
        suite=str(Path(options.suite).resolve()) if Path(options.suite).suffix else options.suite,
        data=Place.of(options.data).address,
        best=options.best and options.best.resolve(),
    )
    own = ("name", "out", "resume", "compare", "tracking_uri", "address")
    return {name: value for name, value in to_json(whole).items() if name not in own}


def continued(options: LadderOptions, copy: WorkingCopy) -> tuple[LadderOptions, RunKey]:
    """The options that the ladder of ``copy`` was begun with, and its run in MLflow. Raises ``UserError``."""
    from infra.tracking.store import reopen_run

    place, found = copy.place, kept(copy)
    try:
        values = {name: found["options"][name] for name in saved(options)}
        options = from_json(LadderOptions, to_json(options) | values, "its options")
    except (ValueError, KeyError) as damage:
        raise damaged(copy, damage) from damage
    key = found["key"].valid_in(place, "begin a new ladder")
    if not Place.of(options.data).exists(MANIFEST):
        raise UserError(f"the data of {place} is not in {options.data}: restore it, or begin a new ladder.")
    reopen_run(key)
    return options, key


if __name__ == "__main__":
    main()
