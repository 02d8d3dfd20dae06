"""The roofline of a run on any GPU, and the range of speeds to expect from it."""

from train.config import Batch, Execution
from train.estimate.estimates import estimates_of
from train.estimate.gpu_rates import GpuRates
from train.model_config import ModelSpec

REACHED_FRACTION_RANGE = (0.72, 0.81)
"""Fractions of the roofline that compiled training of GPT-2 124M reached on an A100, in the published study of the
suite a100: its compiled rung and its last one."""
SOURCE = (
    f"{REACHED_FRACTION_RANGE[0]:.0%} to {REACHED_FRACTION_RANGE[1]:.0%} of the roofline, as in the compiled rungs "
    "of the study of the suite a100"
)
"""Origin of :data:`REACHED_FRACTION_RANGE` as a text."""

NANOGPT_RATIOS = {"bf16": 1.04, "bf16-activations": 1.12}
"""Roofline of this project's kernels on an A100, relative to nanoGPT's, by precision: counted for GPT-2 124M with 16
sequences of 1,024 tokens (tests/benchmarks/records/kernels.json)."""
LLM_C_SPEED = 218_000
"""Tokens/s of llm.c that its script run_gpt2_124M.sh names for an A100 with 80 GB: 300 ms for 524,288 tokens on 8."""


def expected_range(roofline: float) -> tuple[float, float]:
    """Return the lowest and the highest speed to expect at a ``roofline``, in its unit."""
    low, high = REACHED_FRACTION_RANGE
    return low * roofline, high * roofline


def roofline_speed(model: ModelSpec, batch: Batch, execution: Execution, gpu_rates: GpuRates) -> float:
    """Return the tokens/s at the roofline of one GPU with ``gpu_rates``. Raises ``UserError`` if the model has no
    formulas, or if they do not cover how it is executed."""
    return estimates_of(model).roofline_speed(batch, execution, gpu_rates)
