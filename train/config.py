"""The settings of a run: the model, the mathematics of its steps, and how they are executed.

Every default is defined here once, on its field. A contradictory config is refused when it is created, by a sentence
that names both fields. Suites and searches vary it with ``dataclasses.replace``; commands read it from flags or from
``--config FILE.json``.
"""

import json
import math
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin, get_type_hints

import tyro
from pydantic import BeforeValidator, PlainSerializer

from infra.cli.units import SecondsOrNone, check_numbers, single_value_flag
from infra.errors import UserError
from infra.schema import from_json, strict, to_json
from infra.storage.directory import StorageDir
from pipeline.config import ReadingConfig
from train.model_config import PRESETS, Model, ModelConfig, format_model

Precision = Literal["auto", "fp32", "tf32", "fp16", "bf16", "bf16-activations"]
Attention = Literal["auto", "manual", "sdpa", "flash", "cudnn", "efficient", "flex"]
Compile = Literal[
    "auto", "off", "whole", "blocks", "coordinate-descent", "max-autotune", "max-autotune-graphs", "reduce-overhead"
]
Checkpointing = Literal["none", "full", "alternate", "selective", "budget"]
Loss = Literal["auto", "plain", "fused"]
Optimizer = Literal["adamw", "adamw-fused", "adamw-8bit", "adamw-bf16", "adafactor", "muon"]
Schedule = Literal["cosine", "wsd", "constant"]
Device = Literal["auto", "cuda", "cpu"]
Allocator = Literal["auto", "default", "split", "expandable"]
Ablation = Literal["sync", "zero", "copy", "collect", "pages"]


MAX_CYCLE = 10_000_000
"""Steps of the longest cycle: the losses of all of them stay on the device until it ends."""

MAX_READERS = 1024
"""Threads that read batches, each with a buffer."""


@dataclass(frozen=True)
class Cycle:
    """What a run repeats: ``train`` steps, then ``val`` validation batches of the same size, then a report.

    Validation is of the same held-out windows each time, of all of them where ``val`` batches would need more.
    """

    train: int = 200
    val: int = 20

    @classmethod
    def parse(cls, text: str) -> "Cycle":
        train, plus, val = text.partition("+")
        if not (plus and train.isdecimal() and val.isdecimal() and int(train) > 0):
            raise UserError(f"--cycle {text!r} is not N+M, such as 200+20: training steps, then validation batches.")
        if max(int(train), int(val)) > MAX_CYCLE:
            raise UserError(f"--cycle {text} is too long: both numbers may be at most {MAX_CYCLE:,}.")
        return cls(int(train), int(val))

    def __str__(self) -> str:
        return f"{self.train}+{self.val}"


CycleText = Annotated[
    Cycle,
    single_value_flag("N+M", Cycle, Cycle.parse, str),
    BeforeValidator(lambda text: Cycle.parse(str(text))),
    PlainSerializer(str),
]


AUTO = -1
"""The micro-batch of a config that leaves it to be decided, written ``auto`` in flags and files."""


def _parse_micro_batch(text: str) -> int:
    if text == "auto":
        return AUTO
    if not (text.isdecimal() and int(text)):
        raise UserError(f"--micro-batch {text} must be at least 1, or auto.")
    return int(text)


MicroBatch = Annotated[
    int,
    single_value_flag("INT|auto", int, _parse_micro_batch, lambda size: "auto" if size == AUTO else str(size)),
    BeforeValidator(lambda value: AUTO if value == "auto" else value),
    PlainSerializer(lambda size: "auto" if size == AUTO else size),
]


@strict
@dataclass(frozen=True)
class TrainConfig:
    """The settings of one training run: its mathematics, its execution, and its length."""

    flag_groups: ClassVar[dict[str, tuple[str, ...]]] = {
        "data": ("data", "stream"),
        "model and optimizer": (
            "model", "global_batch", "seed", "learning_rate", "schedule", "warmup_steps", "weight_decay", "optimizer",
            "beta1", "beta2", "clip_norm", "mask_books", "spike",
        ),
        "memory": ("micro_batch", "checkpointing", "loss", "loss_chunks", "allocator"),
        "speed": ("precision", "attention", "compile", "fp8", "loader_workers", "ablate"),
        "device": ("device", "workers", "shard", "accelerator"),
        "length and checkpoints": (
            "steps", "tokens", "time_budget", "within", "cycle", "checkpoint_every", "keep_checkpoints",
        ),
    }  # fmt: skip

    data: Annotated[str, tyro.conf.arg(metavar="DIR")] = "data/tokens"
    """Token shards, created by python -m pipeline.tokenize: a folder, or s3://bucket/folder (gs://, az://)."""
    stream: Annotated[tuple[str, ...], tyro.conf.arg(metavar="[SOURCE ...]")] = ()
    """Books to train on directly instead of --data, given as sources of pipeline.tokenize.
    Ray Data encodes them while the model trains."""
    reading: ReadingConfig = field(default_factory=ReadingConfig)
    """Settings for reading and cleaning the books of --stream."""
    model: Model = PRESETS["gpt2-124m"]
    """Preset, optionally with changes (tiny,layers=4): gpt2-124m, gpt2-355m, gpt2-774m, gpt2-1558m, small, edu-3m,
    tiny. Or a custom model as package.module:callable,width=512, an nn.Module whose forward takes (inputs, targets).
    Its vocabulary follows the data unless it is set."""
    seed: int = 0
    """Seed of the weights, the order of the windows, and dropout (at least 0)."""
    global_batch: int = 480
    """Sequences per optimizer step over all workers (at least 1, a multiple of --micro-batch x --workers)."""
    learning_rate: float = 6e-4
    """Peak learning rate (above 0)."""
    schedule: Schedule = "cosine"
    """Learning-rate schedule after warm-up.
    - cosine: falls to a tenth of the peak at the end of the run
    - wsd: stays at the peak, and falls to zero over the last fifth of the run
    - constant: stays at the peak"""
    warmup_steps: int = 100
    """Steps of linear warm-up (at least 0); at most a tenth of the run's steps are used."""
    weight_decay: float = 0.1
    """Weight decay of the matrices (at least 0); biases and norms have none."""
    beta1: float = 0.9
    """Adam's decay rate of the first moment (at least 0 and below 1)."""
    beta2: float = 0.95
    """Adam's decay rate of the second moment (at least 0 and below 1)."""
    clip_norm: float = 1.0
    """Gradient norm above which gradients are scaled down (0: off)."""
    mask_books: bool = False
    """Restrict attention to one book in windows that span several."""
    spike: float = 3.0
    """Increase of a step's loss over the mean of the previous cycle, in nats, at which the run stops (0: off).
    A loss of NaN always stops the run."""

    micro_batch: MicroBatch = AUTO
    """Sequences per forward pass on one worker (at least 1); the accumulation follows from the global batch.
    - auto: the largest that is predicted to fit in memory; retried with the next smaller one if it does not. On a CPU
    at most 4096 tokens"""
    precision: Precision = "auto"
    """Precision of the model's arithmetic.
    - auto: bf16 on GPUs that support it, else fp32, because most CPUs only emulate bf16, which is far slower
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
    compile: Annotated[Compile, tyro.conf.arg(metavar="MODE")] = "auto"
    """Part of the model that torch.compile compiles, and its mode.
    - auto: whole on a GPU if torch can compile for it, off on a CPU
    - off: no compilation
    - whole: the whole model as one graph
    - blocks: each block and the loss separately, which starts faster
    - coordinate-descent: the whole model; kernel sizes are tuned one by one
    - max-autotune: the whole model; kernels are chosen by benchmarks
    - max-autotune-graphs: max-autotune with CUDA graphs
    - reduce-overhead: the whole model with CUDA graphs"""
    checkpointing: Checkpointing = "none"
    """Activation checkpointing: activations that are recomputed in the backward pass to save memory.
    - none: no recomputation
    - full: whole blocks, about a third more FLOPs
    - alternate: every second block, about a sixth more FLOPs
    - selective: all except the outputs of matrix products and attention
    - budget: the cheapest half, chosen by torch.compile (torch 2.13 and later)"""
    loss: Loss = "auto"
    """Implementation of the cross-entropy loss.
    - auto: fused if the logits would make the micro-batch smaller, else plain
    - plain: stores the logits of all tokens
    - fused: computed with the output head in chunks, without storing all logits"""
    loss_chunks: int = 1
    """Number of chunks of the fused loss (at least 1); above 1 implies --loss fused.
    By default a chunk has at most 2,048 tokens."""
    fp8: bool = False
    """Compute the matrix products of blocks in 8-bit floats, scaled per tensor (torchao, on GPUs that support them)."""
    optimizer: Optimizer = "adamw-fused"
    """Optimizer.
    - adamw: AdamW with one kernel per operation; with fp16 each step waits for the GPU
    - adamw-fused: AdamW in one fused kernel
    - adamw-8bit: AdamW with 8-bit moments (torchao)
    - adamw-bf16: AdamW with bf16 weights and stochastic rounding (torchao)
    - adafactor: Adafactor, which waits for the GPU at each weight
    - muon: Muon for the matrices of the blocks, AdamW for all other parameters"""
    allocator: Allocator = "auto"
    """Segments in which torch's allocator reserves GPU memory.
    - auto: expandable, which leaves the least memory unused
    - default: segments of the requested size, which smaller tensors may split (torch's default)
    - split: as default, but segments above 512 MiB are not split (max_split_size_mb)
    - expandable: segments that grow (expandable_segments).
    The environment variable PYTORCH_ALLOC_CONF overrides this setting."""
    device: Device = "auto"
    """Device to train on; auto is a CUDA GPU if there is one, else the CPU."""
    workers: int = 1
    """Number of data-parallel workers (at least 1); with cuda each has one GPU."""
    shard: bool = False
    """Shard weights, gradients and optimizer state over the workers (FSDP2) instead of a copy on each (DDP)."""
    ablate: Annotated[tuple[Ablation, ...], tyro.conf.arg(metavar="[NAME ...]")] = ()
    """Loop optimizations to disable, to measure what each contributes.
    - sync: read each loss at once, and wait for the device
    - zero: fill gradients with zeros instead of dropping them
    - copy: read and copy each batch only when it is needed
    - collect: leave the garbage collector on
    - pages: store large tensors in a CPU's small pages"""
    loader_workers: int = 0
    """Number of threads that read batches ahead (0: the loop itself reads the next batch while the device computes)."""
    accelerator: Annotated[str | None, tyro.conf.arg(metavar="GPU")] = None
    """Type of GPU that the workers need, by Ray's name, such as A100 or H200. Waits until the cluster has one."""

    steps: int | None = None
    """Number of optimizer steps (at least 1). By default, without --tokens and --time-budget too, one epoch."""
    tokens: int | None = None
    """Number of training tokens (at least those of one step)."""
    time_budget: SecondsOrNone = None
    """Training time (above 0), such as 90s, 5m or 1h. It starts after the first step, which compiles."""
    within: float | None = None
    """Relative half-width of the speed's confidence sequence at which the run ends early (between 0 and 1; such as
    0.005). By default the speed does not end the run."""
    cycle: CycleText = Cycle()
    """Training steps (at least 1), then validation batches, between two reports.
    Every validation uses the same held-out windows, and all of them if they are fewer."""
    checkpoint_every: int = 200
    """Number of steps between two checkpoints (at least 1); a run that ends also writes one."""
    keep_checkpoints: int = 2
    """Number of newest checkpoints to keep (0: write none)."""

    def __post_init__(self) -> None:
        check_consistency(self)

    @property
    def gpt2_config(self) -> ModelConfig:
        """The shape of the GPT-2 that is trained; a custom model has none."""
        assert isinstance(self.model, ModelConfig), "asked of a GPT-2 only"
        return self.model

    @property
    def accumulation(self) -> int:
        """Micro-batches per optimizer step on each worker."""
        assert self.micro_batch != AUTO, "a resolved config has a micro-batch"
        return self.global_batch // (self.micro_batch * self.workers)

    @property
    def micro_batches(self) -> list[int]:
        """The micro-batches that fit the global batch, the workers and the pieces of the loss, in ascending order."""
        length = self.model.context_length
        return [n for n in divisors(self.global_batch // self.workers) if n * length % self.loss_chunks == 0]

    @property
    def source(self) -> str:
        """The data, as the user named it."""
        return ", ".join(self.stream) or self.data

    @property
    def step_tokens(self) -> int:
        """Training tokens per optimizer step, over all workers."""
        return self.global_batch * self.model.context_length

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps of the run; None when a time budget or the end of the epoch ends it."""
        if self.tokens is not None:
            return self.tokens // self.step_tokens
        return self.steps

    def to_json(self) -> dict[str, Any]:
        """The config as JSON values; :func:`config_from_json` reads it back."""
        values = to_json(self)
        if not self.stream:
            del values["reading"]  # it has no effect then
        return values


CHOICES = {name: get_args(kind) for name, kind in get_type_hints(TrainConfig).items() if get_origin(kind) is Literal}
"""The values that are known of a setting that has names for them."""


def config_from_json(values: Any, source: str) -> TrainConfig:
    """The config that ``values`` describe. Raises ``UserError``, which names ``source`` as their origin."""
    return from_json(TrainConfig, values, source)


def load_config(path: Path | str, flag: str = "--config") -> TrainConfig:
    """The file that ``flag`` names: a run's ``config.json`` or a search's ``best.json``, also in object storage."""
    where = StorageDir.of(path)
    try:
        values = json.loads(where.parent.read(where.name))
    except FileNotFoundError:
        raise UserError(
            f"{flag} {path} does not exist; a run has runs/NAME/config.json, a search runs/NAME/best.json."
        ) from None
    except (OSError, ValueError, RecursionError) as damage:  # not JSON, or a number or nesting that is too long
        raise UserError(f"{flag} {path} cannot be read as JSON: {damage}.") from damage
    if not isinstance(values, dict):
        raise UserError(f"{flag} {path} is not a JSON object of settings.")
    return config_from_json(values.get("config", values), str(path))


def divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


FUSED_ATTENTION = ("flash", "cudnn", "efficient")

HALF_PRECISIONS = ("fp16", "bf16", "bf16-activations")

TORCHAO_OPTIMIZERS = ("adamw-8bit", "adamw-bf16")

WHOLE_GRAPH = ("whole", "coordinate-descent", "max-autotune", "max-autotune-graphs", "reduce-overhead")
"""Values of ``--compile`` that compile the model as one graph."""

CUDA_GRAPHS = ("max-autotune-graphs", "reduce-overhead")
"""Values of ``--compile`` that record the graph's kernels and replay them."""

GPU_KERNELS = ("coordinate-descent", "max-autotune", "max-autotune-graphs")
"""Values of ``--compile`` that tune kernels which only GPUs have."""

SWITCHES = (
    "attention", "checkpointing", "compile", "fp8", "loss", "loss_chunks", "mask_books", "optimizer", "precision",
    "shard",
)  # fmt: skip
"""Settings that not every model has."""


def check_consistency(config: TrainConfig) -> None:
    _choices(config)
    _sizes(config)
    _batch(config)
    _end(config)
    _reading(config)
    for name in SWITCHES:
        if reason := config.model.unsupported_reason(name, getattr(config, name)):
            raise UserError(f"{_flag(config, name)} does not apply to --model {format_model(config.model)}: {reason}.")
    for (first, first_value), (second, second_value), reason in _conflicts(config):
        if first_value and second_value:
            raise UserError(f"{_flag(config, first)} and {_flag(config, second)} cannot be combined: {reason}.")
    check_numbers(config)


def _flag(config: TrainConfig, name: str) -> str:
    """``--mask-books``, or ``--precision fp16`` with its value."""
    value = getattr(config, name)
    flag = f"--{name.replace('_', '-')}"
    return flag if value is True else f"{flag} {value}"


def _choices(config: TrainConfig) -> None:
    for name, known in CHOICES.items():
        if getattr(config, name) not in known:
            raise UserError(f"{_flag(config, name)} is not known; choose one of {', '.join(known)}.")
    for name in config.ablate:
        if name not in get_args(Ablation):
            raise UserError(f"--ablate {name} is not known; choose one of {', '.join(get_args(Ablation))}.")


def _sizes(config: TrainConfig) -> None:
    for name in ("global_batch", "micro_batch", "loss_chunks", "workers", "checkpoint_every"):
        if getattr(config, name) < 1 and (name, getattr(config, name)) != ("micro_batch", AUTO):
            raise UserError(f"{_flag(config, name)} must be at least 1.")
    for name in ("keep_checkpoints", "loader_workers", "warmup_steps", "clip_norm", "spike", "weight_decay", "seed"):
        if not getattr(config, name) >= 0:
            raise UserError(f"{_flag(config, name)} must not be negative.")
    if config.global_batch >= 2**31:  # searching the divisors of larger numbers would take too long
        raise UserError(f"{_flag(config, 'global_batch')} is too many sequences: give less than 2^31.")
    if config.loader_workers > MAX_READERS:
        raise UserError(f"{_flag(config, 'loader_workers')} must be at most {MAX_READERS:,}.")
    if config.within is not None and not 0 < config.within < 1:
        raise UserError(f"{_flag(config, 'within')} must be a fraction between 0 and 1.")
    if not config.learning_rate > 0:
        raise UserError(f"{_flag(config, 'learning_rate')} must be above 0.")
    for name in ("beta1", "beta2"):
        if not 0 <= getattr(config, name) < 1:
            raise UserError(f"{_flag(config, name)} must be at least 0 and below 1.")


def _batch(config: TrainConfig) -> None:
    if config.micro_batch == AUTO:
        if config.global_batch % config.workers:
            raise UserError(f"--global-batch {config.global_batch} is not a multiple of --workers {config.workers}.")
        if not config.micro_batches:
            raise UserError(
                f"--loss-chunks {config.loss_chunks} does not divide the "
                f"{config.global_batch // config.workers * config.model.context_length} tokens of --global-batch "
                f"{config.global_batch} on each worker."
            )
        return
    if config.global_batch % (config.micro_batch * config.workers):
        near = [m for m in divisors(config.global_batch) if config.global_batch % (m * config.workers) == 0]
        hint = f"for --micro-batch {', '.join(map(str, near))} it is" if near else "choose another --global-batch"
        raise UserError(
            f"--global-batch {config.global_batch} is not a multiple of --micro-batch {config.micro_batch} "
            f"x --workers {config.workers}; {hint}."
        )
    tokens = config.micro_batch * config.model.context_length
    if tokens % config.loss_chunks:
        raise UserError(
            f"--loss-chunks {config.loss_chunks} does not divide the {tokens} tokens of "
            f"--micro-batch {config.micro_batch}."
        )


def _end(config: TrainConfig) -> None:
    ends = [name for name in ("steps", "tokens", "time_budget") if getattr(config, name) is not None]
    if len(ends) > 1:
        first, second = (f"--{name.replace('_', '-')}" for name in ends[:2])
        raise UserError(f"{first} and {second} both end the run; give one of them.")
    if config.stream and not ends:
        raise UserError(
            f"--stream {' '.join(config.stream)} has no end that is known in advance: say when to stop with --steps, "
            "--tokens or --time-budget."
        )
    if config.time_budget is not None and not 0 < config.time_budget < math.inf:
        raise UserError(f"--time-budget {config.time_budget}s must be above 0.")
    if config.steps is not None and config.steps < 1:
        raise UserError(f"--steps {config.steps} must be at least 1.")
    if config.tokens is not None and config.tokens < config.step_tokens:
        raise UserError(
            f"--tokens {config.tokens:,} is less than one step: --global-batch {config.global_batch} sequences "
            f"of {config.model.context_length} are {config.step_tokens:,} tokens."
        )


def _reading(config: TrainConfig) -> None:
    if config.stream:
        return
    for setting in fields(ReadingConfig):
        if getattr(config.reading, setting.name) != setting.default:
            raise UserError(
                f"--{setting.name.replace('_', '-')} is about books, but this run reads none: name them with --stream, "
                "or give it to 'python -m pipeline.tokenize', which makes the shards of --data."
            )


def _conflicts(config: TrainConfig):
    """Pairs of (field, whether its value is affected) that cannot be combined, and the reason."""
    device = config.device
    attention, precision, optimizer = config.attention, config.precision, config.optimizer
    on_cpu = ("device", device == "cpu")
    whole = ("compile", config.compile in WHOLE_GRAPH)
    yield ("precision", precision == "fp16"), on_cpu, "loss scaling needs a GPU; use bf16 or fp32"
    yield ("attention", attention in (*FUSED_ATTENTION, "flex")), on_cpu, "a CPU has manual and sdpa"
    fp32_only = ("precision", precision in ("fp32", "tf32"))
    yield ("attention", attention in ("flash", "cudnn")), fp32_only, "these kernels exist in 16 bits only"
    masked = ("mask_books", config.mask_books)
    yield ("attention", attention in FUSED_ATTENTION), masked, "these kernels do not support the mask; use auto or flex"
    selective = ("checkpointing", config.checkpointing == "selective")
    blocks = ("compile", config.compile == "blocks")
    yield selective, blocks, "a compiled block hides what to keep, so all of it is recomputed; use --compile whole"
    graphless = ("compile", config.compile not in ("auto", *WHOLE_GRAPH))
    yield ("checkpointing", config.checkpointing == "budget"), graphless, "a compiled graph is what the budget is for"
    yield ("fp8", config.fp8), on_cpu, "8-bit matmuls need a GPU"
    not_bf16 = ("precision", precision in ("fp32", "tf32", "fp16"))
    yield ("fp8", config.fp8), not_bf16, "with it the rest of the model runs in bf16"
    not_stream = ("precision", precision != "bf16-activations")
    yield ("optimizer", optimizer == "adamw-bf16"), not_stream, "bf16 weights need --precision bf16-activations"
    several = ("workers", config.workers > 1)
    yield ("optimizer", optimizer == "adamw-bf16"), several, "each worker would round its own copy of the weights"
    shard = ("shard", config.shard)
    yield shard, ("workers", config.workers == 1), "sharding needs several workers"
    yield shard, ("precision", precision == "fp16"), "loss scaling would have to agree between shards"
    unsharded = ("optimizer", optimizer in (*TORCHAO_OPTIMIZERS, "adafactor", "muon"))
    yield shard, unsharded, "only AdamW supports sharding"
    yield shard, whole, "gathering a block's weights would break the graph; use --compile blocks"
    yield shard, ("fp8", config.fp8), "this combination is not supported"
    readers = ("loader_workers", config.loader_workers > 1)
    yield readers, ("stream", bool(config.stream)), "a stream is read by one thread, in the order of its books"
