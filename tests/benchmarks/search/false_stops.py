"""How often does the stopping rule end a trial that is as fast as the bar? Steps whose correlation is known."""

import math
import random
from concurrent.futures import Executor
from functools import partial

from tune.trial.early_stop import verdict

CORRELATIONS = (0.0, 0.3, 0.5, 0.7, 0.9)
STEPS = 40
NOISE = 0.01


def steps(seed: int, seconds: float, correlation: float) -> list[float]:
    """Step times whose noise is a first-order autoregression."""
    draw = random.Random(seed)
    drift, times = draw.gauss(0, NOISE) / math.sqrt(1 - correlation**2), []
    for _ in range(STEPS):
        drift = correlation * drift + draw.gauss(0, NOISE)
        times.append(seconds * (1 + drift))
    return times


def stopped_after(times: list[float], bar: float) -> int | None:
    """The step at which the trial is stopped when the rule is asked after each; None when it never is."""
    asked = range(1, len(times) + 1)
    return next((n for n in asked if verdict(times[:n], threshold_seconds=bar, precision=0.0) == "cannot win"), None)


def stops_by_mistake(correlation: float, seed: int) -> bool:
    """Whether a trial that is exactly as fast as the bar is stopped."""
    return stopped_after(steps(seed, 1.0, correlation), 1.0) is not None


def rates(pool: Executor, seeds: int) -> dict[str, float]:
    """Share of such trials that are stopped, by correlation."""
    return {
        str(correlation): sum(pool.map(partial(stops_by_mistake, correlation), range(seeds), chunksize=50)) / seeds
        for correlation in CORRELATIONS
    }
