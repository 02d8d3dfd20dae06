"""How a model's module is built, run and exported: the interface of all kinds of models.

A kind of model has a subclass here, registered in :mod:`train.models.builders`.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from infra.errors import UserError
from train.config import Execution
from train.model_config import ModelSpec
from train.models.attention import ATTENTION, AttentionFunction, attention_for_gpu

M = TypeVar("M", bound=ModelSpec)


@dataclass(frozen=True)
class Export:
    """A trained model in the Hugging Face format."""

    weights: dict[str, Tensor]
    config: dict[str, Any]
    """Content of ``config.json``."""
    loading: str
    """Sentence on how to load it."""


@dataclass(frozen=True)
class ModelBuilder(ABC, Generic[M]):
    """The module of a model. Raises ``UserError`` for a mistake in the model's own code."""

    model: M

    @abstractmethod
    def inspect(self) -> M:
        """The model with what one run of it has shown, if it needs that."""

    @abstractmethod
    def build(self, execution: Execution) -> nn.Module:
        """The module with random weights, executed as configured."""

    @abstractmethod
    def build_for_inference(self, *, mask_books: bool, has_weights: bool) -> nn.Module:
        """The module for texts of any length: eager, with torch's own choice of attention kernel.

        ``has_weights`` tells that those of another module will replace its own.
        """

    @abstractmethod
    def attention_kernel(self, execution: Execution, device: torch.device) -> str:
        """The kernel that computes attention on ``device``: as configured, or the first usable one for the GPU."""

    @abstractmethod
    def export(self, module: Any, folder: Path) -> Export:
        """The trained ``module`` for Hugging Face's ``folder``."""

    @abstractmethod
    def load_initial_weights(self, module: Any) -> None:
        """Load the weights that a run starts from into ``module``, if they are not random."""

    @abstractmethod
    def user_error(self, stage: str, failure: Exception) -> UserError | None:
        """What the model's author must correct after this ``failure`` in its module; None if the code is ours."""

    def _attention(self, execution: Execution) -> AttentionFunction:
        if execution.attention != "auto":
            return ATTENTION[execution.attention]
        length = self.model.context_length
        return attention_for_gpu(torch.cuda.get_device_capability(), length, masked=execution.mask_books)
