"""Resolve the settings of a config that are ``auto``, for the device that will train.

Every command that starts a run resolves its config here, so that the run, its memory estimate, the space of a search
and the report agree. The device may be another machine's. torch is only imported for the memory estimate.
"""

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from infra.device.hardware import A100, DeviceInfo, cpu_info, device_info
from infra.errors import UserError
from infra.storage.directory import StorageDir
from pipeline.shards import MANIFEST_FILE, Manifest, read_manifest
from train.config import (
    ACTIVATION_BUDGETS,
    AUTO,
    EAGER_BACKENDS,
    Checkpointing,
    Compile,
    ExecutionConfig,
    Loss,
    Precision,
    ResolvedConfig,
    Step,
    StepConfig,
    TrainConfig,
)
from train.data.assumed import TOKENS_PER_PARAMETER, assume_manifest
from train.data.sources import source_of
from train.data.tokenizer import match_tokenizer
from train.estimate.recomputation import CHECKPOINTING_BY_TIME, recomputation_time
from train.model_config import AnyModel

CPU_TOKENS = 4096
"""Maximum number of tokens in a micro-batch that is chosen automatically for a CPU; its caches do not benefit from
more."""

OVERHEAD_TOKENS = 700
"""Number of tokens that a GPU could process in the time of a micro-batch beyond its arithmetic, which launches and
partly filled waves take: 3 ms for GPT-2 124M on an A100 (an assumption). By it ``--checkpointing auto`` weighs
recomputation against smaller micro-batches."""

MAX_ACCUMULATION = 1_000_000
"""Maximum number of micro-batches per optimizer step. Each micro-batch is timed; the times of so many need 0.2 GB."""

BY_MEMORY = ("micro_batch", "loss", "checkpointing")
"""Settings that are resolved by the available memory when a run starts, and are kept when it is resumed."""

COMPILED_ON_GPU: tuple[Compile, Compile] = ("whole", "reduce-overhead")
"""Values of ``compile`` between which the speed of the GPU decides: without and with CUDA graphs."""


def resolve(
    requested: TrainConfig, device_info: DeviceInfo, saved_settings: Mapping[str, Any] | None = None
) -> ResolvedConfig:
    """Return ``requested`` with all settings resolved for the device that ``device_info`` describes.

    On a GPU ``attention`` stays ``auto``, which means a list of kernels in the best order for the GPU.
    ``saved_settings`` are the settings of the run that is resumed; its settings in ``BY_MEMORY`` are kept. Raises
    ``UserError`` if the device lacks a requested feature, or if a resolved value contradicts the rest of the config.
    """
    check_device_available(requested.execution, device_info)
    decisions = _memory_decisions(requested.step, saved_settings) if saved_settings else {}
    config = requested.replace(**decisions).with_model(inspect_model(requested.model))
    execution = config.execution
    device = device_info.kind if execution.device == AUTO else execution.device
    cuda = device == "cuda"
    precision, attention, allocator = execution.precision, execution.attention, execution.allocator
    if precision == AUTO:
        precision = _precision(config.step, device_info, saved_settings or {}) if cuda else "fp32"
    has_flex = cuda and execution.mask_books and not config.model.unsupported_reason("attention", "flex")
    if attention == AUTO and has_flex:
        attention = "flex"
    elif attention == AUTO and (not cuda or config.model.unsupported_reason("attention", "flash")):
        attention = "sdpa"
    if allocator == AUTO:
        allocator = "expandable" if cuda and not device_info.allocator_blocker else "default"
    compile = _compile(execution, device_info) if execution.compile == AUTO else execution.compile
    decided = config.replace(
        device=device, precision=precision, attention=attention, compile=compile, allocator=allocator
    )
    check_device_support(decided.execution, device_info)
    decided = decided.replace(**_choose_by_memory(decided.step, device_info.memory))
    if config.execution.compile == AUTO and decided.execution.compile == COMPILED_ON_GPU[0]:
        decided = decided.replace(compile=_whole_or_graphs(decided.step, device_info, saved_settings or {}))
    resolved = ResolvedConfig.from_resolved(decided, requested)
    batch = resolved.batch
    if batch.accumulation > MAX_ACCUMULATION:
        raise UserError(
            f"--global-batch {batch.global_batch:,} would need {batch.accumulation:,} micro-batches of "
            f"{batch.micro_batch:,} per step; the maximum is {MAX_ACCUMULATION:,}. Reduce --global-batch or increase "
            "--micro-batch."
        )
    return resolved


def prepare(config: TrainConfig, manifest: Manifest) -> TrainConfig:
    """Return ``config`` with all that its data and its model decide: absolute paths, the tokenizer's size, the model's
    info.

    ``manifest`` is that of its data.
    """
    source = source_of(config.dataset).absolute()
    model = match_tokenizer(config.model, source.load_tokenizer(manifest), source.dataset.source)
    return replace(config, dataset=source.dataset).with_model(inspect_model(model))


def resolve_local(config: TrainConfig, manifest: Manifest | None = None) -> ResolvedConfig:
    """Resolve ``config`` for its token shards and the device of this machine; reads ``manifest`` if it is None."""
    return resolve(prepare(config, manifest or read_manifest(config.dataset.data)), device_info())


def prepare_for_plan(config: TrainConfig) -> tuple[TrainConfig, Manifest]:
    """Prepare ``config`` for its token shards or, if there are none, for data with the model's vocabulary.

    Such data have 20 tokens per parameter, or one step's tokens if these are more.

    Returns: (prepared config, manifest of its data).
    """
    if not config.dataset.stream and StorageDir.of(config.dataset.data).exists(MANIFEST_FILE):
        manifest = read_manifest(config.dataset.data)
        return prepare(config, manifest), manifest
    config = config.with_model(inspect_model(config.model))
    return config, assume_manifest(max(TOKENS_PER_PARAMETER * config.model.parameters, config.step_tokens))


def resolve_for_plan(config: TrainConfig, device_info: DeviceInfo, memory_limit: int | None = None) -> ResolvedConfig:
    """Resolve the prepared ``config`` to plan a run that need not run here.

    The device is the one of ``device_info``, or an A100 if ``config`` requests a GPU and ``device_info`` is a CPU. It
    needs no compiler, and no torch that supports the GPU.
    """
    device_info = A100 if config.execution.device == "cuda" and device_info.kind == "cpu" else device_info
    device_info = replace(device_info, compile_blocker="", gpu_blocker="")
    return resolve(config, device_info.with_memory_limit(memory_limit))


def check_device_available(execution: ExecutionConfig, device_info: DeviceInfo) -> None:
    """Raise ``UserError`` if ``execution`` requests a GPU that there is not, or would use one that does not work."""
    if execution.device != "cpu" and device_info.gpu_blocker:
        gpu = device_info.name if device_info.kind == "cuda" else "The GPU"
        raise UserError(f"{gpu} cannot be used: {device_info.gpu_blocker}, or use --device cpu.")
    if execution.device == "cuda" and device_info.kind != "cuda":
        raise UserError(
            f"--device cuda: no GPU found, because {device_info.gpu_absence or 'there is none'}. Use --device cpu."
        )


def check_device_support(execution: ExecutionConfig, device_info: DeviceInfo) -> None:
    """Raise ``UserError`` if the device that ``device_info`` describes does not support ``execution``."""
    if execution.fp8 and device_info.capability < (8, 9):
        raise UserError(
            f"--fp8 needs 8-bit matrix products (compute capability 8.9), which {device_info.name} lacks. Remove --fp8."
        )
    if execution.allocator == "expandable" and execution.device == "cuda" and device_info.allocator_blocker:
        raise UserError(
            f"--allocator expandable does not work on {device_info.name}: {device_info.allocator_blocker}. Use "
            "--allocator default."
        )
    compiles = execution.compile not in ("off", *EAGER_BACKENDS) and execution.device == device_info.kind
    if compiles and device_info.compile_blocker:
        raise UserError(
            f"--compile {execution.compile} does not work on {device_info.name}: {device_info.compile_blocker}. Fix "
            "that, or use --compile off."
        )


def inspect_model(model: AnyModel) -> AnyModel:
    """Return ``model`` with what running a custom model once shows, if that is not known yet.

    Raises ``UserError`` for a model that cannot be trained.
    """
    if not model.needs_inspection:
        return model
    from train.models.builders import builder_of

    return builder_of(model).inspect()


def _precision(step: StepConfig, device_info: DeviceInfo, saved_settings: Mapping[str, Any]) -> Precision:
    """Return the value of ``precision`` for ``auto`` on a GPU; a run that began in bf16 stays in bf16."""
    execution = step.execution
    if not device_info.bf16:
        # Loss scaling, which fp16 needs, is not synchronized between shards.
        return "fp16" if device_info.capability >= (7, 0) and not execution.fsdp else "fp32"
    # With shards and with 8-bit matrix products, bf16 activations have not been shown to learn as well.
    keeps_bf16 = execution.fsdp or execution.fp8 or saved_settings.get("precision") == "bf16"
    if keeps_bf16 or step.model.unsupported_reason("precision", "bf16-activations"):
        return "bf16"
    return "bf16-activations"


def _compile(execution: ExecutionConfig, device_info: DeviceInfo) -> Compile:
    """Return the value of ``compile`` for ``auto``."""
    if execution.checkpointing in ACTIVATION_BUDGETS:
        return "whole"  # The budget is an option of the compiler for a whole graph.
    if execution.device == "cpu" or device_info.kind == "cpu" or device_info.compile_blocker:
        return "off"
    if execution.fsdp:  # Each block's weights are gathered before it, so a graph cannot contain several blocks.
        return "off" if execution.checkpointing == "selective" else "blocks"
    return "whole"


def _whole_or_graphs(step: StepConfig, device_info: DeviceInfo, saved_settings: Mapping[str, Any]) -> Compile:
    """Choose between the whole graph without and with CUDA graphs, as the resumed run did, else by predicted times.

    CUDA graphs launch all kernels of a pass at once, which is faster where the CPU takes longer to launch them than the
    GPU to compute them. They need as much memory, because compiled code has the same tensors.
    """
    whole, graphs = COMPILED_ON_GPU
    if saved_settings.get("compile") in COMPILED_ON_GPU:
        return saved_settings["compile"]
    execution = step.execution
    # Gradients of several workers are summed while the backward pass runs, and masks of books are made outside of it.
    if step.batch.workers > 1 or execution.mask_books or execution.checkpointing in ACTIVATION_BUDGETS:
        return whole
    from train.estimate.estimates import estimates_of
    from train.estimate.gpu_rates import published_rates

    gpu_rates, resolved = published_rates(device_info), Step.from_resolved(step)
    if gpu_rates is None:
        return whole
    estimates = estimates_of(resolved.model)
    return graphs if estimates.is_launch_bound(resolved.batch, resolved.execution, gpu_rates) else whole


def _choose_by_memory(step: StepConfig, memory: int) -> dict[str, Any]:
    """Choose the values of ``BY_MEMORY`` that are ``auto``, so that the step is predicted to fit ``memory`` bytes.

    Of the kinds of activation checkpointing, each with the largest micro-batch that fits, the one with the least
    predicted time is chosen. Where nothing is expected to fit, what needs least memory is tried.
    """
    if not any(step.setting(name) == AUTO for name in BY_MEMORY):
        return {}
    from train.estimate.memory import fits, peak_with_margin

    best, best_time = None, math.inf
    least: list[Step] = []
    for checkpointing in _checkpointing_choices(step):
        candidates = _candidates(step.replace(checkpointing=checkpointing))
        if _relative_time(candidates[0]) >= best_time:  # Predicting memory takes seconds for a custom model.
            break
        choice = next((candidate for candidate in candidates if fits(candidate, memory)), None)
        if choice is None:
            least.append(min(candidates, key=peak_with_margin))
        elif (time := _relative_time(choice)) < best_time:
            best, best_time = choice, time
    choice = best or min(least, key=peak_with_margin)
    return {name: choice.setting(name) for name in BY_MEMORY}


def _relative_time(step: Step) -> float:
    """Return the predicted time per token, relative to a large micro-batch without recomputation."""
    tokens = step.batch.micro_batch * step.model.context_length
    return (1 + recomputation_time(step.execution.checkpointing)) * (1 + OVERHEAD_TOKENS / tokens)


def _checkpointing_choices(step: StepConfig) -> list[Checkpointing]:
    """Return the kinds of activation checkpointing to choose from, the fastest first."""
    if step.execution.checkpointing != AUTO:
        return [step.execution.checkpointing]
    from train.models.recompute import supports_budgets

    choices: list[Checkpointing] = []
    for checkpointing in CHECKPOINTING_BY_TIME:
        with suppress(UserError):  # The model or another setting does not support some kinds.
            step.replace(checkpointing=checkpointing)
            if checkpointing not in ACTIVATION_BUDGETS or supports_budgets():
                choices.append(checkpointing)
    return choices


def _candidates(step: StepConfig) -> list[Step]:
    """Return ``step`` with each micro-batch and loss to choose from, the best first.

    A larger micro-batch is better. On a GPU the fused loss is as fast as the plain one and needs less memory; on a CPU
    the plain loss is preferred where it allows the same micro-batch.
    """
    on_cpu = step.execution.device == "cpu"
    micro_batch, loss, chunks = step.batch.micro_batch, step.execution.loss, step.execution.loss_chunks
    sizes, length = step.micro_batches if micro_batch == AUTO else [micro_batch], step.model.context_length
    if on_cpu and micro_batch == AUTO:
        sizes = [size for size in sizes if size * length <= CPU_TOKENS] or sizes[:1]
    losses: list[Loss] = [loss] if loss != AUTO else ["plain", "fused"] if on_cpu and chunks == 1 else ["fused"]
    if loss == AUTO and step.model.unsupported_reason("loss", "fused"):
        losses = ["plain"]
    return [
        Step.from_resolved(step.replace(micro_batch=size, loss=loss)) for size in reversed(sizes) for loss in losses
    ]


def _memory_decisions(requested: StepConfig, saved_settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a run with ``saved_settings`` chose by its memory, and ``requested`` leaves ``auto``.

    A micro-batch that is impossible with another number of workers is chosen again.
    """
    decisions = {name: saved_settings[name] for name in BY_MEMORY if requested.setting(name) == AUTO}
    if decisions.get("micro_batch") not in requested.micro_batches:
        decisions.pop("micro_batch", None)
    return decisions


def local_device_info(execution: ExecutionConfig) -> DeviceInfo:
    """Return the device of this machine on which ``execution`` would train. Raises ``UserError`` without the device or
    the accelerator that it requests."""
    info = cpu_info() if execution.device == "cpu" else device_info()
    check_device_available(execution, info)
    if execution.accelerator and execution.accelerator not in info.name:
        raise UserError(
            f"This machine has no {execution.accelerator} (--accelerator), but {info.name}. Remove the flag, or join "
            "a cluster with --address."
        )
    return info
