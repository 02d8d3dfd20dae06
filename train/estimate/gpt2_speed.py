"""Predicted speed of a compiled step of GPT-2 on any GPU, by formulas for the bytes and FLOPs of its kernels.

Matrix products and attention are bound by arithmetic, Triton's kernels and the optimizer by memory bandwidth.
"""

from dataclasses import dataclass

from infra.errors import UserError
from train.config import WHOLE_GRAPH, Batch, Execution, Precision
from train.estimate.gpu_rates import GpuRates
from train.estimate.recomputation import recomputation_time
from train.model_config import ModelConfig

ATTENTION_EFFICIENCY = 0.4
"""FLOP/s of FlashAttention-2 with heads of width 64, forward and backward, relative to large matrix products: 110 of
271 TFLOP/s on an A100 (arXiv 2307.08691, section 4.1)."""


@dataclass(frozen=True)
class KernelTraffic:
    """Bytes that Triton's kernels read and write in the forward and backward pass of a micro-batch."""

    per_block_token: float
    """Bytes per block for each token and unit of width: activations, norms, GELU, and their gradients."""
    per_block_weight: float
    """Bytes for each weight of a block: casts."""
    per_logit: float
    """Bytes for each logit."""
    per_head_weight: float
    """Bytes for each weight of the head."""


_AUTOCAST = KernelTraffic(130.2, 6.3, 6.2, 32.9)
KERNEL_TRAFFIC = {
    "bf16": _AUTOCAST, "fp16": _AUTOCAST, "bf16-activations": KernelTraffic(88.5, 6.3, 6.2, 32.3),
}  # fmt: skip
"""Bytes by precision in a whole compiled graph, from the kernels that Inductor generates for GPT-2 124M with the plain
loss (tests/benchmarks/records/kernels.json), except for reads that Inductor only counts for the loss's gather. The
fused loss reads and writes the logits as often. Autocast to fp16 has the sizes of autocast to bf16."""

UPDATE_BYTES = 40
"""Bytes that clipping and a fused AdamW move for each parameter: the weight, its gradient and two moments are read, and
three of them written; clipping reads the gradient twice and writes it once."""
UNSCALING_BYTES = 8
"""Bytes that the loss scaling of fp16 moves for each parameter: the gradient is read and written."""


def predict_roofline(model: ModelConfig, batch: Batch, execution: Execution, gpu_rates: GpuRates) -> float:
    """Return the tokens/s at the roofline of one GPU with ``gpu_rates``. Raises ``UserError`` if the formulas do not
    cover it."""
    rate = gpu_rates.matmul_rate(execution.precision)
    is_covered = not (execution.attention == "manual" or execution.fp8 or execution.offload_optimizer)
    if not (rate and is_covered and execution.precision in KERNEL_TRAFFIC and execution.compile in WHOLE_GRAPH):
        raise UserError(
            "The speed is only predicted for GPT-2 in 16 bits with a whole compiled graph, without --fp8, "
            "--offload-optimizer or --attention manual."
        )
    tokens = batch.micro_batch * model.context_length
    products = 6 * model.matmul_parameters * tokens / rate
    attention = 6 * model.layers * model.context_length * model.width * tokens / (ATTENTION_EFFICIENCY * rate)
    update_bytes = UPDATE_BYTES + UNSCALING_BYTES * (execution.precision == "fp16")
    update = update_bytes * model.parameters / batch.accumulation
    moved = triton_bytes(model, batch.micro_batch, execution.precision) + update
    seconds = products + attention + moved / gpu_rates.bandwidth
    return tokens / (seconds * (1 + recomputation_time(execution.checkpointing)))


def triton_bytes(model: ModelConfig, micro_batch: int, precision: Precision) -> float:
    """Return the bytes that Triton's kernels read and write for a micro-batch."""
    traffic, tokens = KERNEL_TRAFFIC[precision], micro_batch * model.context_length
    block = traffic.per_block_token * model.width * tokens + traffic.per_block_weight * 12 * model.width**2
    head = traffic.per_logit * tokens + traffic.per_head_weight * model.width
    return model.layers * block + model.padded_vocab_size * head
