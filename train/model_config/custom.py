"""The specification of a custom model: a callable that returns an ``nn.Module``, and the result of its inspection."""

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from sysconfig import get_path
from typing import Any, Self

from infra.errors import UserError, first_line
from infra.schema import strict
from train.model_config.spec import Formula, ModelSpec, check_sizes


@strict
@dataclass(frozen=True)
class ModelInfo:
    """Properties of a custom model that :func:`train.models.custom.inspect_model` measures by running it once."""

    parameters: int
    """Number of parameters."""
    flops_per_token: float
    """FLOPs per token of a forward and backward pass."""
    blocks: tuple[str, ...]
    """Descriptions of the model's lists of repeated blocks, which are the units of recomputation, sharding and
    compilation."""
    attention: bool
    """Whether the model calls ``scaled_dot_product_attention``, whose kernel can be chosen within its blocks."""
    logits: bool
    """Whether the model returns logits if there are no targets."""
    idle: bool = False
    """Whether a parameter does not contribute to the loss, so that workers must not wait for its gradient."""
    tensor_bytes: int = 0
    """Bytes of all tensors that a forward pass of one sequence creates or saves for the backward pass; 0 if unknown."""


_NOT_CUSTOM = {
    "attention": ("flex", "only the kernel of torch's scaled_dot_product_attention can be chosen in it"),
    "loss": ("fused", "it computes its own loss"),
    "precision": ("bf16-activations", "it determines the type of its residual stream"),
    "mask_books": (True, "it applies its own attention mask"),
}
"""Values of settings that no custom model supports, each with the reason."""

_BY_BLOCK = {
    "checkpointing": ("selective", "alternate", "full"), "compile": ("blocks",), "fp8": (True,), "fsdp": (True,),
    "optimizer": ("muon",),
}  # fmt: skip
"""Values of settings that need repeated blocks."""


@strict
@dataclass(frozen=True)
class CustomModel(ModelSpec):
    """A user's model: a callable that returns an ``nn.Module``, with arguments.

    The module's forward takes ``(inputs, targets)``, token ids of shape (batch, time), and returns the mean loss, or
    logits if ``targets`` is None. The callable also receives ``context_length`` and ``vocab_size`` if it accepts them.
    """

    callable: str
    """Name of the callable, as ``package.module:name``."""
    arguments: str = ""
    """Arguments of the callable as they are written in ``--model``: ``width=512,layers=4``."""
    source_sha256: str = ""
    """Hash of the module's file, which must not change before a run is resumed."""
    context_length: int = 1024
    """Tokens of a sequence."""
    vocab_size: int = 50257
    """Number of token ids."""
    end_of_text: int = -1
    """Id of the token that ends a book, by the tokenizer of the data; -1 is the last id."""
    info: ModelInfo | None = field(default=None, compare=False)
    """Result of the inspection; None until the config is resolved."""

    def __post_init__(self) -> None:
        check_sizes(self)
        names = [name for name, _ in self._pairs]
        for name, value in self._pairs:
            if not (name.isidentifier() and value) or names.count(name) > 1:
                raise UserError(
                    f"--model {self.callable}: {name}={value} is not a valid argument. Use NAME=VALUE, each name once."
                )

    @property
    def _pairs(self) -> list[tuple[str, str]]:
        parts = (part.partition("=") for part in self.arguments.split(",") if part)
        return [(name, value) for name, _, value in parts]

    @property
    def values(self) -> dict[str, bool | int | float | str]:
        """The arguments as the callable receives them: booleans, numbers, or text."""
        return {name: _parse_value(text) for name, text in self._pairs}

    @property
    def model_info(self) -> ModelInfo:
        """The result of the inspection, which every resolved config has."""
        assert self.info, "the model of a resolved config has been inspected"
        return self.info

    @property
    def text(self) -> str:
        sizes = [f"{size}={getattr(self, size)}" for size in ("context_length", "vocab_size")
                 if getattr(self, size) != getattr(CustomModel, size)]  # fmt: skip
        return ",".join(filter(None, [self.callable, self.arguments, *sizes]))

    @property
    def user_code(self) -> str:
        return self.callable

    @property
    def needs_inspection(self) -> bool:
        return self.info is None

    @property
    def source_paths(self) -> tuple[str, ...]:
        spec = find_spec(self.callable.partition(":")[0].partition(".")[0])
        paths = (spec.submodule_search_locations or [spec.origin or ""]) if spec else []
        return tuple(path for path in paths if not Path(path).is_relative_to(get_path("purelib")))

    @property
    def has_logits(self) -> bool:
        return self.model_info.logits

    @property
    def has_unused_parameters(self) -> bool:
        return self.model_info.idle

    @property
    def calls_attention(self) -> bool:
        """Whether the inspected model calls torch's ``scaled_dot_product_attention``."""
        return bool(self.info and self.info.attention)

    @property
    def parameters(self) -> int:
        return self.model_info.parameters

    def flops_formulas(self) -> list[Formula]:
        text = "3 x the forward pass, counted by torch.utils.flop_counter"
        return [Formula("counted", text, self.model_info.flops_per_token)]

    @property
    def min_flops_per_token(self) -> float:
        """Half of the counted FLOPs, because causal attention needs half of them."""
        return self.flops_per_token / 2

    def executed_flops_per_token(self, checkpointing: str) -> float:
        """Return the FLOPs without recomputation, because the FLOPs of the blocks are unknown."""
        return self.flops_per_token

    @property
    def summary(self) -> str:
        info = self.model_info
        attention = "torch SDPA (kernel selectable)" if info.attention and info.blocks else "custom"
        return (
            f"{info.parameters:,} parameters, {info.flops_per_token / 1e6:,.1f} MFLOP per token, repeated blocks "
            f"{', '.join(info.blocks) or 'none'}, attention {attention}"
        )

    def unsupported_reason(self, setting: str, value: Any) -> str:
        """Return why the setting does not apply; reasons that depend on the module are known after its inspection."""
        if setting == "vocabulary_multiple" or (setting.startswith("model.") and not hasattr(self, setting[6:])):
            return "its callable determines its shape"
        if setting == "loss_chunks" and value > 1:
            setting, value = "loss", "fused"
        if setting in _NOT_CUSTOM and value == _NOT_CUSTOM[setting][0]:
            return _NOT_CUSTOM[setting][1]
        if self.info and not self.info.blocks and value in _BY_BLOCK.get(setting, ()):
            return "it has no nn.ModuleList of identical blocks"
        kernel = setting == "attention" and value not in ("auto", "sdpa")
        if kernel and self.info and not (self.info.attention and self.info.blocks):
            return "none of its repeated blocks calls torch's scaled_dot_product_attention"
        return ""

    def with_vocab_size(self, ids: int, end_of_text: int, source: str) -> Self:
        """Replace the default vocabulary size by the number of the data's token ``ids``."""
        if self.vocab_size not in (CustomModel.vocab_size, ids):
            raise UserError(
                f"{source} has {ids:,} token ids, but --model has vocab_size={self.vocab_size:,}. Remove vocab_size, "
                "or use data with another --tokenizer."
            )
        info = self.info if self.vocab_size == ids else None
        return replace(self, vocab_size=ids, end_of_text=end_of_text, info=info)


def _parse_value(text: str) -> bool | int | float | str:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def parse_custom(name: str, changes: Sequence[str]) -> CustomModel:
    """Parse the model of the callable ``name``, whose arguments are ``changes``, each NAME=VALUE."""
    sizes = {"context_length": CustomModel.context_length, "vocab_size": CustomModel.vocab_size}
    for change in changes:
        size, _, value = change.partition("=")
        if size in sizes:
            if not value.isdecimal():
                raise UserError(f"--model {name}: {value!r} is not a valid {size}. Use an integer above 0.")
            sizes[size] = int(value)
    arguments = ",".join(change for change in changes if change.partition("=")[0] not in sizes)
    return CustomModel(name, arguments, source_sha256(name), sizes["context_length"], sizes["vocab_size"])


_IMPORT_ADVICE = "Write it as in an import statement, package.module, and run the command where that import works."


def source_sha256(name: str) -> str:
    """Hash the file of the module in ``package.module:name``. Raises ``UserError`` if it cannot be found."""
    module = name.partition(":")[0]
    if str(Path.cwd()) not in sys.path:  # A console script does not search it. At the end, it hides no other module.
        sys.path.append(str(Path.cwd()))
    try:
        spec = find_spec(module)
        if spec and spec.origin:
            return hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()
    except (Exception, SystemExit) as failure:  # The search imports the module's parent packages, which may raise.
        reason = f"{type(failure).__name__}: {first_line(failure).rstrip('.')}"
        raise UserError(f"--model {name}: cannot find the module {module} ({reason}). {_IMPORT_ADVICE}") from failure
    raise UserError(f"--model {name}: no module named {module} in {Path.cwd()} or in the environment. {_IMPORT_ADVICE}")
