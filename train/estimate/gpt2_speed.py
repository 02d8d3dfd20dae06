"""Predicted speed of a compiled step of GPT-2 on any GPU, by formulas for the bytes, FLOPs and number of its kernels.

Matrix products and attention are bound by arithmetic, Triton's kernels and the optimizer by memory bandwidth, and a
micro-batch whose kernels are too short by their launches.
"""

from dataclasses import dataclass

from infra.errors import UserError
from train.config import CUDA_GRAPHS, WHOLE_GRAPH, Batch, Execution, Precision
from train.estimate.gpu_rates import GpuRates
from train.estimate.recomputation import recomputation_time
from train.model_config import ModelConfig
from train.models.loss import chunk_count

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

LAUNCH_SECONDS = 5e-6
"""Time in which the CPU launches one kernel of compiled code (an assumption, for Python's launchers and torch's
dispatcher). The GPU is idle where it computes the kernel in less."""


@dataclass(frozen=True)
class KernelCount:
    """Number of kernels in the forward and backward pass of a micro-batch without biases."""

    per_block: int
    """Kernels of a block."""
    others: int
    """Kernels outside the blocks, except those of the loss."""


_AUTOCAST_COUNT = KernelCount(29, 11)
KERNEL_COUNTS = {"bf16": _AUTOCAST_COUNT, "fp16": _AUTOCAST_COUNT, "bf16-activations": KernelCount(27, 10)}
"""Kernels by precision in a whole compiled graph, as Inductor generates them for GPT-2
(tests/benchmarks/records/kernels.json). Their number depends on no size. Autocast to fp16 has those of autocast to
bf16."""
BLOCK_BIAS_KERNELS = 9
"""Kernels that the biases of a block's linear layers and norms add. The last norm's bias adds one."""
PLAIN_LOSS_KERNELS = 6
"""Kernels of the plain loss."""
FUSED_LOSS_KERNELS, FUSED_CHUNK_KERNELS = 4, 11
"""Kernels of the fused loss, and of each of its chunks (tests/cuda/test_launches.py counts them)."""

UPDATE_BYTES = 40
"""Bytes that clipping and a fused AdamW move for each parameter: the weight, its gradient and two moments are read, and
three of them written; clipping reads the gradient twice and writes it once."""
UNSCALING_BYTES = 8
"""Bytes that the loss scaling of fp16 moves for each parameter: the gradient is read and written."""


def predict_roofline(model: ModelConfig, batch: Batch, execution: Execution, gpu_rates: GpuRates) -> float:
    """Return the tokens/s at the roofline of one GPU with ``gpu_rates``. Raises ``UserError`` if the formulas do not
    cover it."""
    update_bytes = UPDATE_BYTES + UNSCALING_BYTES * (execution.precision == "fp16")
    update = update_bytes * model.parameters / batch.accumulation / gpu_rates.bandwidth
    seconds = pass_seconds(model, batch, execution, gpu_rates)
    if execution.compile not in CUDA_GRAPHS:
        seconds = max(seconds, launch_seconds(model, batch, execution))
    return batch.micro_batch * model.context_length / (seconds + update)


def pass_seconds(model: ModelConfig, batch: Batch, execution: Execution, gpu_rates: GpuRates) -> float:
    """Return the seconds in which the GPU computes the kernels of a micro-batch, without the optimizer's. Raises
    ``UserError`` if the formulas do not cover it."""
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
    moved = triton_bytes(model, batch.micro_batch, execution.precision) / gpu_rates.bandwidth
    return (products + attention + moved) * (1 + recomputation_time(execution.checkpointing))


def launch_seconds(model: ModelConfig, batch: Batch, execution: Execution) -> float:
    """Return the seconds in which the CPU launches the kernels of a micro-batch one by one."""
    return LAUNCH_SECONDS * kernel_count(model, batch, execution) * (1 + recomputation_time(execution.checkpointing))


def kernel_count(model: ModelConfig, batch: Batch, execution: Execution) -> int:
    """Return the number of kernels of a micro-batch without recomputation, in a precision of ``KERNEL_COUNTS``."""
    count = KERNEL_COUNTS[execution.precision]
    blocks = model.layers * (count.per_block + BLOCK_BIAS_KERNELS * model.bias)
    chunks = chunk_count(execution.loss, execution.loss_chunks, batch.micro_batch * model.context_length)
    loss = FUSED_LOSS_KERNELS + FUSED_CHUNK_KERNELS * chunks if chunks else PLAIN_LOSS_KERNELS
    return blocks + count.others + model.bias + loss


def triton_bytes(model: ModelConfig, micro_batch: int, precision: Precision) -> float:
    """Return the bytes that Triton's kernels read and write for a micro-batch."""
    traffic, tokens = KERNEL_TRAFFIC[precision], micro_batch * model.context_length
    block = traffic.per_block_token * model.width * tokens + traffic.per_block_weight * 12 * model.width**2
    head = traffic.per_logit * tokens + traffic.per_head_weight * model.width
    return model.layers * block + model.padded_vocab_size * head
