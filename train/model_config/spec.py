"""The interface of all kinds of models in a config, without torch.

Each kind of model is a subclass of :class:`ModelSpec`, registered in :mod:`train.model_config.text`. The code that
builds its module is registered in :mod:`train.models.builders`, and its predictions in :mod:`train.estimate.estimates`.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from infra.errors import UserError

MAX_SIZES = {
    "layers": 2**16, "heads": 2**16, "width": 2**20, "context_length": 2**26, "vocab_size": 2**31,
    "padded_vocab_size": 2**31,
}  # fmt: skip
"""Upper limits of sizes, above any model that can be trained; the bytes of a matrix still fit in 64 bits."""


@dataclass(frozen=True)
class Formula:
    """A formula for FLOPs per token, with its source and value."""

    name: str
    text: str
    flops: float


class ModelSpec(ABC):
    """A model by its sizes and settings; two equal specs describe the same model.

    Attributes:
        context_length: tokens of a sequence.
        vocab_size: number of token ids.
        end_of_text: id of the token that ends a book, by the tokenizer of the data; -1 is the last id.
    """

    context_length: int
    vocab_size: int
    end_of_text: int

    __dataclass_fields__: ClassVar[dict[str, Any]]  # Every kind is a dataclass.
    title: ClassVar[str] = ""
    """Name of the architecture, if all models of the kind have the same."""
    library: ClassVar[str] = ""
    """Library that loads the exported model; empty: only the user's code loads it."""

    @property
    def needs_inspection(self) -> bool:
        """Whether the model must be run once before a config with it can be resolved."""
        return False

    @property
    def has_logits(self) -> bool:
        """Whether the model returns logits if there are no targets, from which text can be generated."""
        return True

    @property
    def has_unused_parameters(self) -> bool:
        """Whether a parameter does not contribute to the loss, so that workers must not wait for its gradient."""
        return False

    @property
    def summary(self) -> str:
        """Description of the inspected model; empty if the model needs no inspection."""
        return ""

    @property
    def user_code(self) -> str:
        """The user's callable in ``--model`` that creates the model; empty if it is part of this program."""
        return ""

    @property
    def source_paths(self) -> tuple[str, ...]:
        """Files and folders that the user's code is imported from, unless they are installed."""
        return ()

    @property
    def initial_weights(self) -> str:
        """Folder of the weights that a run starts from; empty: random weights."""
        return ""

    @property
    @abstractmethod
    def text(self) -> str:
        """The shortest text that :func:`train.model_config.text.parse_model` turns into this model."""

    @property
    @abstractmethod
    def parameters(self) -> int:
        """Number of parameters."""

    @property
    def output_size(self) -> int:
        """Number of token ids that the training loss is computed over."""
        return self.vocab_size

    @property
    def matrices(self) -> dict[str, int]:
        """Columns of the matrix products of a forward pass by name; empty if they are unknown."""
        return {}

    @property
    def aligned_sizes(self) -> dict[str, int]:
        """Sizes by name that tensor cores need as multiples of 8 (of 4 in tf32); empty if they are unknown."""
        return {}

    @property
    def variants(self) -> dict[str, str]:
        """Properties of the architecture by name that a published study may have chosen differently."""
        return {}

    @abstractmethod
    def flops_formulas(self) -> list[Formula]:
        """Return the FLOPs per token of a forward and backward pass, by each formula; the first formula defines MFU."""

    @property
    def flops_per_token(self) -> float:
        """FLOPs per token, by the first of :meth:`flops_formulas`."""
        return self.flops_formulas()[0].flops

    @property
    @abstractmethod
    def min_flops_per_token(self) -> float:
        """Minimum FLOPs per token that any implementation executes."""

    @abstractmethod
    def executed_flops_per_token(self, checkpointing: str) -> float:
        """Return the FLOPs per token that the device executes with this activation checkpointing."""

    @abstractmethod
    def unsupported_reason(self, setting: str, value: Any) -> str:
        """Return why this value of a setting of a run or rung does not apply to the model; empty if it does."""

    @abstractmethod
    def with_vocab_size(self, ids: int, end_of_text: int, source: str) -> Self:
        """Return this model with the number of token ``ids`` of the data at ``source``.

        Raises ``UserError`` if the user set another number.
        """

    def without_paths(self) -> Self:
        """Return this model without local paths, which a published model card should not contain."""
        return self


def check_sizes(model: object) -> None:
    """Raise ``UserError`` for a size of ``model`` below 1 or above :data:`MAX_SIZES`."""
    for name, max_size in MAX_SIZES.items():
        size = getattr(model, name, 1)
        if not 1 <= size <= max_size:
            raise UserError(f"--model {name}={size} must be at least 1 and at most {max_size:,}.")
