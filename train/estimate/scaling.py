"""Scaling laws: the loss that a run of some compute should reach, and the model and tokens for some hours of a GPU.

The law is L = E + A x C^-a with the FLOPs C of a run, for runs with about equal tokens per parameter (Hoffmann et al.
2022, arXiv 2203.15556).
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from infra.cli.table import Table
from infra.cli.units import GB
from infra.errors import UserError
from train.config import ResolvedConfig
from train.data.assumed import TOKENS_PER_PARAMETER
from train.estimate.flops import PF_DAY
from train.estimate.gpu_rates import GpuRates
from train.estimate.power_law import PARAMETERS, PowerLaw
from train.estimate.prediction import SECONDS_PER_HOUR, Prediction, predict
from train.intervals import Estimate
from train.model_config import ModelConfig

DEVIATION = 0.01
"""Assumed standard deviation of a run's loss from the law, as a fraction of the loss: seeds and imperfect settings."""
DEGREES_OF_FREEDOM = 10
"""Degrees of freedom of the assumed deviation: it counts as much as residuals of this number."""
TYPICAL_EXPONENT = 0.1
"""Typical exponent; published ones are 0.05 (arXiv 2001.08361) and 0.15 (arXiv 2203.15556)."""
MIN_RUNS = PARAMETERS
"""Number of runs that determine the law."""
MIN_COMPUTE_RATIO = 4
"""Minimum ratio between the largest and the smallest compute of the runs."""


@dataclass(frozen=True)
class ScalingLaw:
    """The law of the losses of runs. Raises ``UserError`` for too few runs, or runs of too similar compute."""

    compute: Sequence[float]
    """FLOPs of each run."""
    losses: Sequence[float]
    """Validation loss of each run."""

    def __post_init__(self) -> None:
        if len(set(self.compute)) < MIN_RUNS:
            raise UserError(
                f"A law of loss over compute needs {MIN_RUNS} runs with different compute; there are "
                f"{len(set(self.compute))}. Add runs to --from-runs."
            )
        if max(self.compute) < MIN_COMPUTE_RATIO * min(self.compute):
            raise UserError(
                f"The compute of the runs differs by less than a factor of {MIN_COMPUTE_RATIO}, too little for a law. "
                "Add a run with more tokens and a larger model to --from-runs."
            )

    def loss(self, compute: float) -> Estimate:
        """Return the loss to expect at ``compute`` FLOPs with its 95% interval."""
        deviations = [DEVIATION * loss for loss in self.losses]
        return PowerLaw(self.compute, self.losses, deviations, DEGREES_OF_FREEDOM, TYPICAL_EXPONENT).at(compute)


def model_of_depth(model: ModelConfig, depth: int) -> ModelConfig:
    """Return ``model`` with this number of layers and of heads, the proportions of GPT-2 124M."""
    return replace(model, layers=depth, heads=depth, width=HEAD_WIDTH * depth)


HEAD_WIDTH = 64
"""Width of a head of the planned models, as in GPT-2."""
MIN_DEPTH, MAX_DEPTH = 2, 80
"""Number of layers of the smallest and the largest model that is planned: 7 million and 25 billion parameters."""


@dataclass(frozen=True)
class OptimalRun:
    """The compute-optimal run for some hours of a GPU."""

    depth: int
    """Number of layers of the model."""
    config: ResolvedConfig
    """Settings of the run."""
    prediction: Prediction
    """Memory and speed of the run."""
    tokens: int
    """Training tokens of the run, in whole steps, which take the hours at the lowest expected speed."""

    @property
    def compute(self) -> float:
        """FLOPs of the run."""
        return self.tokens * self.config.model.flops_per_token

    @property
    def tokens_per_parameter(self) -> float:
        """Training tokens per parameter."""
        return self.tokens / self.config.model.parameters


def find_optimal_run(
    name: str, gpu_rates: GpuRates, hours: float, resolve_model: Callable[[int], ResolvedConfig]
) -> OptimalRun | None:
    """Find the model that has about 20 tokens per parameter if it trains for ``hours`` on the GPU ``name``.

    ``resolve_model`` resolves the run of the model with a number of layers. Returns None if no step of the smallest
    model ends in time, or if its speed is not predicted.
    """

    @cache
    def plan(depth: int) -> OptimalRun | None:
        config = resolve_model(depth)
        prediction = predict(name, config.step, gpu_rates, gpu_rates.device_info.memory)
        if prediction.speed is None:
            return None
        steps = int(hours * SECONDS_PER_HOUR * prediction.speed.low / config.step_tokens)
        return OptimalRun(depth, config, prediction, steps * config.step_tokens) if steps else None

    def is_too_large(depth: int) -> bool:
        run = plan(depth)
        return run is None or run.tokens_per_parameter < TOKENS_PER_PARAMETER

    depths = range(MIN_DEPTH, MAX_DEPTH + 1)
    first_too_large = bisect_left(depths, True, key=is_too_large)
    nearest = (plan(depth) for depth in depths[max(0, first_too_large - 1) : first_too_large + 1])
    runs = [run for run in nearest if run]
    return min(runs, key=lambda run: abs(math.log(run.tokens_per_parameter / TOKENS_PER_PARAMETER)), default=None)


def optimal_runs_table(runs: Sequence[OptimalRun], law: ScalingLaw | None, unit: str) -> Table:
    """Build the table of the compute-optimal runs, with the losses to expect by ``law`` in ``unit``."""
    columns = ["GPU", "layers x width", "parameters (millions)", "tokens (billions)", "peak memory (GB)", "PF-days"]
    rows = []
    for run in runs:
        model, loss = run.config.model, law and law.loss(run.compute)
        peak = f"{run.prediction.peak.high / GB:.2f}" if run.prediction.peak else "-"
        cells = [run.prediction.label, f"{run.depth} x {HEAD_WIDTH * run.depth}", f"{model.parameters / 1e6:,.0f}",
                 f"{run.tokens / 1e9:.3g}", peak, f"{run.compute / PF_DAY:.3g}"]  # fmt: skip
        rows.append(cells + ([f"{loss.middle:.3g} ({loss.low:.3g} to {loss.high:.3g})"] if loss else []))
    return Table("Compute-optimal GPT-2, predicted", columns + [f"loss ({unit})"] * (law is not None), rows)
