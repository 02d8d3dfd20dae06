"""The interface that builds, runs and exports the module of a model of any kind.

Each kind of model has a subclass of :class:`ModelBuilder`, registered in :mod:`train.models.builders`.
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
from train.models.attention import ATTENTION, AttentionFunction, AttentionInputs, attention_for_gpu

M = TypeVar("M", bound=ModelSpec)


@dataclass(frozen=True)
class Export:
    """A trained model in the Hugging Face format."""

    weights: dict[str, Tensor]
    """Weights by their names in the exported file."""
    config: dict[str, Any]
    """Content of ``config.json``."""
    loading: str
    """Sentence on how to load the exported model."""


@dataclass(frozen=True)
class ModelBuilder(ABC, Generic[M]):
    """Builds the module of a model. Raises ``UserError`` for an error in the user's code."""

    model: M
    """Specification of the model."""

    @abstractmethod
    def inspect(self) -> M:
        """Return the specification with the result of an inspection, if the model needs one."""

    @abstractmethod
    def build(self, execution: Execution) -> nn.Module:
        """Build the module with random weights, which executes as ``execution`` says."""

    @abstractmethod
    def build_for_inference(self, *, mask_books: bool, has_weights: bool) -> nn.Module:
        """Build the module for texts of any length: eager, with the attention kernel that torch chooses.

        With ``has_weights`` the weights of another module will replace its weights.
        """

    @abstractmethod
    def attention_kernels(self, execution: Execution, device: torch.device) -> list[str]:
        """Names of the kernels that can compute attention on ``device``, the best first: the configured one, or those
        of ``auto``."""

    def attention_inputs(self, execution: Execution, device: torch.device) -> AttentionInputs | None:
        """Return inputs of attention as the model has them, with few sequences and heads; None if it is unknown."""
        return None

    @abstractmethod
    def export(self, module: Any, folder: Path) -> Export:
        """Convert the trained ``module`` for export to ``folder``."""

    @abstractmethod
    def load_initial_weights(self, module: Any) -> None:
        """Load the weights that a run starts from into ``module``; do nothing if it starts from random weights."""

    @abstractmethod
    def user_error(self, stage: str, failure: Exception) -> UserError | None:
        """Convert a ``failure`` in the user's code to an error message; None for a model of this program."""

    def _attention(self, execution: Execution) -> AttentionFunction:
        if execution.attention != "auto":
            return ATTENTION[execution.attention]
        length = self.model.context_length
        return attention_for_gpu(torch.cuda.get_device_capability(), length, masked=execution.mask_books)
