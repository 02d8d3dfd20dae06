"""Train the grid on which ``replay.py`` compares searches, in parts: the same command continues.

    python tests/benchmarks/learning/record.py --books FOLDER --data FOLDER --record FILE.json [--jobs 2] [--minutes 60]

A part is a cell with one seed: a trunk of 1,024 windows of 512 tokens with decay branches at six rungs, on one thread.
The middle of the grid comes first, all with the first seed, so that an unfinished grid can be replayed, too.
``--speeds`` measures the seconds per token of each global batch and optimizer instead, on a quiet machine.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import replace
from itertools import islice
from pathlib import Path

from replay import Cell, Grid, Run, Speed

from infra.cli.console import console
from infra.device import provenance
from infra.errors import UserError
from infra.schema import from_json, to_json
from infra.storage.directory import StorageDir
from infra.storage.files import write_json
from pipeline.shards import read_manifest
from train.config import Cycle, ResolvedConfig, TrainConfig
from train.model_config import parse_model
from train.resolved import resolve_local
from tune.space import Candidate
from tune.trial.learning import TRUNK_FRACTION, learn, make_rungs
from tune.trial.row import Proposal
from tune.trial.run import StopRule, TrialRequest, run

RATES, BATCHES, OPTIMIZERS, SEEDS = (1e-3, 5e-4, 2.5e-4, 2e-3), (4, 2, 8, 1), ("adamw-fused", "muon"), (0, 1, 2)
"""Values of the grid, those of its middle first."""
MODEL, VOCAB_SIZE = "edu-3m", 512
PRECISION = "bf16"
"""As on a GPU, and a third faster than fp32 on a CPU with bf16 instructions."""
WINDOWS, VAL_WINDOWS = 1024, 128
"""Number of windows of a full run, and of held-out windows on which each branch is validated."""
RUNGS = [2.0**-n for n in range(5, -1, -1)]
WARMUP_FRACTION = 0.5
"""Warm-up as a fraction of the shortest trunk."""
UNMEASURED_SECONDS_PER_TOKEN = 5e-4
"""Seconds per token of all cells before they are measured."""
SPEED_ROUNDS, SPEED_WINDOWS = 3, 64
"""Number of runs that measure a speed, and number of windows of each."""


def main() -> int:
    """Record what is missing, within the time."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--books", type=Path, required=True, help="folder of books; read if --data does not exist")
    options.add_argument("--data", type=Path, required=True, help="tokens of the books, created if missing")
    options.add_argument("--record", type=Path, required=True, help="JSON file that grows")
    options.add_argument("--jobs", type=int, default=1, help="number of parts at a time, one thread each")
    options.add_argument("--minutes", type=float, default=1e6, help="time after which no further part begins")
    options.add_argument("--speeds", action="store_true", help="measure the seconds per token instead")
    chosen = options.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        grid = open_grid(chosen.record, prepare_data(chosen.books, chosen.data))
    except UserError as mistake:
        console.print(str(mistake))
        return 2
    if chosen.speeds:
        speeds = measure_speeds(chosen.data)
        write_json(chosen.record, to_json(replace(grid, speeds=speeds, speeds_provenance=collect())))
        return 0
    for run_of_cell, entropy in train_parts(chosen.data, pending_parts(grid), chosen.jobs, chosen.minutes):
        grid = add_run(grid, run_of_cell, entropy)
        write_json(chosen.record, to_json(grid))
        console.print(f"{len(grid.runs)} of {grid.planned_runs}: {run_of_cell.cell} seed {run_of_cell.seed}")
    console.print("The grid is partial. Run the command again." if grid.is_partial else "The grid is complete.")
    return 0


def prepare_data(books: Path, data: Path) -> str:
    """Create the tokens of ``books`` if ``data`` has none, and return their fingerprint."""
    if not (data / "manifest.json").exists():
        with tempfile.TemporaryDirectory() as folder:
            tokenizer = f"{folder}/tokenizer.json"
            for words in (
                ["pipeline.vocabulary", str(books), "--size", str(VOCAB_SIZE), "--out", tokenizer],
                ["pipeline.tokenize", str(books), "--tokenizer", tokenizer, "--out", str(data)],
            ):
                subprocess.run([sys.executable, "-m", *words], check=True)
    return read_manifest(data).fingerprint


def open_grid(record: Path, data: str) -> Grid:
    """Read the grid so far, or begin one on the data with the fingerprint ``data``."""
    if record.exists():
        grid = from_json(Grid, json.loads(record.read_text(encoding="utf-8")), record)
        if grid.data != data:
            raise UserError(f"{record} was recorded with the data {grid.data}, not {data}. Use its --books and --data.")
        return grid
    speeds = [Speed(batch, name, UNMEASURED_SECONDS_PER_TOKEN) for batch in BATCHES for name in OPTIMIZERS]
    planned = len(RATES) * len(BATCHES) * len(OPTIMIZERS) * len(SEEDS)
    return Grid(RUNGS, TRUNK_FRACTION["wsd"], 0.0, speeds, [], planned_runs=planned, data=data)


def add_run(grid: Grid, run_of_cell: Run, entropy: float) -> Grid:
    """Return ``grid`` with another run and the entropy of the held-out tokens, 0 from one that diverged at once."""
    return replace(grid, runs=[*grid.runs, run_of_cell], entropy=entropy or grid.entropy, provenance=collect())


def collect() -> dict[str, str]:
    """Collect the versions and the machine, without the command, whose paths are those of this machine."""
    return {name: value for name, value in provenance.collect().items() if name != "command"}


def pending_parts(grid: Grid) -> list[tuple[Cell, int]]:
    """Return the cells and seeds that have no run yet, the most useful first."""
    done = {(each.cell, each.seed) for each in grid.runs}
    cells = [Cell(rate, batch, name) for name in OPTIMIZERS for batch in BATCHES for rate in RATES]
    return [(cell, seed) for seed in SEEDS for cell in cells if (cell, seed) not in done]


def train_parts(
    data: Path, parts: Iterable[tuple[Cell, int]], jobs: int, minutes: float
) -> Iterator[tuple[Run, float]]:
    """Train ``parts``, ``jobs`` at a time, and yield each run with the entropy of the held-out tokens."""
    until, remaining = time.monotonic() + 60 * minutes, iter(parts)
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
        running = {pool.submit(train_part, data, *part) for part in islice(remaining, jobs)}
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                if time.monotonic() < until and (part := next(remaining, None)):
                    running.add(pool.submit(train_part, data, *part))
                yield future.result()


def cell_config(data: Path, cell: Cell, seed: int) -> ResolvedConfig:
    """Return the full run of ``cell``."""
    config = resolve_local(
        TrainConfig.of(
            data=str(data), model=parse_model(MODEL), device="cpu", precision=PRECISION, schedule="wsd", seed=seed,
            micro_batch=cell.global_batch, warmup_steps=1, **vars(cell),
        )
    )  # fmt: skip
    steps = WINDOWS // cell.global_batch
    shortest_trunk = int(TRUNK_FRACTION["wsd"] * int(RUNGS[0] * steps))
    return config.replace(steps=steps, warmup_steps=max(1, int(WARMUP_FRACTION * shortest_trunk)))


def train_part(data: Path, cell: Cell, seed: int) -> tuple[Run, float]:
    """Train ``cell`` at all rungs, and return its run with the entropy of the held-out tokens.

    The time of the run is counted in tokens, so that all cells have the same rungs. A run that diverges has fewer.
    """
    config, losses, entropy = cell_config(data, cell, seed), [], 0.0
    tokens = WINDOWS * config.model.context_length
    rungs = make_rungs([tokens * rung for rung in RUNGS], 1.0, config)
    with tempfile.TemporaryDirectory() as folder:
        for learned in learn(config, rungs, VAL_WINDOWS // cell.global_batch, StorageDir.of(folder)):
            losses = [(rung.tokens, rung.loss) for rung in learned.losses]
            entropy = (learned.result and learned.result.unigram_loss) or entropy
    return Run(cell, seed, losses), entropy


def measure_speeds(data: Path) -> list[Speed]:
    """Measure the seconds per token of each global batch and optimizer, each in several fresh processes, in turns."""
    cells = [Cell(RATES[0], batch, name) for batch in BATCHES for name in OPTIMIZERS]
    seconds: dict[Cell, list[float]] = {cell: [] for cell in cells}
    for number in range(SPEED_ROUNDS):
        for cell in cells[:: -1 if number % 2 else 1]:
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                seconds[cell].append(process.submit(seconds_per_token, data, cell).result())
            console.print(f"{cell.global_batch} {cell.optimizer}: {seconds[cell][-1]:.2e} s/token")
    return [Speed(cell.global_batch, cell.optimizer, statistics.median(each)) for cell, each in seconds.items()]


def seconds_per_token(data: Path, cell: Cell) -> float:
    """Measure the seconds per token of ``cell`` in this process."""
    steps = max(8, SPEED_WINDOWS // cell.global_batch)
    config = cell_config(data, cell, 0).replace(steps=steps, cycle=Cycle(1, 0))
    proposal = Proposal(Candidate(cell.global_batch, ()), "speed")
    row, _ = run(TrialRequest("speed", 1, "speed", proposal, config, "", None, StopRule(600.0, 1e-9)))
    if not row.tokens_per_second:
        raise UserError(f"The speed of {cell} was not measured: {row.reason}")
    return 1 / row.tokens_per_second


if __name__ == "__main__":
    sys.exit(main())
