"""A custom model as a config names it: a callable that returns an ``nn.Module``, and what was found of it."""

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
    """What was found of a custom model by running it once: see :func:`train.models.custom.inspect_model`."""

    parameters: int
    flops_per_token: float
    """Forward and backward."""
    blocks: tuple[str, ...]
    """Its repeated blocks, in words; without any, nothing can be recomputed, sharded or compiled block by block."""
    attention: bool
    """Whether it calls ``scaled_dot_product_attention``, whose kernel can be chosen within its blocks."""
    logits: bool
    """Whether it gives logits when there are no targets."""
    idle: bool = False
    """Whether a parameter has no part in its loss, for whose gradient no worker must wait."""


_NOT_CUSTOM = {
    "attention": ("flex", "only torch's scaled_dot_product_attention is switched in it"),
    "loss": ("fused", "it computes its loss itself"),
    "precision": ("bf16-activations", "the type of its residual stream is its own"),
    "mask_books": (True, "its attention has a mask of its own"),
}
"""Values of settings that no custom model has, and why."""

_BY_BLOCK = {
    "checkpointing": ("selective", "alternate", "full"), "compile": ("blocks",), "fp8": (True,), "fsdp": (True,),
    "optimizer": ("muon",),
}  # fmt: skip
"""Values of settings that need repeated blocks."""


@strict
@dataclass(frozen=True)
class CustomModel(ModelSpec):
    """A model of the user's: a callable that returns an ``nn.Module``, with arguments.

    Its forward takes ``(inputs, targets)``, ids of shape (batch, time), and returns the mean loss, or logits when
    ``targets`` is None. The callable gets ``context_length`` and ``vocab_size`` as well, if it takes them.
    """

    callable: str
    """``package.module:name``."""
    arguments: str = ""
    """As they are written: ``width=512,layers=4``."""
    source_sha256: str = ""
    """Of the module's file, which must not change while a run is continued."""
    context_length: int = 1024
    vocab_size: int = 50257
    end_of_text: int = -1
    info: ModelInfo | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        check_sizes(self)
        names = [name for name, _ in self._pairs]
        for name, value in self._pairs:
            if not (name.isidentifier() and value) or names.count(name) > 1:
                raise UserError(f"--model {self.callable}: {name}={value} is not NAME=VALUE, each name once.")

    @property
    def _pairs(self) -> list[tuple[str, str]]:
        parts = (part.partition("=") for part in self.arguments.split(",") if part)
        return [(name, value) for name, _, value in parts]

    @property
    def values(self) -> dict[str, bool | int | float | str]:
        """The arguments as the callable gets them: true and false, numbers, or text."""
        return {name: _value(text) for name, text in self._pairs}

    @property
    def model_info(self) -> ModelInfo:
        """What was found of it; a resolved config has been looked at."""
        assert self.info, "of a resolved config's model"
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
        """Whether it is known to call torch's ``scaled_dot_product_attention``."""
        return bool(self.info and self.info.attention)

    @property
    def parameters(self) -> int:
        return self.model_info.parameters

    def parameter_rows(self) -> list[tuple[str, str]]:
        blocks = ", ".join(self.model_info.blocks)
        return [("repeated blocks", blocks or "none, so blocks can be neither recomputed nor compiled separately")]

    def flops_formulas(self) -> list[Formula]:
        text = "3 x the forward pass, counted by torch.utils.flop_counter"
        return [Formula("counted", text, self.model_info.flops_per_token)]

    @property
    def min_flops_per_token(self) -> float:
        """Up to half of the counted FLOPs may be attention that is causal."""
        return self.flops_per_token / 2

    def executed_flops_per_token(self, checkpointing: str) -> float:
        """Without recomputation, because the FLOPs of the blocks are unknown."""
        return self.flops_per_token

    @property
    def summary(self) -> str:
        info = self.model_info
        attention = "torch's, whose kernel can be chosen" if info.attention and info.blocks else "its own"
        return (
            f"{info.parameters:,} parameters, {info.flops_per_token / 1e6:,.1f} MFLOP per token, repeated blocks "
            f"{', '.join(info.blocks) or 'none'}, attention {attention}"
        )

    def unsupported_reason(self, setting: str, value: Any) -> str:
        """What depends on its inside is known once it has been looked at."""
        if setting == "vocabulary_multiple" or (setting.startswith("model.") and not hasattr(self, setting[6:])):
            return "only its callable decides its shape"
        if setting == "loss_chunks" and value > 1:
            setting, value = "loss", "fused"
        if setting in _NOT_CUSTOM and value == _NOT_CUSTOM[setting][0]:
            return _NOT_CUSTOM[setting][1]
        if self.info and not self.info.blocks and value in _BY_BLOCK.get(setting, ()):
            return "it has no ModuleList of equal blocks"
        kernel = setting == "attention" and value not in ("auto", "sdpa")
        if kernel and self.info and not (self.info.attention and self.info.blocks):
            return "none of its repeated blocks calls torch's scaled_dot_product_attention"
        return ""

    def with_vocab_size(self, ids: int, end_of_text: int, source: str) -> Self:
        """The default vocabulary gives way."""
        if self.vocab_size not in (CustomModel.vocab_size, ids):
            raise UserError(
                f"{source} has {ids:,} token ids and --model has vocab_size={self.vocab_size:,}: leave it out, or give "
                "data that were made with another --tokenizer."
            )
        changed = self.info if self.vocab_size == ids else None
        return replace(self, vocab_size=ids, end_of_text=end_of_text, info=changed)


def _value(text: str) -> bool | int | float | str:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def parse_custom(name: str, changes: Sequence[str]) -> CustomModel:
    """The model that the callable ``name`` returns, with ``changes``, each NAME=VALUE."""
    sizes = {"context_length": CustomModel.context_length, "vocab_size": CustomModel.vocab_size}
    for change in changes:
        size, _, value = change.partition("=")
        if size in sizes:
            if not value.isdecimal():
                raise UserError(f"--model {name}: {value!r} is not a value for {size}.")
            sizes[size] = int(value)
    arguments = ",".join(change for change in changes if change.partition("=")[0] not in sizes)
    return CustomModel(name, arguments, source_sha256(name), sizes["context_length"], sizes["vocab_size"])


_NAMED = "name it as an import does, package.module, where that works"


def source_sha256(name: str) -> str:
    """The hash of the file of the module in ``package.module:name``. Raises ``UserError`` where there is none."""
    module = name.partition(":")[0]
    if str(Path.cwd()) not in sys.path:  # where a console script does not look; last, so that it hides nothing
        sys.path.append(str(Path.cwd()))
    try:
        spec = find_spec(module)
        if spec and spec.origin:
            return hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()
    except (Exception, SystemExit) as failure:  # of the packages that it is in, which are imported
        why = f"{type(failure).__name__}: {first_line(failure).rstrip('.')}"
        raise UserError(f"--model {name}: the module {module} cannot be found ({why}): {_NAMED}.") from failure
    raise UserError(
        f"--model {name}: there is no module {module} in {Path.cwd()} or among what is installed: {_NAMED}."
    )
