"""How good is the search for settings that learn fast? Searches, replayed on a grid that was really trained.

``compare.py`` runs it. A competitor trains trials of the grid's cells up to rungs, sees their decayed losses, and is
charged the seconds of the final run that this takes. Its choice is judged by the losses of all seeds.
"""

import math
import random
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, combinations
from types import SimpleNamespace
from typing import Any

from rich.table import Table

from infra.schema import strict
from tune.learning.law import LearningLaw, seed_scatter
from tune.trial.learning import LEARNED_FRACTION

BUDGET = 0.25
"""Cost at which a competitor begins no further trial, as a fraction of the grid's."""
GOAL_TIME = 1.05
"""Mean time to the grid's best loss that a search must reach, as a ratio to the time of the grid's best cell."""
MAX_TIME_RATIO = 4.0
"""Time after which a cell counts as reaching a loss at the latest, as a ratio to the full time."""


@strict
@dataclass(frozen=True)
class Cell:
    """Settings of the grid's runs."""

    learning_rate: float
    global_batch: int
    optimizer: str


@strict
@dataclass(frozen=True)
class Run:
    """A recorded trunk of a cell with the decay branches of all rungs."""

    cell: Cell
    seed: int
    losses: list[tuple[int, float]]
    """Tokens and held-out loss at the end of each branch, by rung. A run that diverged has fewer."""


@strict
@dataclass(frozen=True)
class Speed:
    """Speed of the final run of a global batch and an optimizer."""

    global_batch: int
    optimizer: str
    seconds_per_token: float


@strict
@dataclass(frozen=True)
class Grid:
    """A recorded grid, the JSON format of ``records/learning-grid.json``. Every cell has the same rungs in tokens."""

    rungs: list[float]
    """Rungs as fractions of the full run, each twice the one before; the last one is 1."""
    trunk_fraction: float
    """Fraction of a run before its decay branch."""
    entropy: float
    """Entropy of the frequencies of the held-out tokens, in nats."""
    speeds: list[Speed]
    runs: list[Run]
    planned_runs: int = 0
    """Number of runs of the whole grid."""
    data: str = ""
    """Fingerprint of the tokens."""
    provenance: dict[str, str] = field(default_factory=dict)
    """Versions and machine of the newest run."""
    speeds_provenance: dict[str, str] = field(default_factory=dict)
    """Versions and machine of the speeds; empty if they have not been measured and are assumed to be equal."""

    @property
    def is_partial(self) -> bool:
        """Whether runs are missing."""
        return len(self.runs) < self.planned_runs

    def complete_part(self) -> "Grid":
        """Return the largest part of the grid in which every cell has every seed, without runs if there is none.

        It has all learning rates of some global batches, optimizers and seeds.
        """
        done = {(run.cell, run.seed) for run in self.runs}
        rates = {cell.learning_rate for cell, _ in done}
        groups = {(speed.global_batch, speed.optimizer) for speed in self.speeds}
        parts: list[set[tuple[Cell, int]]] = [set()]
        for optimizers in _subsets({optimizer for _, optimizer in groups}):
            for seeds in _subsets({seed for _, seed in done}):
                rows = [
                    {(Cell(rate, batch, name), seed) for rate in rates for name in optimizers for seed in seeds}
                    for batch in {batch for batch, _ in groups}
                ]
                parts.append(set().union(*(row for row in rows if row <= done)))
        part = max(parts, key=len)
        return replace(self, runs=[run for run in self.runs if (run.cell, run.seed) in part])

    @cached_property
    def curves(self) -> dict[Cell, dict[int, list[tuple[float, float]]]]:
        """Seconds and loss at the rungs of each cell and seed."""
        pace = {(speed.global_batch, speed.optimizer): speed.seconds_per_token for speed in self.speeds}
        curves: dict[Cell, dict[int, list[tuple[float, float]]]] = {}
        for run in self.runs:
            seconds = pace[run.cell.global_batch, run.cell.optimizer]
            curves.setdefault(run.cell, {})[run.seed] = [(seconds * tokens, loss) for tokens, loss in run.losses]
        return curves

    @property
    def cells(self) -> list[Cell]:
        """Cells of the grid."""
        return list(self.curves)

    @property
    def seeds(self) -> list[int]:
        """Seeds that all cells have."""
        return sorted(set.intersection(*(set(seeds) for seeds in self.curves.values())))

    def cost(self, durations: Sequence[int]) -> float:
        """Return the seconds of training every cell once for ``durations``, which are rungs."""
        fractions = [self.rungs[rung] for rung in durations]
        branches = (1 - self.trunk_fraction) * sum(fractions)
        return len(self.cells) * self.full_seconds * (self.trunk_fraction * max(fractions) + branches)

    @cached_property
    def full_seconds(self) -> float:
        """Time of the full run, for which all cells have been trained: that of the fastest one."""
        return min(curve[-1][0] for seeds in self.curves.values() for curve in seeds.values() if self._is_full(curve))

    def _is_full(self, curve: Sequence[object]) -> bool:
        return len(curve) == len(self.rungs)

    def loss(self, cell: Cell, seed: int, rung: int) -> float:
        """Return the loss of a run at a rung of the full time, interpolated; infinite once it has diverged."""
        curve = self.curves[cell][seed]
        if not self._is_full(curve) and rung >= len(curve):
            return math.inf
        return _interpolate(curve, self.rungs[rung] * self.full_seconds)

    def mean_loss(self, cell: Cell, rung: int) -> float:
        """Return the mean loss of a cell over its seeds."""
        return statistics.fmean(self.loss(cell, seed, rung) for seed in self.curves[cell])

    def seconds_to(self, cell: Cell, loss: float) -> float:
        """Return the time at which the mean loss of a cell's seeds is ``loss``."""
        maximum = MAX_TIME_RATIO * self.full_seconds
        curves = list(self.curves[cell].values())
        if not all(map(self._is_full, curves)):
            return maximum
        mean = [(points[0][0], statistics.fmean(loss for _, loss in points)) for points in zip(*curves, strict=True)]
        index = next((n for n, point in enumerate(mean) if n and point[1] <= loss), len(mean) - 1)
        (start, above), (end, below) = mean[index - 1], mean[index]
        if below >= above:
            return maximum
        return min(maximum, start * (end / start) ** ((above - loss) / (above - below)))


def _subsets(values: Collection[Any]) -> Iterator[tuple[Any, ...]]:
    """Return all subsets of ``values`` that are not empty."""
    return chain.from_iterable(combinations(values, size) for size in range(1, len(values) + 1))


def _interpolate(curve: Sequence[tuple[float, float]], seconds: float) -> float:
    """Return the loss at ``seconds``, linear in the logarithm of time, also beyond the ends."""
    if len(curve) < 2:
        return curve[0][1]
    index = next((n for n in range(1, len(curve)) if curve[n][0] >= seconds), len(curve) - 1)
    (start, first), (end, last) = curve[index - 1], curve[index]
    return first + (last - first) * math.log(seconds / start) / math.log(end / start)


@dataclass
class Session:
    """A search on the grid. It trains with the data's ``seed`` unless another one is given."""

    grid: Grid
    durations: Sequence[int]
    """Rungs for which a cell is wanted; the last one is the full run."""
    seed: int
    seconds: float = 0.0
    """Seconds of training so far."""
    losses: dict[tuple[Cell, int], dict[int, float]] = field(default_factory=dict)
    """Losses so far by cell, seed and rung."""

    def train(self, cell: Cell, rung: int, seed: int | None = None) -> float:
        """Train the trial of a cell to a rung, from where its trunk is, and return its loss. What exists is free."""
        seed = self.seed if seed is None else seed
        losses = self.losses.setdefault((cell, seed), {})
        if rung not in losses:
            trunk = max((self.grid.rungs[known] for known in losses), default=0.0)
            end, fraction = self.grid.rungs[rung], self.grid.trunk_fraction
            self.seconds += self.grid.full_seconds * (fraction * max(0.0, end - trunk) + (1 - fraction) * end)
            losses[rung] = self.grid.loss(cell, seed, rung)
        return losses[rung]

    @property
    def has_budget(self) -> bool:
        """Whether another trial may begin."""
        return self.seconds < BUDGET * self.grid.cost(self.durations)

    def best_cells(self) -> dict[int, Cell]:
        """Return the cell with the lowest loss at each duration, or at the longest rung before it that was trained."""
        best: dict[int, Cell] = {}
        for duration in self.durations:
            trained = {rung for losses in self.losses.values() for rung in losses if rung <= duration}
            rung = max(trained)
            trials = {cell: losses[rung] for (cell, _), losses in self.losses.items() if rung in losses}
            best[duration] = min(trials, key=lambda cell: trials[cell])
        return best


Competitor = Callable[[Session, random.Random], Mapping[int, Cell]]
"""A search: trains in the session, and returns a cell for each duration."""


def whole_grid(session: Session, draw: random.Random) -> Mapping[int, Cell]:
    """Train every cell for all durations."""
    for cell in session.grid.cells:
        for rung in session.durations:
            session.train(cell, rung)
    return session.best_cells()


def random_search(session: Session, draw: random.Random) -> Mapping[int, Cell]:
    """Train random cells for all durations."""
    for cell in _shuffled(session.grid.cells, draw):
        if not session.has_budget:
            break
        for rung in session.durations:
            session.train(cell, rung)
    return session.best_cells()


def ray_asha(session: Session, draw: random.Random) -> Mapping[int, Cell]:
    """Train random cells, one at a time, until Ray Tune's ASHA stops them; its time is in first rungs."""
    from ray.tune.schedulers import AsyncHyperBandScheduler, TrialScheduler

    rungs, controller = session.grid.rungs, SimpleNamespace()
    scheduler: Any = AsyncHyperBandScheduler("time", "loss", "min", max_t=round(rungs[-1] / rungs[0]), grace_period=1)
    for number, cell in enumerate(_shuffled(session.grid.cells, draw)):
        if not session.has_budget:
            break
        trial = SimpleNamespace(trial_id=str(number))
        scheduler.on_trial_add(controller, trial)
        for rung in range(len(rungs)):
            result = {"time": round(rungs[rung] / rungs[0]), "loss": session.train(cell, rung)}
            if scheduler.on_trial_result(controller, trial, result) == TrialScheduler.STOP:
                break
        scheduler.on_trial_remove(controller, trial)
    return session.best_cells()


def optuna_tpe(session: Session, draw: random.Random, *, pruner: str) -> Mapping[int, Cell]:
    """Train the cells that Optuna's TPE proposes, until a pruner of Optuna stops them."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    grid = session.grid
    axes = {name: sorted({getattr(cell, name) for cell in grid.cells}) for name in vars(grid.cells[0])}
    sampler = optuna.samplers.TPESampler(seed=draw.randrange(2**32))
    study = optuna.create_study(sampler=sampler, pruner=getattr(optuna.pruners, pruner)())
    for _ in range(4 * len(grid.cells)):  # A cell that is proposed again costs nothing.
        if not session.has_budget:
            break
        trial = study.ask()
        cell = Cell(**{name: values[trial.suggest_int(name, 0, len(values) - 1)] for name, values in axes.items()})
        if cell not in grid.curves:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
            continue
        for rung, fraction in enumerate(grid.rungs):
            trial.report(session.train(cell, rung), round(fraction / grid.rungs[0]))
            if trial.should_prune():
                study.tell(trial, state=optuna.trial.TrialState.PRUNED)
                break
        else:
            study.tell(trial, session.train(cell, len(grid.rungs) - 1))
    return session.best_cells()


def _shuffled(cells: Sequence[Cell], draw: random.Random) -> list[Cell]:
    return draw.sample(cells, k=len(cells))


COMPETITORS: dict[str, Competitor] = {
    "grid": whole_grid,
    "random": random_search,
    "ASHA (Ray Tune)": ray_asha,
    "TPE, median": lambda session, draw: optuna_tpe(session, draw, pruner="MedianPruner"),
    "TPE, halving": lambda session, draw: optuna_tpe(session, draw, pruner="SuccessiveHalvingPruner"),
}


@strict
@dataclass(frozen=True)
class Score:
    """The choice of a competitor for one duration, judged by the losses of all seeds."""

    competitor: str
    seed: int
    duration: float
    """Duration as a fraction of the full run."""
    cell: Cell
    time_ratio: float
    """Time to the loss of the grid's best cell at the duration, as a ratio to the duration."""
    excess_loss: float
    """Loss at the duration minus that of the grid's best cell."""
    cost: float
    """Cost of the search for all durations as a fraction of the grid's."""


def scores(grid: Grid, name: str, competitor: Competitor, durations: Sequence[int], repeat: int) -> list[Score]:
    """Run a competitor once and judge its choices."""
    session = Session(grid, durations, grid.seeds[repeat % len(grid.seeds)])
    chosen = competitor(session, random.Random(repeat))
    judged: list[Score] = []
    for rung in durations:
        best = min(grid.mean_loss(cell, rung) for cell in grid.cells)
        ratio = grid.seconds_to(chosen[rung], best) / (grid.rungs[rung] * grid.full_seconds)
        excess, cost = grid.mean_loss(chosen[rung], rung) - best, session.seconds / grid.cost(durations)
        judged.append(Score(name, repeat, grid.rungs[rung], chosen[rung], ratio, excess, cost))
    return judged


def summary_table(title: str, judged: Iterable[Score]) -> Table:
    """Build the table of means by competitor and duration."""
    groups: dict[tuple[str, float], list[Score]] = {}
    for score in judged:
        groups.setdefault((score.competitor, score.duration), []).append(score)
    columns = ("search", "run", "mean time", "largest", "excess nats", "cost", "best")
    table = Table(*columns, title=title, caption="time to the loss of the grid's best cell; how often it is chosen")
    for (name, duration), of_group in groups.items():
        ratios = [score.time_ratio for score in of_group]
        excess, cost = (
            statistics.fmean(getattr(score, part) for score in of_group) for part in ("excess_loss", "cost")
        )
        hits = sum(score.excess_loss == 0 for score in of_group) / len(of_group)
        cells = [
            f"x{statistics.fmean(ratios):.3f}",
            f"x{max(ratios):.2f}",
            f"{excess:.4f}",
            f"{cost:.1%}",
            f"{hits:.0%}",
        ]
        table.add_row(name, f"{duration:g}", *cells)
    return table


@strict
@dataclass(frozen=True)
class Extrapolation:
    """Predictions of the loss at the full time from a quarter of it, one for each cell."""

    held: float
    """Fraction of cells whose mean loss over the seeds is in the interval."""
    median_width: float
    """Median width of the intervals in nats."""
    median_error: float
    """Median distance of the prediction from the mean loss in nats."""


def extrapolate(grid: Grid, seeds: Sequence[int]) -> Extrapolation:
    """Predict each cell from the rungs of ``seeds`` up to a quarter of the full time; diverged cells are left out.

    Rungs at which a model has not learned more than the frequencies of tokens are left out, as a search does.
    """
    last = len(grid.rungs) - 1
    losses = {cell: grid.mean_loss(cell, last) for cell in grid.cells}
    times = [rung * grid.full_seconds for rung in grid.rungs[:-2]]
    learned = LEARNED_FRACTION * grid.entropy
    curves = {
        cell: {
            seed: [(time, loss) for rung, time in enumerate(times) if (loss := grid.loss(cell, seed, rung)) < learned]
            for seed in seeds
        }
        for cell, full_loss in losses.items()
        if math.isfinite(full_loss)
    }
    scatter = seed_scatter(curves.values())
    predicted = {cell: LearningLaw(of_cell, scatter).loss(grid.full_seconds) for cell, of_cell in curves.items()}
    pairs = [(estimate, losses[cell]) for cell, estimate in predicted.items() if estimate]
    return Extrapolation(
        held=statistics.fmean(estimate.low <= loss <= estimate.high for estimate, loss in pairs),
        median_width=statistics.median(estimate.high - estimate.low for estimate, _ in pairs),
        median_error=statistics.median(abs(estimate.middle - loss) for estimate, loss in pairs),
    )


def is_goal_met(judged: Sequence[Score]) -> bool:
    """Whether the mean time ratio at the full duration and the cost are within the goal."""
    full = [score for score in judged if score.duration == 1]
    times, costs = [score.time_ratio for score in full], [score.cost for score in full]
    return statistics.fmean(times) <= GOAL_TIME and statistics.fmean(costs) <= BUDGET
