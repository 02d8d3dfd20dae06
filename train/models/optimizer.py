"""Optimizers, with weight decay only for matrices, and the learning-rate schedule."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from infra.errors import UserError
from train.config import OptimizationConfig, Optimizer
from train.models.blocks import repeated_blocks


def make_optimizer(model: nn.Module, optimization: OptimizationConfig) -> torch.optim.Optimizer:
    """Create the optimizer, with one parameter group for matrices and one without weight decay for biases and norms.

    The papers are arXiv 1711.05101 (AdamW), 2110.02861 (8-bit moments), 1804.04235 (Adafactor) and 2502.16982 (Muon).
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    if optimization.optimizer == "muon":
        matrices = {p for block in repeated_blocks(model) for p in block.parameters() if p.dim() == 2}
        hidden = [p for p in parameters if p in matrices]
        other_parameters = [p for p in parameters if p not in matrices]
        muon = torch.optim.Muon(
            hidden,
            lr=optimization.learning_rate,
            weight_decay=optimization.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        )
        return CombinedOptimizer(
            [muon, _adamw(_groups(other_parameters, optimization.weight_decay), optimization, fused=True)]
        )
    groups = _groups(parameters, optimization.weight_decay)
    betas = (optimization.beta1, optimization.beta2)
    match optimization.optimizer:
        case "adafactor":
            return torch.optim.Adafactor(groups, lr=optimization.learning_rate)
        case "adamw-8bit":
            return _torchao(optimization.optimizer).AdamW8bit(groups, lr=optimization.learning_rate, betas=betas)
        case "adamw-bf16":
            return _torchao(optimization.optimizer)._AdamW(
                groups, lr=optimization.learning_rate, betas=betas, bf16_stochastic_round=True
            )
        case _:
            return _adamw(groups, optimization, fused=optimization.optimizer == "adamw-fused")


def _groups(parameters: list[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def _adamw(groups: list[dict[str, Any]], optimization: OptimizationConfig, *, fused: bool) -> torch.optim.Optimizer:
    betas = (optimization.beta1, optimization.beta2)
    kernel = {"fused": True} if fused else {"foreach": True}
    return torch.optim.AdamW(groups, lr=optimization.learning_rate, betas=betas, **kernel)  # type: ignore[arg-type]


def _torchao(optimizer: Optimizer) -> Any:
    try:
        import torchao.optim  # type: ignore[import-not-found]
    except ImportError:
        raise UserError(
            f"--optimizer {optimizer} needs torchao, which is not installed. Install it with 'pip install torchao', or "
            "choose another --optimizer."
        ) from None
    return torchao.optim


class CombinedOptimizer(torch.optim.Optimizer):
    """Several optimizers with different parameters as one optimizer."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step every optimizer; closures are not supported."""
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, state_dict["parts"], strict=True):
            optimizer.load_state_dict(state)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of every group, in place if it is a tensor, as torchao's compiled step needs it."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def learning_rate(optimization: OptimizationConfig, step: int, total: int | None, progress: float) -> float:
    """Compute the learning rate of ``step`` (from 0) at ``progress`` (0 to 1) of a run with ``total`` steps, if known.

    After a linear warm-up, the schedule is a cosine to a tenth of the peak (as Chinchilla's, arXiv 2203.15556),
    warm-up-stable-decay with a linear decrease over the last fifth (arXiv 2405.18392), or constant.
    """
    warmup = min(optimization.warmup_steps, max(1, total // 10)) if total else optimization.warmup_steps
    warmup_fraction = (step + 1) / warmup if warmup else 1.0
    if total is None:  # Warm-up ends after a tenth of the time budget at the latest.
        warmup_fraction = max(warmup_fraction, 10 * progress)
    if warmup_fraction < 1:
        return optimization.learning_rate * warmup_fraction
    match optimization.schedule:
        case "constant":
            return optimization.learning_rate
        case "wsd":
            return optimization.learning_rate * min(1.0, (1 - min(1.0, progress)) / 0.2)
        case "cosine":
            warmup_end = warmup / total if total else 0.0
            phase = min(1.0, max(0.0, progress - warmup_end) / (1 - warmup_end)) if warmup_end < 1 else 1.0
            return optimization.learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * phase)))
