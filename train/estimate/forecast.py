"""Predictions for a run, each as a line of a name and a text: memory, arithmetic, quantization, speed, time and cost.

They need neither the GPU nor the data of the run.
"""

import torch

from infra.cli.units import GB, format_count, format_duration
from infra.device.gpu_models import find_gpu_model
from pipeline.shards import Manifest
from train.config import AUTO, Precision, ResolvedConfig, Step
from train.data.assumed import TOKENS_PER_PARAMETER
from train.estimate.breakdown import MemoryBreakdown
from train.estimate.estimates import estimates_of
from train.estimate.flops import PF_DAY
from train.estimate.gpu_rates import GpuRates
from train.estimate.memory import largest_unconstrained_micro_batch, margin
from train.estimate.prediction import Prediction, Range
from train.estimate.roofline import LLM_C_SPEED, NANOGPT_RATIOS, SOURCE
from train.estimate.tiles import products, warnings
from train.model_config import ModelSpec

NOT_COVERED = "only predicted for GPT-2 in 16 bits and a whole compiled graph, without --fp8 or manual attention"
"""Text for a speed that no formula covers."""

MAX_WARNINGS = 2
"""Maximum number of warnings about sizes that do not fill tiles."""

MIN_PART_FRACTION = 0.01
"""Fraction of the peak memory below which a part is counted as other."""

Rows = list[tuple[str, str]]


def memory_rows(step: Step, breakdown: MemoryBreakdown) -> Rows:
    """Return the predicted peak memory by part, the bytes per parameter, and the published formula of activations."""
    parts = {name: size for name, size in breakdown.parts().items() if size >= MIN_PART_FRACTION * breakdown.total}
    small = breakdown.total - sum(parts.values())
    sizes = [f"{name} {size / GB:.2f}" for name, size in parts.items()] + [f"other {small / GB:.2f}"] * (small > 0)
    rows = [
        ("memory", f"{', '.join(sizes)} GB at {breakdown.moment}"),
        ("state", state_text(step.model, breakdown)),
    ]
    formula = estimates_of(step.model).activation_formula(step.batch.micro_batch, step.execution.precision)
    return rows + ([("published", f"activations {formula[0] / GB:.2f} GB: {formula[1]}")] if formula else [])


def state_text(model: ModelSpec, breakdown: MemoryBreakdown) -> str:
    """Format the bytes of the model's state for each of its parameters on one worker, at the peak."""
    sizes = {
        name: breakdown.parts()[name] / model.parameters for name in ("weights", "gradients", "optimizer", "casts")
    }
    parts = ", ".join(f"{name} {size:.2g}" for name, size in sizes.items() if size)
    return f"{sum(sizes.values()):.3g} bytes/parameter: {parts}"


def limit_text(config: ResolvedConfig, limit: int, peak: MemoryBreakdown) -> str:
    """Describe the memory limit, and what else limits a micro-batch that was chosen automatically."""
    step = config.step
    text = f"{limit / GB:.1f} GB less {margin(config.execution):.0%} of the reserved memory"
    if peak.total > limit:
        return f"{text}; this run does not fit"
    if config.requested.batch.micro_batch != AUTO:
        return text
    if step.execution.device == "cpu":
        return text + "; on a CPU --micro-batch auto uses at most 4,096 tokens"
    unconstrained = largest_unconstrained_micro_batch(step, limit)
    if unconstrained <= step.batch.micro_batch:
        return text
    is_whole_batch = step.batch.micro_batch == step.micro_batches[-1]
    reason = "all" if is_whole_batch else "the largest divisor"
    return f"{text}; {step.batch.micro_batch} is {reason} of --global-batch, {unconstrained} would fit"


def arithmetic_text(model: ModelSpec) -> str:
    """Format the FLOPs per token of a forward and backward pass by each published formula."""
    formulas = model.flops_formulas()
    values = ", ".join(f"{formula.name.rpartition(', ')[2]} {formula.flops / 1e6:,.1f}" for formula in formulas)
    return f"per token {values} M"


def tile_rows(model: ModelSpec, micro_batch: int, precision: Precision, gpu_name: str | None = None) -> Rows:
    """Return the largest wasted fraction of a matrix product on the GPU ``gpu_name``, this machine's GPU, or an A100,
    and warnings."""
    if not model.matrices:
        return []
    gpu_model = find_gpu_model(gpu_name or "A100")
    if gpu_name is None and torch.cuda.is_available():
        count = torch.cuda.get_device_properties(0).multi_processor_count
    elif gpu_model:
        count = gpu_model.multiprocessors
    else:
        return [("tiles", f"unknown, because the multiprocessors of {gpu_name} are unknown")]
    waste = max(products(model, micro_batch, count), key=lambda product: product.wasted)
    text = f"at most {waste.wasted:.1%} of a matrix product wasted ({count} multiprocessors)"
    sentences = warnings(model, micro_batch, precision, count)
    more = [f"{len(sentences) - MAX_WARNINGS} more like these"] * (len(sentences) > MAX_WARNINGS)
    return [("tiles", text), *(("warning", sentence) for sentence in (*sentences[:MAX_WARNINGS], *more))]


def speed_text(prediction: Prediction, gpu_rates: GpuRates) -> str:
    """Describe the source of a predicted speed, or why it is not predicted."""
    if prediction.exceeds_limit:
        return "not predicted, because the run does not fit in memory"
    return f"{SOURCE}; rates: {gpu_rates.source}" if prediction.speed else NOT_COVERED


def comparison_rows(model: ModelSpec, prediction: Prediction, gpu_rates: GpuRates) -> Rows:
    """Return what is known of the speed relative to other projects: only of GPT-2 124M on an A100."""
    info = gpu_rates.device_info
    if model.text != "gpt2-124m" or not prediction.speed or "A100" not in info.name:
        return []
    ratios = " and ".join(f"x{ratio:.2f} in {precision}" for precision, ratio in NANOGPT_RATIOS.items())
    is_above = "80GB" in info.name and prediction.speed.high < LLM_C_SPEED
    return [(
        "compared",
        f"counted kernels give {ratios} of nanoGPT's roofline, not measured; llm.c has published {LLM_C_SPEED:,} "
        f"tokens/s on an A100 with 80 GB{', above this range' * is_above}",
    )]  # fmt: skip


def run_text(config: ResolvedConfig, manifest: Manifest) -> str:
    """Describe the length of the run: its tokens, steps, epochs and PF-days."""
    tokens, model = run_tokens(config, manifest), config.model
    ratio = tokens / model.parameters
    epochs = f", {tokens / manifest.splits['train']['tokens']:.3g} epochs" if manifest.fingerprint else ""
    optimum = "" if ratio == TOKENS_PER_PARAMETER else f" (optimal: {TOKENS_PER_PARAMETER})"
    return (
        f"{tokens:,} tokens, {ratio:.3g} per parameter{optimum}, {format_count(tokens // config.step_tokens, 'step')}"
        f"{epochs}, {model.flops_per_token * tokens / PF_DAY:.3g} PF-days"
    )


def run_tokens(config: ResolvedConfig, manifest: Manifest) -> int:
    """Return the training tokens of the run, by default those of an epoch."""
    if config.total_steps is not None:
        return config.total_steps * config.step_tokens
    return manifest.splits["train"]["tokens"]


def time_text(seconds: Range | None, price_per_hour: float | None) -> str:
    """Format the time of a run and, with a price, its cost; how to predict it if the time is None."""
    if seconds is None:
        return "unknown; set --tokens-per-second, or use --gpu and one worker"
    text = " to ".join(dict.fromkeys(format_duration(_round_seconds(value)) for value in seconds))
    if price_per_hour:
        text += ", cost " + " to ".join(dict.fromkeys(f"{value / 3600 * price_per_hour:,.2f}" for value in seconds))
    return text


def _round_seconds(seconds: float) -> int:
    """Round a predicted time to whole seconds, above an hour to whole minutes."""
    unit = 60 if seconds >= 3600 else 1
    return round(seconds / unit) * unit
