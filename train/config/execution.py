"""Settings of the model's execution: device, precision, kernels, and techniques that trade speed for memory."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

import tyro

from infra.errors import UserError
from infra.schema import strict
from train.config.checks import Conflict, check_combinations, check_part

Precision = Literal["fp32", "tf32", "fp16", "bf16", "bf16-activations"]
Attention = Literal["auto", "manual", "sdpa", "flash", "cudnn", "efficient", "flex"]
Compile = Literal[
    "off",
    "whole",
    "blocks",
    "coordinate-descent",
    "max-autotune",
    "max-autotune-graphs",
    "reduce-overhead",
    "eager",
    "aot_eager",
]
Checkpointing = Literal["none", "full", "alternate", "selective", "budget-75", "budget", "budget-25"]
Loss = Literal["plain", "fused"]
Device = Literal["cuda", "cpu"]
Allocator = Literal["default", "split", "expandable"]
Ablation = Literal["async-loss", "set-to-none", "prefetch", "gc-pause", "large-pages"]

FUSED_ATTENTION = ("flash", "cudnn", "efficient")

HALF_PRECISIONS = ("fp16", "bf16", "bf16-activations")

WHOLE_GRAPH = ("whole", "coordinate-descent", "max-autotune", "max-autotune-graphs", "reduce-overhead")
"""Values of ``--compile`` that compile the model as one graph."""

ACTIVATION_BUDGETS: dict[Checkpointing, float] = {"budget-75": 0.75, "budget": 0.5, "budget-25": 0.25}
"""Fraction of the activations' memory that is stored: 0 would recompute all blocks, and 1 nothing."""

EAGER_BACKENDS = ("eager", "aot_eager")
"""Values of ``--compile`` that trace the model as one graph and execute its operations without a compiler."""

CUDA_GRAPHS = ("max-autotune-graphs", "reduce-overhead")
"""Values of ``--compile`` that record the graph's kernels and replay them."""

GPU_KERNELS = ("coordinate-descent", "max-autotune", "max-autotune-graphs")
"""Values of ``--compile`` that tune kernels which only GPUs have."""


@strict
@dataclass(frozen=True)
class ExecutionConfig:
    """Settings of the model's execution on its device."""

    device: Literal["auto", Device] = "auto"
    """Device to train on; auto is a CUDA GPU if there is one, else the CPU."""
    accelerator: Annotated[str | None, tyro.conf.arg(metavar="GPU")] = None
    """Type of GPU that the workers need, by Ray's name, such as A100 or H200. Waits until the cluster has one."""
    precision: Literal["auto", Precision] = "auto"
    """Precision of the model's arithmetic.
    - auto: bf16-activations on GPUs that support bf16 (bf16 with --fsdp, with --fp8 and for a custom model), fp16 on
    older GPUs with tensor cores, else fp32, because most CPUs only emulate bf16, which is far slower
    - fp32: 32-bit floats throughout
    - tf32: matrix products in TensorFloat-32, on tensor cores
    - fp16: autocast to fp16, with loss scaling
    - bf16: autocast to bf16
    - bf16-activations: bf16 for all activations, including the residual stream, with fp32 weights"""
    attention: Attention = "auto"
    """Attention kernel.
    - auto: the fastest supported kernel for the GPU; sdpa on a CPU
    - manual: plain operations, which write the T x T matrix to memory
    - sdpa: chosen by torch's scaled_dot_product_attention
    - flash: FlashAttention
    - cudnn: cuDNN attention
    - efficient: torch's memory-efficient attention
    - flex: FlexAttention"""
    mask_books: bool = False
    """Restrict attention to one book in windows that span several."""
    compile: Annotated[Literal["auto", Compile], tyro.conf.arg(metavar="MODE")] = "auto"
    """Part of the model that torch.compile compiles, and its mode.
    - auto: on a GPU whole if torch can compile for it, or reduce-overhead for a model so small that launching its
    kernels takes longer than computing them; off on a CPU
    - off: no compilation
    - whole: the whole model as one graph
    - blocks: each block and the loss separately, which starts faster
    - coordinate-descent: the whole model; kernel sizes are tuned one by one
    - max-autotune: the whole model; kernels are chosen by benchmarks
    - max-autotune-graphs: max-autotune with CUDA graphs
    - reduce-overhead: the whole model with CUDA graphs
    - eager: for debugging; the whole model is traced by TorchDynamo and not compiled
    - aot_eager: for debugging; as eager, with a backward pass traced by AOTAutograd"""
    fp8: bool = False
    """Compute the matrix products of blocks in 8-bit floats, scaled per tensor (torchao, on GPUs that support them)."""
    checkpointing: Annotated[Literal["auto", Checkpointing], tyro.conf.arg(metavar="KIND")] = "none"
    """Activation checkpointing: activations that are recomputed in the backward pass to save memory.
    - auto: the least recomputation that is predicted to fit in memory
    - none: no recomputation
    - full: whole blocks, about a third more FLOPs
    - alternate: every second block, about a sixth more FLOPs
    - selective: all except the outputs of matrix products and attention
    - budget: the cheapest half, chosen by torch.compile (torch 2.13 and later)
    - budget-75, budget-25: as budget, with 75% or 25% of the activations' memory stored"""
    loss: Literal["auto", Loss] = "auto"
    """Implementation of the cross-entropy loss.
    - auto: fused on a GPU; on a CPU plain, unless the logits would make the micro-batch smaller
    - plain: stores the logits of all tokens
    - fused: computed with the output head in chunks, without storing all logits"""
    loss_chunks: int = 1
    """Number of chunks of the fused loss (at least 1); above 1 implies --loss fused.
    By default a chunk has at most 8,192 tokens."""
    allocator: Literal["auto", Allocator] = "auto"
    """Segments in which torch's allocator reserves GPU memory.
    - auto: expandable, which leaves the least memory unused
    - default: segments of the requested size, which smaller tensors may split (torch's default)
    - split: as default, but segments above 512 MiB are not split (max_split_size_mb)
    - expandable: segments that grow (expandable_segments).
    The environment variable PYTORCH_ALLOC_CONF overrides this setting."""
    offload_optimizer: bool = False
    """Keep the optimizer's state in the host's memory, and update the weights on the CPU (ZeRO-Offload).
    Only for one worker with a GPU, and for the optimizers adamw, adamw-fused, lion and sgd."""
    deterministic: bool = False
    """Use only deterministic algorithms, so that equal runs on one machine give equal losses bit for bit.
    An operation that has none ends the run. Some operations become slower."""
    fsdp: bool = False
    """Shard weights, gradients and optimizer state over the workers (FSDP2) instead of a copy on each (DDP)."""
    ablate: Annotated[tuple[Ablation, ...], tyro.conf.arg(metavar="[NAME ...]")] = ()
    """Loop optimizations to disable, to measure what each contributes. Without it:
    - async-loss: each loss is read immediately, and the loop waits for the device
    - set-to-none: gradients are filled with zeros instead of dropped
    - prefetch: each batch is read and copied only when it is needed
    - gc-pause: the garbage collector stays on
    - large-pages: large tensors are stored in a CPU's pages of 4 KB"""

    def __post_init__(self) -> None:
        check_part(self, loss_chunks=1)
        for name in self.ablate:
            if name not in get_args(Ablation):
                raise UserError(f"--ablate {name} is not a valid value. Choose from {', '.join(get_args(Ablation))}.")
        check_combinations(vars(self), self._conflicts())

    def _conflicts(self) -> Iterator[Conflict]:
        on_cpu = ("device", self.device == "cpu")
        yield ("precision", self.precision == "fp16"), on_cpu, "loss scaling needs a GPU; use bf16 or fp32"
        yield ("attention", self.attention in (*FUSED_ATTENTION, "flex")), on_cpu, "a CPU supports only manual and sdpa"
        fp32_only = ("precision", self.precision in ("fp32", "tf32"))
        half_only = ("attention", self.attention in ("flash", "cudnn"))
        yield half_only, fp32_only, "these kernels only support 16-bit precision; use bf16 or fp16"
        fused = ("attention", self.attention in FUSED_ATTENTION)
        yield fused, ("mask_books", self.mask_books), "these kernels do not support the mask; use auto or flex"
        selective, blocks = ("checkpointing", self.checkpointing == "selective"), ("compile", self.compile == "blocks")
        yield selective, blocks, "a compiled block is recomputed as a whole; use --compile whole"
        graphless = ("compile", self.compile not in ("auto", *WHOLE_GRAPH))
        budget = ("checkpointing", self.checkpointing in ACTIVATION_BUDGETS)
        yield budget, graphless, "the budget needs a compiled graph; use --compile whole"
        fp8 = ("fp8", self.fp8)
        yield fp8, on_cpu, "8-bit matrix products need a GPU"
        not_bf16 = ("precision", self.precision in ("fp32", "tf32", "fp16"))
        yield fp8, not_bf16, "8-bit matrix products need bf16 in the other operations; use --precision bf16"
        deterministic, tuned = ("deterministic", self.deterministic), ("compile", self.compile in GPU_KERNELS)
        yield deterministic, tuned, "tuning chooses kernels by their speed, which differs between runs; use whole"
        offload = ("offload_optimizer", self.offload_optimizer)
        yield offload, on_cpu, "the optimizer is on the CPU already"
        yield offload, ("precision", self.precision == "fp16"), "loss scaling skips updates on the GPU; use bf16"
        fsdp = ("fsdp", self.fsdp)
        yield fsdp, ("precision", self.precision == "fp16"), "loss scaling is not synchronized between shards; use bf16"
        whole = ("compile", self.compile in (*WHOLE_GRAPH, *EAGER_BACKENDS))
        yield fsdp, whole, "gathering the weights of a block breaks the graph; use --compile blocks"
        yield fsdp, fp8, "this combination is not supported"


@strict
@dataclass(frozen=True)
class Execution(ExecutionConfig):
    """Resolved settings of the model's execution. The defaults execute it eagerly on a CPU.

    On a GPU ``attention`` may still be ``auto``, which uses the GPU's fastest kernel that supports the inputs.
    """

    device: Device = "cpu"
    precision: Precision = "fp32"
    attention: Attention = "sdpa"
    compile: Compile = "off"
    checkpointing: Checkpointing = "none"
    loss: Loss = "plain"
    allocator: Allocator = "default"
