"""What a training config may not say: settings that contradict each other, refused by a sentence that names both.

In: a config being made. Out: nothing, or ``UserError``. What depends on the machine (its GPU, its
packages) is asked in :mod:`train.execution`.
"""

import math
from collections.abc import Mapping
from dataclasses import fields
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

from infra.command import UserError
from pipeline.config import Reading

if TYPE_CHECKING:
    from train.config import TrainConfig

FUSED_ATTENTION = ("flash", "cudnn", "efficient")
SIXTEEN_BITS = ("fp16", "bf16", "bf16-activations")
HABITS = ("sync", "zero", "copy", "collect", "pages")
TORCHAO_OPTIMIZERS = ("adamw-8bit", "adamw-bf16")
WHOLE_GRAPH = ("whole", "max-autotune", "reduce-overhead")
"""Settings of ``--compile`` that make one graph of the model."""


KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def refuse_other_types(values: Mapping[str, Any], record: type) -> None:
    """Raise ``UserError`` for the first value of a file that its field in ``record`` cannot hold."""
    for field in fields(record):
        if field.name in values and not _is(values[field.name], field.type):
            words = [KINDS[kind] for kind in KINDS if _is(kind(), field.type)]
            listed = "a list of texts" if get_origin(field.type) is tuple else "as its flag takes it"
            raise UserError(f"{field.name} is {values[field.name]!r}, and must be {words[-1] if words else listed}.")


def _is(value: Any, kind: Any) -> bool:
    arguments = get_args(kind)
    match get_origin(kind):
        case origin if origin in (Union, UnionType):
            return any(_is(value, one) for one in arguments)
        case origin if origin is Annotated:
            return _is(value, arguments[0])
        case origin if origin is Literal:
            return isinstance(value, str)  # which one is asked by _choices
        case origin if origin is tuple:
            return isinstance(value, tuple) and all(_is(one, arguments[0]) for one in value)
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


def divisors(number: int) -> list[int]:
    """All divisors of ``number``, ascending."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def refuse_contradictions(config: "TrainConfig") -> None:
    """Raise ``UserError`` for the first rule that ``config`` breaks."""
    _choices(config)
    _sizes(config)
    _copies(config)
    _batch(config)
    _end(config)
    _reading(config)
    for (first, ours), (second, theirs), reason in _pairs(config):
        if ours and theirs:
            raise UserError(f"{_flag(config, first)} and {_flag(config, second)} exclude each other: {reason}.")


def _flag(config: "TrainConfig", name: str) -> str:
    """``--mask-books``, or ``--precision fp16`` with its value; ``model.dropout=0.1`` for a model's field."""
    if name.startswith("model."):
        return f"{name}={getattr(config.model, name.removeprefix('model.'))}"
    value = getattr(config, name)
    flag = f"--{name.replace('_', '-')}"
    return flag if value is True else f"{flag} {value}"


def _choices(config: "TrainConfig") -> None:
    for field in fields(config):
        if get_origin(field.type) is Literal and getattr(config, field.name) not in get_args(field.type):
            allowed = ", ".join(get_args(field.type))
            raise UserError(f"{_flag(config, field.name)} is not known; it can be {allowed}.")
    for habit in config.naive:
        if habit not in HABITS:
            raise UserError(f"--naive {habit} is not known; it can be {', '.join(HABITS)}.")


def _sizes(config: "TrainConfig") -> None:
    for name in ("global_batch", "micro_batch", "loss_chunks", "workers", "checkpoint_every"):
        if getattr(config, name) < 1:
            raise UserError(f"{_flag(config, name)} must be at least 1.")
    for name in ("keep_checkpoints", "loader_workers", "warmup_steps", "clip_norm", "spike", "weight_decay", "seed"):
        if not getattr(config, name) >= 0:
            raise UserError(f"{_flag(config, name)} must not be negative.")
    if config.global_batch >= 2**31:  # one that the micro-batch does not divide would have us look for its divisors
        raise UserError(f"{_flag(config, 'global_batch')} is more sequences than books have: give less than 2^31.")
    if config.seed >= 2**63:
        raise UserError(f"{_flag(config, 'seed')} must be below 2^63: torch's generators take no more.")
    if config.within is not None and not 0 < config.within < 1:
        raise UserError(f"{_flag(config, 'within')} must be a fraction between 0 and 1.")
    if not config.learning_rate > 0:
        raise UserError(f"{_flag(config, 'learning_rate')} must be above 0.")
    for name in ("beta1", "beta2"):
        if not 0 <= getattr(config, name) < 1:
            raise UserError(f"{_flag(config, name)} must be at least 0 and below 1.")


def _copies(config: "TrainConfig") -> None:
    if config.copy_to is not None and not config.copy_to.startswith(("s3://", "gs://")):
        raise UserError(
            f"{_flag(config, 'copy_to')} is no object storage: give s3://bucket/folder or gs://bucket/folder."
        )


def _batch(config: "TrainConfig") -> None:
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


def _end(config: "TrainConfig") -> None:
    ends = [name for name in ("steps", "tokens", "time_budget") if getattr(config, name) is not None]
    if len(ends) > 1:
        first, second = (f"--{name.replace('_', '-')}" for name in ends[:2])
        raise UserError(f"{first} and {second} both end the run; give one of them.")
    if config.stream and not ends:
        raise UserError(
            f"--stream {' '.join(config.stream)} has no end that is known beforehand: say when to stop with --steps, "
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


def _reading(config: "TrainConfig") -> None:
    if config.stream:
        return
    for field in fields(Reading):
        if getattr(config.reading, field.name) != field.default:
            raise UserError(
                f"--{field.name.replace('_', '-')} is about books and this run reads none: name them with --stream, or "
                "give it to 'python -m pipeline.tokenize', which makes the shards of --data."
            )


def _pairs(config: "TrainConfig"):
    """Pairs of (field, whether its value is concerned) that exclude each other, and why."""
    model, device = config.model, config.device
    attention, precision, optimizer = config.attention, config.precision, config.optimizer
    on_cpu = ("device", device == "cpu")
    whole = ("compile", config.compile in WHOLE_GRAPH)
    yield ("precision", precision == "fp16"), on_cpu, "loss scaling needs a GPU; use bf16 or fp32"
    yield ("attention", attention in (*FUSED_ATTENTION, "flex")), on_cpu, "a CPU has manual and sdpa"
    fp32_only = ("precision", precision in ("fp32", "tf32"))
    yield ("attention", attention in ("flash", "cudnn")), fp32_only, "these kernels exist in 16 bits only"
    yield ("attention", attention == "flex"), ("model.dropout", model.dropout > 0), "FlexAttention has no dropout"
    narrow = ("model.heads", model.width // model.heads < 16)
    yield ("attention", attention == "flex"), narrow, "FlexAttention's heads are at least 16 wide"
    masked = ("mask_books", config.mask_books)
    yield ("attention", attention in FUSED_ATTENTION), masked, "these kernels know no such mask; use auto or flex"
    selective = ("checkpointing", config.checkpointing == "selective")
    blocks = ("compile", config.compile == "blocks")
    yield selective, blocks, "a compiled block hides what to keep, so all is computed again; use --compile whole"
    no_checkpoints = ("keep_checkpoints", config.keep_checkpoints == 0)
    yield ("copy_to", config.copy_to is not None), no_checkpoints, "there would be nothing to copy"
    yield ("fp8", config.fp8), on_cpu, "8-bit matmuls are a GPU's"
    not_bf16 = ("precision", precision in ("fp32", "tf32", "fp16"))
    yield ("fp8", config.fp8), not_bf16, "the rest of the model runs in bf16 then"
    not_stream = ("precision", precision != "bf16-activations")
    yield ("optimizer", optimizer == "adamw-bf16"), not_stream, "bf16 weights need --precision bf16-activations"
    several = ("workers", config.workers > 1)
    yield ("optimizer", optimizer == "adamw-bf16"), several, "each worker would round its own copy of the weights"
    shard = ("shard", config.shard)
    yield shard, ("workers", config.workers == 1), "there is nothing to shard over"
    yield shard, ("precision", precision == "fp16"), "loss scaling would have to agree between shards"
    unsharded = ("optimizer", optimizer in (*TORCHAO_OPTIMIZERS, "adafactor", "muon"))
    yield shard, unsharded, "only AdamW works on shards"
    yield shard, whole, "gathering a block's weights would break the graph; use --compile blocks"
    yield shard, ("fp8", config.fp8), "this pair is not supported"
    readers = ("loader_workers", config.loader_workers > 1)
    yield readers, ("stream", bool(config.stream)), "a stream has one reader, which meets its books in order"
