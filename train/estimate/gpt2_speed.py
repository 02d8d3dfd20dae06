"""Predicted speed of a compiled step of GPT-2 on any GPU, by formulas for the bytes, FLOPs and number of its kernels.

Matrix products and attention are bound by arithmetic, all other kernels by memory bandwidth, and a micro-batch
whose kernels are too short by their launches.
"""

from dataclasses import dataclass

from infra.errors import UserError
from train.config import CUDA_GRAPHS, WHOLE_GRAPH, Batch, Execution
from train.estimate.gpu_rates import GpuRates
from train.estimate.recomputation import recomputation_time
from train.model_config import ModelConfig
from train.models.loss import chunk_count

ATTENTION_EFFICIENCY = 0.4
"""FLOP/s of FlashAttention-2 with heads of width 64, forward and backward, relative to large matrix products: 110 of
271 TFLOP/s on an A100 (arXiv 2307.08691, section 4.1)."""


BYTES_PER_BLOCK_TOKEN = {"bf16": 130.2, "fp16": 130.2, "bf16-activations": 88.5}
"""Bytes per block for each token and unit of width, by precision: activations, norms, GELU, and their gradients."""
BYTES_PER_BLOCK_WEIGHT = 6.3
"""Bytes for each weight of a block: casts."""
BYTES_PER_LOGIT = {"plain": 6.2, "fused": 4.0}
"""Bytes for each logit, by loss. Matrix products move more."""
BYTES_PER_HEAD_WEIGHT = {"plain": 24.3, "fused": 31.7}
"""Bytes for each weight of the head, by loss: casts, the scaling of the fused loss's gradient, and the embedding's
gradient. All bytes are of kernels other than matrix products and attention in a whole compiled graph, counted for GPT-2
124M (tests/benchmarks/records/kernels.json). Autocast to fp16 has the sizes of autocast to bf16."""

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


_AUTOCAST_COUNT = KernelCount(29, 9)
KERNEL_COUNTS = {"bf16": _AUTOCAST_COUNT, "fp16": _AUTOCAST_COUNT, "bf16-activations": KernelCount(27, 8)}
"""Kernels by precision in a whole compiled graph, as Inductor generates them for GPT-2
(tests/benchmarks/records/kernels.json). Their number depends on no size. Autocast to fp16 has those of autocast to
bf16."""
BLOCK_BIAS_KERNELS = 9
"""Kernels that the biases of a block's linear layers and norms add. The last norm's bias adds one."""
PLAIN_LOSS_KERNELS = 7
"""Kernels of the plain loss."""
FUSED_LOSS_KERNELS, FUSED_CHUNK_KERNELS = 3, 11
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
    if not (rate and is_covered and execution.precision in BYTES_PER_BLOCK_TOKEN and execution.compile in WHOLE_GRAPH):
        raise UserError(
            "The speed is only predicted for GPT-2 in 16 bits with a whole compiled graph, without --fp8, "
            "--offload-optimizer or --attention manual."
        )
    tokens = batch.micro_batch * model.context_length
    products = 6 * model.matmul_parameters * tokens / rate
    attention = 6 * model.layers * model.context_length * model.width * tokens / (ATTENTION_EFFICIENCY * rate)
    moved = memory_bound_bytes(model, batch.micro_batch, execution) / gpu_rates.bandwidth
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


def memory_bound_bytes(model: ModelConfig, micro_batch: int, execution: Execution) -> float:
    """Return the bytes of a micro-batch that kernels other than matrix products and attention read and write."""
    tokens, loss = micro_batch * model.context_length, "fused" if execution.loss_chunks > 1 else execution.loss
    block_token = BYTES_PER_BLOCK_TOKEN[execution.precision] * model.width
    block = block_token * tokens + BYTES_PER_BLOCK_WEIGHT * 12 * model.width**2
    head = BYTES_PER_LOGIT[loss] * tokens + BYTES_PER_HEAD_WEIGHT[loss] * model.width
    return model.layers * block + model.padded_vocab_size * head
