"""The speed of a compiled step on a GPU that nobody has rented yet: what its kernels move and compute, by formulas.

In: a resolved config, and a card's rates. Out: the tokens per second that the roofline allows, and the share of it that
training usually reaches. Matrix products and attention are bound by arithmetic, what Triton's kernels and the optimizer
do by memory. A prediction, never a measurement.
"""

from dataclasses import dataclass

from infra.errors import UserError
from infra.hardware import peak_flops
from train.config import WHOLE_GRAPH, TrainConfig
from train.custom_model import CustomModel
from train.estimate.flops import matmul_parameters
from train.model.gpt import parameter_count

BANDWIDTH = {"A100": 1.555e12, "H100": 3.35e12, "H200": 4.8e12}
"""Bytes/s of a card's memory, by NVIDIA's datasheets (A100 with 40 GB, H100 and H200 SXM)."""

REACHED = 0.87
"""Share of its datasheet that a card's large matrix products and copies reach: 271 of 312 TFLOP/s on an A100 SXM."""
ATTENTION = 0.35
"""The same of FlashAttention-2 with heads of 64, forward and backward (arXiv 2307.08691, section 4.1)."""

SHARE = (0.73, 0.81)
"""Share of its kernels' roofline that compiled training of GPT-2 124M reached on an A100: the study that the suite a100
repeats published these speeds, from its compiled rung to its last."""


@dataclass(frozen=True)
class Moved:
    """Bytes that Triton's kernels move in the forward and backward pass of a micro-batch."""

    per_block_token: float
    """For each of the width's numbers of a token, in a block: activations, norms, GELU, and their gradients."""
    per_block_weight: float
    """For each weight of a block: casts, and gradients in fp32."""
    per_logit: float
    per_head_weight: float


MOVED = {"bf16": Moved(142.4, 12.3, 6.2, 32.9), "bf16-activations": Moved(102.4, 12.3, 6.2, 32.3)}
"""By precision, of the plain loss in a graph that is compiled whole, from the kernels that Inductor makes of GPT-2 124M
(tests/benchmarks/records/kernels.json), without what the loss's gather reads only by Inductor's count."""

UPDATE = 40
"""Bytes that clipping and a fused AdamW move for each parameter: the weight, its gradient and two moments are read, and
three of them written; clipping reads the gradient twice and writes it once."""


def speed_rows(config: TrainConfig, card: str) -> list[tuple[str, str]]:
    """The roofline of ``config`` on the GPU called ``card``, and the range of speeds to expect, for a table."""
    try:
        most = reachable(config, card)
    except UserError as unknown:
        return [("", str(unknown))]
    low, high = (share * most for share in SHARE)
    return [
        ("roofline", f"{most:,.0f} tokens/s of one {card}, by the bytes and FLOPs of a step's kernels"),
        (
            "expected",
            f"{low:,.0f} to {high:,.0f} tokens/s, {SHARE[0]:.0%} to {SHARE[1]:.0%} of it, as others reached",
        ),
        ("", "predicted, not measured: 'python -m train.run' measures it"),
    ]


def reachable(config: TrainConfig, card: str) -> float:
    """Tokens/s of one GPU called ``card`` at the roofline of ``config``. Raises ``UserError`` where it is not known."""
    if isinstance(config.model, CustomModel):
        raise UserError("the speed is predicted for the GPT-2 here only: its formulas know its kernels.")
    peak, model = peak_flops(card, config.precision), config.model
    plain = config.loss == "plain" and config.loss_chunks == 1 and config.checkpointing == "none"
    if not (peak and plain and config.precision in MOVED and config.compile in WHOLE_GRAPH):
        raise UserError(
            "the speed is predicted for --precision bf16 or bf16-activations, compiled whole, with --loss plain and "
            "without --checkpointing."
        )
    tokens = config.micro_batch * model.context_length
    products = 6 * matmul_parameters(model) * tokens / (REACHED * peak)
    attention = 6 * model.layers * model.context_length * model.width * tokens / (ATTENTION * peak)
    update = UPDATE * parameter_count(model) / config.accumulation
    return tokens / (products + attention + (moved(config) + update) / (REACHED * BANDWIDTH[card]))


def moved(config: TrainConfig) -> float:
    """Bytes that Triton's kernels move for a micro-batch."""
    by, model, tokens = MOVED[config.precision], config.shape, config.micro_batch * config.model.context_length
    block = by.per_block_token * model.width * tokens + by.per_block_weight * 12 * model.width**2
    return model.layers * block + model.padded_vocabulary * (by.per_logit * tokens + by.per_head_weight * model.width)
