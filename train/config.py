"""What a run is: the model, the mathematics of its steps, and how they are executed.

Every default lives here once, on the field it belongs to. A config that contradicts itself is refused
when it is made, by a sentence that names both fields. Suites and searches vary it with
``dataclasses.replace``; commands read it from flags or from ``--config FILE.json``.
"""

import json
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from infra.command import UserError
from infra.units import SecondsOrNone, one_word, or_none
from pipeline.config import Reading
from train.rules import divisors as divisors
from train.rules import refuse_contradictions, refuse_other_types

Precision = Literal["auto", "fp32", "tf32", "fp16", "bf16", "bf16-activations"]
Attention = Literal["auto", "manual", "sdpa", "flash", "cudnn", "efficient", "flex"]
Compile = Literal["off", "whole", "blocks", "max-autotune", "reduce-overhead"]
Checkpointing = Literal["none", "full", "selective"]
Loss = Literal["plain", "fused"]
Optimizer = Literal["adamw", "adamw-fused", "adamw-8bit", "adamw-bf16", "adafactor", "muon"]
Schedule = Literal["cosine", "wsd", "constant"]
Device = Literal["auto", "cuda", "cpu"]
Naive = Literal["sync", "zero", "copy", "collect", "pages"]


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a GPT-2: sizes count elements, not bytes."""

    layers: int = 12
    heads: int = 12
    width: int = 768
    context_length: int = 1024
    vocabulary: int = 50257
    padded_vocabulary: int = 50304
    """Rows of the embedding and the head; a multiple of 64 fills whole tensor-core tiles. Ids past
    ``vocabulary`` never occur."""
    dropout: float = 0.0
    bias: bool = True
    tied: bool = True
    """Share the token embedding with the head."""

    def __post_init__(self) -> None:
        for size in ("layers", "heads", "width", "context_length", "vocabulary"):
            if getattr(self, size) < 1:
                raise UserError(f"model {size}={getattr(self, size)} must be at least 1.")
        if self.width % self.heads:
            raise UserError(f"model width={self.width} is not divisible by heads={self.heads}.")
        if self.padded_vocabulary < self.vocabulary:
            raise UserError(
                f"model padded_vocabulary={self.padded_vocabulary} is smaller than vocabulary={self.vocabulary}."
            )
        if not 0 <= self.dropout < 1:
            raise UserError(f"model dropout={self.dropout} must be at least 0 and below 1.")


PRESETS: dict[str, ModelConfig] = {
    "gpt2-124m": ModelConfig(),
    "gpt2-355m": ModelConfig(layers=24, heads=16, width=1024),
    "gpt2-774m": ModelConfig(layers=36, heads=20, width=1280),
    "gpt2-1558m": ModelConfig(layers=48, heads=25, width=1600),
    "small": ModelConfig(layers=4, heads=4, width=256, context_length=512),
    "tiny": ModelConfig(layers=2, heads=2, width=64, context_length=128),
}
"""The four published GPT-2 sizes, and two that train on a CPU."""


def parse_model(text: str) -> ModelConfig:
    """``gpt2-124m``, or a preset with changes: ``tiny,layers=4,dropout=0.1``. Raises ``UserError``."""
    preset, *changes = [part.strip() for part in text.split(",")]
    if preset not in PRESETS:
        raise UserError(f"--model {preset!r} is no preset; the presets are {', '.join(PRESETS)}.")
    types = {field.name: field.type for field in fields(ModelConfig)}
    values: dict[str, Any] = {}
    for change in changes:
        name, _, value = change.partition("=")
        if name not in types or not value:
            raise UserError(f"--model {text!r}: {change!r} is not FIELD=VALUE with a field among {', '.join(types)}.")
        try:
            kind = types[name]
            values[name] = {"true": True, "false": False}[value.lower()] if kind is bool else kind(value)  # type: ignore[operator]
        except (ValueError, KeyError):
            raise UserError(f"--model {text!r}: {value!r} is no value for {name}.") from None
    return replace(PRESETS[preset], **values)


def format_model(model: ModelConfig) -> str:
    """The shortest text that :func:`parse_model` turns into ``model``."""
    texts = []
    for name, preset in PRESETS.items():
        changed = {k: v for k, v in asdict(model).items() if v != getattr(preset, k)}
        texts.append(",".join([name, *(f"{k}={str(v).lower()}" for k, v in changed.items())]))
    return min(texts, key=lambda text: text.count(","))


_MODEL = one_word("PRESET[,FIELD=VALUE...]", ModelConfig, parse_model, format_model)
Model = Annotated[ModelConfig, _MODEL]
ModelOrNone = Annotated[ModelConfig | None, or_none(_MODEL)]


@dataclass(frozen=True)
class Cycle:
    """The rhythm of a run: ``train`` steps, then ``val`` validation batches of the same size, then a report."""

    train: int = 200
    val: int = 20

    @classmethod
    def parse(cls, text: str) -> "Cycle":
        """``200+20``."""
        train, plus, val = text.partition("+")
        if not (plus and train.isdecimal() and val.isdecimal() and int(train) > 0):
            raise UserError(f"--cycle {text!r} is not N+M, such as 200+20: training steps, then validation batches.")
        return cls(int(train), int(val))

    def __str__(self) -> str:
        return f"{self.train}+{self.val}"


CycleText = Annotated[Cycle, one_word("N+M", Cycle, Cycle.parse, str)]


@dataclass(frozen=True)
class TrainConfig:
    """One training run. The first group is the mathematics, the second how it is executed, the third how long."""

    data: Path = Path("data/tokens")
    """Folder of token shards, as python -m pipeline.tokenize makes it."""
    stream: tuple[str, ...] = ()
    """Train straight from these books in place of --data, without shards: files, folders, globs, or whatever else
    python -m pipeline.tokenize takes. Ray Data encodes them ahead of the training. The last flags, from --text-field
    on, are that command's and say how the books are read."""
    reading: Annotated[Reading, tyro.conf.arg(name="")] = field(default_factory=Reading)
    """How the books of ``stream`` are read and cleaned."""
    model: Model = PRESETS["gpt2-124m"]
    """Preset, with changes if any: gpt2-124m, gpt2-355m, gpt2-774m, gpt2-1558m, small, tiny; tiny,layers=4."""
    seed: int = 0
    """Seed of the weights, the order of the windows, and dropout."""
    global_batch: int = 480
    """Sequences per optimizer step, over all micro-batches and workers."""
    learning_rate: float = 6e-4
    """Peak learning rate."""
    schedule: Schedule = "cosine"
    """After warm-up: cosine down to a tenth of the peak at the run's end; wsd, which stays at the peak and falls
    to zero over the last fifth; or constant."""
    warmup_steps: int = 100
    """Steps of linear warm-up; shortened to a tenth of a run that is short."""
    weight_decay: float = 0.1
    """Decay of the matrices; biases and norms have none."""
    beta1: float = 0.9
    """Adam's decay of the first moment."""
    beta2: float = 0.95
    """Adam's decay of the second moment."""
    clip_norm: float = 1.0
    """Gradient norm above which gradients are scaled down; 0 is off."""
    mask_books: bool = False
    """Keep attention within a book where a window spans several."""
    spike: float = 3.0
    """Stop when a step's loss is this many nats above the mean of the cycle before it; 0 is off. NaN always stops."""

    micro_batch: int = 32
    """Sequences per forward pass on one worker; accumulation follows from the global batch."""
    precision: Precision = "auto"
    """Arithmetic: fp32; tf32 matmuls; fp16 autocast with loss scaling; bf16 autocast; bf16 activations throughout,
    the residual stream too, over fp32 weights. auto is bf16 on GPUs that have it, else fp32 (on most CPUs bf16 is
    emulated and many times slower)."""
    attention: Attention = "auto"
    """Attention: manual (materialises the T x T matrix); sdpa, where torch chooses the kernel; one kernel of it and
    no other; flex (FlexAttention). auto puts the kernels in the order that suits the GPU."""
    compile: Compile = "off"
    """torch.compile: off, the whole model, each block and the loss on its own (faster to start), the whole model with
    kernels tuned by trial (max-autotune, without CUDA graphs), or in CUDA graphs (reduce-overhead)."""
    checkpointing: Checkpointing = "none"
    """Activations that the backward pass computes again: none; selective, all but matmuls' and attention's; full,
    each whole block, for about a third more arithmetic."""
    loss: Loss = "plain"
    """Cross-entropy: plain, or fused with the head, which computes both piece by piece and keeps no logits."""
    loss_chunks: int = 1
    """Pieces of the fused loss; more than one implies it. By default a piece has at most 2,048 tokens."""
    fp8: bool = False
    """Multiply the blocks' matrices in 8-bit floats, scaled per tensor (torchao, on GPUs that have them)."""
    optimizer: Optimizer = "adamw-fused"
    """AdamW, a kernel per operation or one fused kernel; with 8-bit moments; with bf16 weights rounded
    stochastically (both torchao); Adafactor; Muon for the blocks' matrices with AdamW for the rest."""
    device: Device = "auto"
    """auto takes a CUDA GPU when there is one."""
    workers: int = 1
    """Data-parallel workers; with cuda each has one GPU."""
    shard: bool = False
    """Shard weights, gradients and optimizer state over the workers (FSDP2) in place of a copy on each (DDP)."""
    naive: tuple[Naive, ...] = ()
    """Textbook habits to measure against: sync reads every loss at once, zero fills gradients in place of dropping
    them, copy reads and copies each batch when it is needed, collect leaves the garbage collector on, pages leaves
    large tensors in a CPU's small pages."""
    loader_workers: int = 0
    """Threads that read batches ahead; 0: the loop reads the next one itself, while the device computes."""
    accelerator: str | None = None
    """Kind of GPU that Ray must give the workers, as Ray names it: A100, H200. A name that the cluster lacks waits."""

    steps: int | None = None
    """Optimizer steps to train for. Without this, --tokens and --time-budget, one epoch."""
    tokens: int | None = None
    """Training tokens to train for."""
    time_budget: SecondsOrNone = None
    """Time to train for: 90s, 5m, 1h. It begins behind the first step, which compiles."""
    within: float | None = None
    """End early once the speed is known to this fraction: 0.005 is half a percent, by a confidence sequence."""
    cycle: CycleText = Cycle()
    """Training steps and validation batches between two reports."""
    checkpoint_every: int = 200
    """Steps between two checkpoints; one more is written at the end."""
    keep_checkpoints: int = 2
    """Checkpoints kept, the newest ones; 0 writes none."""
    copy_to: str | None = None
    """Object storage (s3://bucket/folder, gs://...) that keeps a copy of them; --resume s3://bucket/folder/NAME
    continues the run on another machine."""

    def __post_init__(self) -> None:
        refuse_contradictions(self)

    @property
    def accumulation(self) -> int:
        """Micro-batches per optimizer step on each worker."""
        return self.global_batch // (self.micro_batch * self.workers)

    @property
    def source(self) -> str:
        """What is trained on, as a person named it."""
        return ", ".join(self.stream) or str(self.data)

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
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values |= {"data": str(self.data), "model": asdict(self.model), "cycle": str(self.cycle)}
        if self.stream:
            return values | {"reading": asdict(self.reading)}
        del values["reading"]  # without a stream it says nothing, and what was saved before it existed stays equal
        return values


def config_from_json(values: dict[str, Any], source: str) -> TrainConfig:
    """The config that ``values`` describe; ``source`` names where they come from in a refusal."""
    if not isinstance(values, dict):
        raise UserError(f"{source} holds {values!r} where the settings of a run belong.")
    known = {field.name: field.type for field in fields(TrainConfig)}
    unknown = sorted(set(values) - known.keys())
    if unknown:
        raise UserError(f"{source} has the unknown setting {unknown[0]!r}; the settings are {', '.join(known)}.")
    values = dict(values)
    try:
        if "data" in values:
            values["data"] = Path(values["data"])
        if "model" in values:
            model = values["model"]
            values["model"] = parse_model(model) if isinstance(model, str) else model_from_json(model)
        if "reading" in values:
            values["reading"] = reading_from_json(values["reading"])
        if "cycle" in values:
            values["cycle"] = Cycle.parse(str(values["cycle"]))
        for name in ("naive", "stream"):
            if isinstance(values.get(name), list):
                values[name] = tuple(values[name])
        refuse_other_types(values, TrainConfig)
        return TrainConfig(**values)
    except UserError as mistake:
        raise UserError(f"{source}: {mistake}") from mistake
    except TypeError as mistake:
        raise UserError(f"{source} does not describe a run: {mistake}.") from mistake


def model_from_json(values: dict[str, Any]) -> ModelConfig:
    """The model of these sizes. Raises ``UserError``, or ``TypeError`` for what is no model's field."""
    refuse_other_types(values, ModelConfig)
    return ModelConfig(**values)


def reading_from_json(values: dict[str, Any]) -> Reading:
    """How books are read, by these settings. Raises ``UserError``, or ``TypeError`` for what is no such setting."""
    if isinstance(values, dict) and isinstance(values.get("languages"), list):
        values = values | {"languages": tuple(values["languages"])}
    refuse_other_types(values, Reading)
    return Reading(**values)


def load_config(path: Path, flag: str = "--config") -> TrainConfig:
    """Read the file that ``flag`` names: a run's ``config.json`` or a search's ``best.json``. Raises ``UserError``."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"{flag} {path} does not exist; a run keeps runs/NAME/config.json, a search runs/NAME/best.json."
        ) from None
    except (OSError, ValueError, RecursionError) as damage:  # no JSON, a number without end, brackets without end
        raise UserError(f"{flag} {path} cannot be read as JSON: {damage}.") from damage
    if not isinstance(values, dict):
        raise UserError(f"{flag} {path} holds no JSON object of settings.")
    return config_from_json(values.get("config", values), str(path))
