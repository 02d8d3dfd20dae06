"""How good is the search? Regret and seconds of ours against grid, Optuna, doubling and binary search.

Run: ``python tests/benchmarks/search/compare.py [--seeds 200]``, with Optuna where it is installed. It drives
the very strategies that Ray Tune drives, and the same stopping rule, over simulated GPUs and over a grid that
was really run (``machines.py``). Exit code 1 when the goal is missed anywhere.

Regret is how much slower the true speed of the returned configuration is than that of the best one that
fits. Seconds are the machine's, start-up included, as a share of the exhaustive grid's.
"""

import argparse
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from false_stops import rates
from machines import GPU_LIMIT, Machine, Replayed, Simulated
from rich.table import Table

from infra.cli.console import console
from infra.device.hardware import A100
from infra.storage.files import write_json
from train.config import TrainConfig
from train.model_config import PRESETS
from train.resolved import resolve
from tune.config import SearchConfig
from tune.space import Candidate, Space, make_space
from tune.strategy.base import ConfirmBest, Strategy
from tune.strategy.memory_aware import MemorySearcher
from tune.strategy.optuna_tpe import OptunaSearcher, optuna_trials
from tune.strategy.ranking import rank
from tune.trial.row import Proposal, TrialRow

GOAL_REGRET, GOAL_SHARE = 0.005, 0.30
PROBED_TO = 0.01
"""The deviation of a probe's memory, as a share of it."""
RECORDS = Path(__file__).parents[1] / "records"


@dataclass(frozen=True)
class Largest:
    """The largest size that runs with the control's knobs, by bisection or by halving after each failure.

    Halving from the largest is what accelerate's ``find_executable_batch_size`` does.
    """

    space: Space
    bisect: bool

    def propose(self, rows: Sequence[TrialRow]) -> Proposal | None:
        """The next size to try."""
        knobs = self.space.control.knobs
        sizes = self.space.micro_batches_for(knobs)
        good = [row.candidate.micro_batch for row in rows if row.outcome == "ok"]
        bad = [row.candidate.micro_batch for row in rows if row.outcome != "ok"]
        left = [s for s in sizes if s > max(good, default=0) and s < min(bad, default=10**9)]
        if not left or (good and not self.bisect):
            return None
        size = left[len(left) // 2] if self.bisect else left[-1]
        if not self.bisect and bad:
            size = max((s for s in left if s <= min(bad) // 2), default=left[0])
        return Proposal(Candidate(size, knobs), "probe")

    def remaining(self, rows: Sequence[TrialRow]) -> int:
        """Not used here."""
        return 0


def ours(machine: Machine) -> Strategy:
    """The search as the command makes it."""
    memory = MemorySearcher(machine.space, machine.prior, machine.limit)
    return ConfirmBest(memory, machine.space, SearchConfig().confirm_rounds)


def probed(machine: Machine) -> Strategy:
    """Ours for a model whose memory no formula knows: it is on the line between two small probes of the control.

    They measure to a hundredth, and each costs a trial's start and first step; the real ones share a process
    (train/loop/probe.py) and take four micro-batches.
    """
    space, noise = machine.space, random.Random(machine.seed)
    first = space.micro_batches_for(space.control.knobs)[0]
    sizes = (first, next(size for size in space.micro_batches_for(space.control.knobs) if size >= 3 * first))
    peaks: list[float] = []
    for number, size in enumerate(sizes):
        row = machine.run(Proposal(Candidate(size, space.control.knobs), "probe"), number, race=False)
        machine.seconds -= sum(row.step_seconds[1:])
        peaks.append((row.memory or 0) * noise.gauss(1.0, PROBED_TO))
    slope = (peaks[1] - peaks[0]) / (sizes[1] - sizes[0])

    def prior(candidate: Candidate) -> float:  # with other knobs, too, as the command does
        return peaks[0] + slope * (candidate.micro_batch - first)

    memory = MemorySearcher(space, prior, machine.limit)
    return ConfirmBest(memory, space, SearchConfig().confirm_rounds)


SEARCHES: dict[str, Callable[[Machine], Strategy]] = {
    "ours": ours,
    "ours, probed": probed,
    "doubling": lambda machine: Largest(machine.space, bisect=False),
    "binary": lambda machine: Largest(machine.space, bisect=True),
    "optuna": lambda machine: OptunaSearcher(machine.space, optuna_trials(machine.space), machine.seed),
}


def drive(strategy: Strategy, machine: Machine, *, race: bool) -> list[TrialRow]:
    """Run a strategy to its end."""
    rows: list[TrialRow] = []
    while (proposal := strategy.propose(rows)) is not None:
        rows.append(machine.run(proposal, len(rows) + 1, race=race))
    return rows


@dataclass(frozen=True)
class Score:
    """One search: regret as a fraction, seconds, trials, whether what it returned fits."""

    regret: float
    seconds: float
    trials: int
    fits: bool


def scored(machine: str, name: str, seed: int) -> Score:
    """One search by names, in a process of its own."""
    return score(name, machines()[machine](seed))


def score(name: str, machine: Machine) -> Score:
    """One search on ``machine``."""
    if name == "grid":  # what the strategy Grid does, without looking at all rows before each of its trials
        every = machine.space.candidates()
        rows = [machine.run(Proposal(c, "probe"), number, race=False) for number, c in enumerate(every, 1)]
    else:
        rows = drive(SEARCHES[name](machine), machine, race=name.startswith("ours"))
    if name in ("doubling", "binary"):
        chosen = max((row.candidate for row in rows if row.outcome == "ok"), key=lambda c: c.micro_batch)
    elif not rank(rows):
        return Score(1.0, machine.seconds, len(rows), fits=True)  # it found nothing
    else:
        chosen = rank(rows)[0].candidate
    best = max(machine.speed(c) for c in machine.space.candidates() if machine.fits(c))
    regret = 1 - machine.speed(chosen) / best
    return Score(regret, machine.seconds, len(rows), machine.memory(chosen) <= machine.limit)


TWO = ("compile=off,blocks,whole,max-autotune,reduce-overhead", "checkpointing=none,selective,full")
KNOBS = {
    "sizes alone": (),
    "two knobs": TWO,
    "four knobs": (*TWO, "loss_chunks=1,8", "optimizer=adamw-fused,adamw"),
    "two axes": (),
}
ACCUMULATIONS = {"two axes": (1, 2, 4, 8)}
FITTING = (0.5, 1.0)
"""Shares of the real grid's candidates that the limit lets run."""


def machines() -> dict[str, Callable[[int], Machine]]:
    """What to search on, by name: each makes the machine of a seed."""
    base = TrainConfig.of(
        model=PRESETS["gpt2-124m"], global_batch=480, micro_batch=16, compile="whole", attention="sdpa"
    )
    made: dict[str, Callable[[int], Machine]] = {}
    for name, knobs in KNOBS.items():
        space = make_space(resolve(base, A100), knobs, ACCUMULATIONS.get(name, ()))
        made[f"simulated, {name}"] = lambda seed, space=space: Simulated(space, seed, GPU_LIMIT)
    record = RECORDS / "real-grid.json"
    for fitting in FITTING if record.exists() else ():
        made[f"real CPU, {fitting:.0%} fit"] = lambda seed, fitting=fitting: Replayed(record, fitting, seed)
    return made


def summarise(machine: str, name: str, scores: Sequence[Score], grid_seconds: float) -> dict[str, Any]:
    """A line of the record."""
    return {
        "machine": machine,
        "search": name,
        "seeds": len(scores),
        "mean_regret": statistics.mean(s.regret for s in scores),
        "worst_regret": max(s.regret for s in scores),
        "seconds": statistics.mean(s.seconds for s in scores),
        "share_of_grid": statistics.mean(s.seconds for s in scores) / grid_seconds,
        "trials": statistics.mean(s.trials for s in scores),
        "over_the_limit": sum(not s.fits for s in scores),
    }


def compared(pool: Executor, machine: str, names: Sequence[str], seeds: Sequence[int]) -> list[dict[str, Any]]:
    """The lines of one machine, of which the grid's is the first: the others cost a share of its seconds."""
    lines: list[dict[str, Any]] = []
    for name in names:
        scores = list(pool.map(partial(scored, machine, name), seeds, chunksize=10))
        grid_seconds = lines[0]["seconds"] if lines else statistics.mean(s.seconds for s in scores)
        lines.append(summarise(machine, name, scores, grid_seconds))
    return lines


def main() -> int:
    """Run all searches on all machines, print the table, keep the record."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seeds", type=int, default=200)
    options.add_argument("--out", type=Path, help="write the figures to this JSON file")
    chosen = options.parse_args()
    names = ["grid", *(name for name in SEARCHES if name != "optuna" or find_spec("optuna"))]
    with ProcessPoolExecutor() as pool:
        record = [row for machine in machines() for row in compared(pool, machine, names, range(chosen.seeds))]
        wrong = rates(pool, 5 * chosen.seeds)
    table = Table("machine", "search", "mean regret", "worst", "seconds", "of the grid", "trials", "over the limit")
    for row in record:
        shown = [f"{row['mean_regret']:.2%}", f"{row['worst_regret']:.2%}", f"{row['seconds']:,.0f}"]
        shown += [f"{row['share_of_grid']:.1%}", f"{row['trials']:.1f}", str(row["over_the_limit"])]
        table.add_row(row["machine"], row["search"], *shown)
    console.print(table)
    said = ", ".join(f"{rate:.1%} at {correlation}" for correlation, rate in wrong.items())
    console.print(f"stopped although as fast as the bar, by the correlation of neighboring steps: {said}")
    if chosen.out:
        write_json(chosen.out, {"rows": record, "false_stops": wrong})
    goal = f"regret below {GOAL_REGRET:.1%} at under {GOAL_SHARE:.0%} of the grid's seconds, nothing over the limit"
    missed = any(
        row["mean_regret"] >= GOAL_REGRET or row["share_of_grid"] >= GOAL_SHARE or row["over_the_limit"]
        for row in record
        if row["search"] == "ours"
    )
    print(f"goal {'missed' if missed else 'met'}: {goal}")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
