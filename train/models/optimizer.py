"""Optimizers, with weight decay for matrices only, and the learning-rate schedule."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from infra.errors import UserError
from train.config import OptimizationConfig, Optimizer
from train.models.blocks import repeated_blocks


def make_optimizer(model: nn.Module, optimization: OptimizationConfig) -> torch.optim.Optimizer:
    """The config's optimizer over two groups: matrices decay, vectors (biases, norms) do not.

    AdamW is arXiv 1711.05101, its 8-bit moments 2110.02861, Adafactor 1804.04235, and Muon 2502.16982.
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
            f"--optimizer {optimizer} needs torchao, which is not installed: 'pip install "
            "torchao', or choose another --optimizer."
        ) from None
    return torchao.optim


class CombinedOptimizer(torch.optim.Optimizer):
    """Several optimizers, each over its own parameters, as one."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for part in self.optimizers for group in part.param_groups]

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step every part; closures are not supported."""
        for part in self.optimizers:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.optimizers:
            part.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.optimizers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self.optimizers, state_dict["parts"], strict=True):
            part.load_state_dict(state)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of every group; torchao keeps it in a tensor, so that compiled steps stay valid."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def learning_rate(optimization: OptimizationConfig, step: int, total: int | None, progress: float) -> float:
    """The rate of ``step`` (from 0) of ``total`` (None if not known) when ``progress`` (0 to 1) of the run has passed.

    Linear warm-up; then cosine down to a tenth of the peak (Chinchilla's choice, arXiv 2203.15556), or
    warm-up-stable-decay with a linear fall over the last fifth (arXiv 2405.18392), or constant.
    """
    warmup = min(optimization.warmup_steps, max(1, total // 10)) if total else optimization.warmup_steps
    warm = (step + 1) / warmup if warmup else 1.0
    if total is None:  # a tenth of the time ends the warm-up too: a short run would never leave it
        warm = max(warm, 10 * progress)
    if warm < 1:
        return optimization.learning_rate * warm
    match optimization.schedule:
        case "constant":
            return optimization.learning_rate
        case "wsd":
            return optimization.learning_rate * min(1.0, (1 - min(1.0, progress)) / 0.2)
        case "cosine":
            start = warmup / total if total else 0.0  # it begins where the warm-up ends
            fallen = min(1.0, max(0.0, progress - start) / (1 - start)) if start < 1 else 1.0
            return optimization.learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * fallen)))
