"""Decide what a config leaves open, in one place, for the device that will train.

In: a config, which may contain ``auto``, and facts about that device. Out: the same config with everything decided.
Whatever starts a run calls this and passes the result on, so that the run, its memory estimate, the space of a search
and the report cannot disagree. Does not import torch: the device may be another machine's.
"""

from dataclasses import replace

from infra.errors import UserError
from infra.hardware import A100, DeviceFacts, cpu_facts, device_facts
from train.config import TrainConfig


def resolve(config: TrainConfig, facts: DeviceFacts) -> TrainConfig:
    """``config`` with device, precision and attention decided for the device that ``facts`` describe.

    On a GPU ``attention`` stays ``auto``, which means a list of kernels in the best order for the GPU. A config that
    leaves nothing open is returned unchanged. Raises ``UserError`` when the device lacks what is asked for, or when a
    decision contradicts the rest of the config.
    """
    kind = facts.kind if config.device == "auto" else config.device
    if kind == "cuda" and facts.kind != "cuda":
        raise UserError("--device cuda was given, but there is no CUDA GPU: use --device auto or --device cpu.")
    cuda = kind == "cuda"
    precision, attention = config.precision, config.attention
    if precision == "auto":
        precision = "bf16" if cuda and facts.bf16 else "fp32"
    flexible = not config.model.dropout and config.model.width // config.model.heads >= 16
    if attention == "auto" and cuda and config.mask_books and flexible:
        attention = "flex"
    elif attention == "auto" and not cuda:
        attention = "sdpa"
    if config.fp8 and facts.capability < (8, 9):
        raise UserError(f"--fp8 needs 8-bit matmuls, which {facts.name} does not have: leave it out.")
    return replace(config, device=kind, precision=precision, attention=attention)


def facts_here(config: TrainConfig) -> DeviceFacts:
    """The device of this machine on which ``config`` would train. Raises ``UserError`` without its accelerator."""
    facts = cpu_facts() if config.device == "cpu" else device_facts()
    if config.accelerator and config.accelerator not in facts.name:
        raise UserError(
            f"--accelerator {config.accelerator} is not in this machine, which has {facts.name}: leave it out, or name "
            "a cluster with --address."
        )
    return facts


def resolve_for_plan(config: TrainConfig, facts: DeviceFacts) -> TrainConfig:
    """``config`` resolved for this machine's device or, if it asks for a GPU and there is none, for an A100."""
    return resolve(config, A100 if config.device == "cuda" and facts.kind == "cpu" else facts)
