"""The speed of a compiled step on a GPU that nobody has rented yet: what its kernels move and compute, by formulas.

Matrix products and attention are bound by arithmetic, what Triton's kernels and the
optimizer do by memory. A prediction, never a measurement.
"""

from dataclasses import dataclass

from infra.errors import UserError
from train.config import WHOLE_GRAPH, TrainConfig
from train.custom_model import CustomModel
from train.estimate.card import Card
from train.estimate.flops import matmul_parameters
from train.model.gpt import parameter_count

ATTENTION = 0.4
"""FLOP/s of FlashAttention-2 with heads of 64, forward and backward, as a share of those of large matrix products: 110
of 271 TFLOP/s on an A100 (arXiv 2307.08691, section 4.1)."""

SHARE = (0.72, 0.81)
"""Share of its kernels' roofline that compiled training of GPT-2 124M reached on an A100: the study that the suite a100
repeats published these speeds, from its compiled rung to its last."""
SOURCE = f"{SHARE[0]:.0%} to {SHARE[1]:.0%} of the roofline, which the study of the suite a100 reached with compilation"
"""Where :data:`SHARE` comes from, in words."""


@dataclass(frozen=True)
class Moved:
    """Bytes that Triton's kernels move in the forward and backward pass of a micro-batch."""

    per_block_token: float
    """For each of the width's numbers of a token, in a block: activations, norms, GELU, and their gradients."""
    per_block_weight: float
    """For each weight of a block: casts."""
    per_logit: float
    per_head_weight: float


MOVED = {"bf16": Moved(130.2, 6.3, 6.2, 32.9), "bf16-activations": Moved(88.5, 6.3, 6.2, 32.3)}
"""By precision, of the plain loss in a graph that is compiled whole, from the kernels that Inductor makes of GPT-2 124M
(tests/benchmarks/records/kernels.json), without what the loss's gather reads only by Inductor's count."""

UPDATE = 40
"""Bytes that clipping and a fused AdamW move for each parameter: the weight, its gradient and two moments are read, and
three of them written; clipping reads the gradient twice and writes it once."""


def speed_rows(config: TrainConfig, card: Card) -> list[tuple[str, str]]:
    """The roofline of ``config`` on ``card``, and the range of speeds to expect, for a table."""
    try:
        most = reachable(config, card)
    except UserError as unknown:
        return [("", str(unknown))]
    return [
        ("roofline", f"{most:,.0f} tokens/s by the bytes and FLOPs of a step's kernels at {card.source}"),
        ("expected", f"{expected(most)} tokens/s: {SOURCE}"),
        ("", "predicted, not measured: 'python -m train.run' measures it"),
    ]


def expected(most: float) -> str:
    """The range of speeds to expect where the roofline allows ``most`` tokens/s."""
    low, high = (share * most for share in SHARE)
    return f"{low:,.0f} to {high:,.0f}"


def reachable(config: TrainConfig, card: Card) -> float:
    """Tokens/s of one ``card`` at the roofline of ``config``. Raises ``UserError`` where it is not known."""
    if isinstance(config.model, CustomModel):
        raise UserError("the speed is predicted for the GPT-2 here only: its formulas know its kernels.")
    rate, model = card.products(config.precision), config.model
    plain = config.loss == "plain" and config.loss_chunks == 1 and config.checkpointing == "none"
    plain = plain and config.attention != "manual"
    if not (rate and plain and config.precision in MOVED and config.compile in WHOLE_GRAPH):
        raise UserError(
            "the speed is predicted for --precision bf16 or bf16-activations, compiled whole, with --loss plain, "
            "without --checkpointing and --attention manual."
        )
    tokens = config.micro_batch * model.context_length
    products = 6 * matmul_parameters(model) * tokens / rate
    attention = 6 * model.layers * model.context_length * model.width * tokens / (ATTENTION * rate)
    update = UPDATE * parameter_count(model) / config.accumulation
    return tokens / (products + attention + (moved(config) + update) / card.bandwidth)


def moved(config: TrainConfig) -> float:
    """Bytes that Triton's kernels move for a micro-batch."""
    by, model, tokens = MOVED[config.precision], config.shape, config.micro_batch * config.model.context_length
    block = by.per_block_token * model.width * tokens + by.per_block_weight * 12 * model.width**2
    return model.layers * block + model.padded_vocabulary * (by.per_logit * tokens + by.per_head_weight * model.width)
