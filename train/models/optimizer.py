"""Optimizers, with weight decay only for matrices, and the learning-rate schedule."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from infra.device.pinned import pinned_like
from infra.errors import UserError
from train.config import OptimizationConfig, Optimizer
from train.models.blocks import repeated_blocks


def make_optimizer(
    model: nn.Module, optimization: OptimizationConfig, *, offload: bool = False
) -> torch.optim.Optimizer:
    """Create the optimizer, with one parameter group for matrices and one without weight decay for biases and norms.

    If ``offload``, its state is in the host's memory. The papers are arXiv 1711.05101 (AdamW), 2110.02861 (8-bit
    moments), 1804.04235 (Adafactor), 2502.16982 (Muon), 2302.06675 (Lion) and 2101.06840 (ZeRO-Offload).
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
    if offload:
        return OffloadedOptimizer(parameters, lambda copies: _of_groups(copies, optimization))
    return _of_groups(parameters, optimization)


def _of_groups(parameters: list[nn.Parameter], optimization: OptimizationConfig) -> torch.optim.Optimizer:
    """Create an optimizer that treats all ``parameters`` alike, except for weight decay."""
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
        case "lion":
            return Lion(groups, lr=optimization.learning_rate, betas=betas)
        case "sgd":
            return torch.optim.SGD(groups, lr=optimization.learning_rate, momentum=optimization.beta1, fused=True)
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


class Lion(torch.optim.Optimizer):
    """Lion (arXiv 2302.06675, program 1): the sign of an average of momentum and gradient, with weight decay."""

    def __init__(self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float]) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the parameters that have gradients; closures are not supported."""
        for group in self.param_groups:
            (beta1, beta2), rate = group["betas"], group["lr"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                update = state["momentum"].lerp(parameter.grad, 1 - beta1).sign_()
                parameter.mul_(1 - rate * group["weight_decay"]).add_(update, alpha=-rate)
                state["momentum"].lerp_(parameter.grad, 1 - beta2)


class OffloadedOptimizer(torch.optim.Optimizer):
    """An optimizer whose state is in the host's memory and which updates the weights on the CPU.

    Its parameters are copies of the weights. A step copies all gradients to the host, updates the copies there, and
    copies them to the device. Both copies are pinned for a GPU, in two large tensors, because torch rounds the size of
    each pinned allocation up to a power of two.

    Args:
        parameters: weights on the device.
        factory: makes the optimizer of the copies.
    """

    def __init__(
        self, parameters: list[nn.Parameter], factory: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    ) -> None:
        self.weights = parameters
        like = torch.empty(sum(p.numel() for p in parameters), device="meta")
        make = pinned_like if parameters[0].is_cuda else partial(torch.empty_like, device="cpu")
        values, gradients = make(like), make(like)
        sizes = [p.numel() for p in parameters]
        self.copies = [nn.Parameter(value.view_as(p)) for p, value in zip(parameters, values.split(sizes), strict=True)]
        self._gradients = [g.view_as(p) for p, g in zip(parameters, gradients.split(sizes), strict=True)]
        self._copy_weights()
        self.optimizer = factory(self.copies)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    @torch.no_grad()
    def _copy_weights(self) -> None:
        for weight, copy in zip(self.weights, self.copies, strict=True):
            copy.copy_(weight)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the weights on the CPU; closures are not supported."""
        for weight, copy, gradient in zip(self.weights, self.copies, self._gradients, strict=True):
            copy.grad = None if weight.grad is None else gradient.copy_(weight.grad, non_blocking=True)
        if self.weights[0].is_cuda:
            torch.cuda.current_stream().synchronize()
        self.optimizer.step()
        for weight, copy in zip(self.weights, self.copies, strict=True):
            weight.copy_(copy, non_blocking=True)  # The next step waits for the copies before it changes their source.

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients on the device, or fill them with zeros."""
        for weight in self.weights:
            if set_to_none:
                weight.grad = None
            elif weight.grad is not None:
                weight.grad.zero_()

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state, after the weights on the device have been loaded."""
        self._copy_weights()
        self.optimizer.load_state_dict(state_dict)


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
