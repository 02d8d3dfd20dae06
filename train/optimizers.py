"""Optimizers from torch, with decay where it belongs, and the learning-rate schedule."""

import math

import torch
from torch import nn

from train.config import TrainConfig


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """AdamW (arXiv 1711.05101) over two groups: matrices decay, vectors (biases, norms) do not."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups,
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        fused=True if config.optimizer == "adamw-fused" else None,
    )


def learning_rate(config: TrainConfig, step: int, total: int | None, progress: float) -> float:
    """The rate of ``step`` (from 0) of ``total`` (None if not known) when ``progress`` (0 to 1) of the run has passed.

    Linear warm-up, then cosine down to a tenth of the peak (Chinchilla's choice, arXiv 2203.15556).
    """
    warmup = min(config.warmup_steps, max(1, total // 10)) if total else config.warmup_steps
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    if config.schedule == "constant":
        return config.learning_rate
    return config.learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, progress))))
