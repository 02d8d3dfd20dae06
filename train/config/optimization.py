"""Settings of the optimizer and of its learning-rate schedule."""

from dataclasses import dataclass
from typing import Literal

from infra.errors import UserError
from infra.schema import strict
from train.config.checks import check_part, format_flag

Optimizer = Literal["adamw", "adamw-fused", "adamw-8bit", "adamw-bf16", "adafactor", "muon", "lion", "sgd"]
Schedule = Literal["cosine", "wsd", "constant"]

TORCHAO_OPTIMIZERS = ("adamw-8bit", "adamw-bf16")
"""Values of ``--optimizer`` that torchao implements."""

OFFLOADED_OPTIMIZERS = ("adamw", "adamw-fused", "lion", "sgd")
"""Values of ``--optimizer`` whose update a CPU can compute in little more time than it reads the weights."""


@strict
@dataclass(frozen=True)
class OptimizationConfig:
    """Settings of the optimizer and of its learning-rate schedule."""

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
    optimizer: Optimizer = "adamw-fused"
    """Optimizer.
    - adamw: AdamW with one kernel per operation; with fp16 each step waits for the GPU
    - adamw-fused: AdamW in one fused kernel
    - adamw-8bit: AdamW with 8-bit moments (torchao)
    - adamw-bf16: AdamW with bf16 weights and stochastic rounding (torchao)
    - adafactor: Adafactor, which waits for the GPU at each weight
    - muon: Muon for the matrices of the blocks, AdamW for all other parameters
    - lion: Lion, with half of Adam's state; use a learning rate 3 to 10 times smaller than for AdamW
    - sgd: SGD with momentum in one fused kernel, with half of Adam's state; use a larger learning rate"""
    beta1: float = 0.9
    """Adam's decay rate of the first moment, Lion's weight of its momentum in an update, or the momentum of SGD
    (at least 0 and below 1)."""
    beta2: float = 0.95
    """Adam's decay rate of the second moment, or Lion's decay rate of its momentum (at least 0 and below 1)."""
    clip_norm: float = 1.0
    """Gradient norm above which gradients are scaled down (0: off)."""

    def __post_init__(self) -> None:
        check_part(self, warmup_steps=0, weight_decay=0, clip_norm=0)
        if not self.learning_rate > 0:
            raise UserError(f"{format_flag('learning_rate', self.learning_rate)} must be above 0.")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"{format_flag(name, getattr(self, name))} must be at least 0 and below 1.")
