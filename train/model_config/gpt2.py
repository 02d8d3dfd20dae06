"""The specification of a GPT-2 by its shape, with presets and formulas for its parameters and FLOPs."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from infra.errors import UserError
from infra.schema import strict
from train.model_config.spec import Formula, ModelSpec, check_sizes


@strict
@dataclass(frozen=True)
class ModelConfig(ModelSpec):
    """The shape of a GPT-2. Sizes are numbers of elements, not of bytes."""

    title: ClassVar[str] = "GPT-2"
    library: ClassVar[str] = "transformers"

    layers: int = 12
    """Number of transformer blocks."""
    heads: int = 12
    """Number of attention heads per block."""
    width: int = 768
    """Size of the hidden states."""
    context_length: int = 1024
    """Tokens of a sequence."""
    vocab_size: int = 50257
    """Number of token ids."""
    padded_vocab_size: int = 50304
    """Rows of the embedding and the head; a multiple of 64 fills whole tensor-core tiles. Ids past
    ``vocab_size`` never occur."""
    dropout: float = 0.0
    """Dropout probability (at least 0 and below 1)."""
    bias: bool = True
    """Whether linear layers and norms have a bias."""
    tied: bool = True
    """Whether the head shares the weights of the token embedding."""
    end_of_text: int = -1
    """Id of the token that ends a book, by the tokenizer of the data; -1 is the last id."""
    init_from: str = ""
    """Folder in the Hugging Face format with the initial weights; empty: random weights."""

    def __post_init__(self) -> None:
        check_sizes(self)
        if self.width % self.heads:
            raise UserError(f"--model width={self.width} must be a multiple of heads={self.heads}.")
        if self.padded_vocab_size < self.vocab_size:
            raise UserError(
                f"--model padded_vocab_size={self.padded_vocab_size} must be at least vocab_size={self.vocab_size}."
            )
        if not -1 <= self.end_of_text < self.vocab_size:
            raise UserError(
                f"--model end_of_text={self.end_of_text} must be a token id below {self.vocab_size}, or -1."
            )
        if not 0 <= self.dropout < 1:
            raise UserError(f"--model dropout={self.dropout} must be at least 0 and below 1.")

    @property
    def text(self) -> str:
        if self.init_from:
            return f"hf:{self.init_from}" + (f",dropout={self.dropout}" if self.dropout else "")
        texts = []
        for name, preset in PRESETS.items():
            changed = {k: v for k, v in asdict(self).items() if v != getattr(preset, k)}
            texts.append(",".join([name, *(f"{k}={str(v).lower()}" for k, v in changed.items())]))
        return min(texts, key=lambda text: text.count(","))

    @property
    def initial_weights(self) -> str:
        return self.init_from

    def without_paths(self) -> Self:
        return replace(self, init_from=Path(self.init_from).name)

    @property
    def output_size(self) -> int:
        return self.padded_vocab_size

    @property
    def matrices(self) -> dict[str, int]:
        return {
            "queries, keys, values": 3 * self.width,
            "projections to the width": self.width,
            "feed-forward up": 4 * self.width,
            "head": self.padded_vocab_size,
        }

    @property
    def aligned_sizes(self) -> dict[str, int]:
        return {
            "width": self.width, "width of a head": self.width // self.heads,
            "padded vocabulary": self.padded_vocab_size,
        }  # fmt: skip

    @property
    def variants(self) -> dict[str, str]:
        return {
            "head": "tied" if self.tied else "not tied",
            "vocabulary": "padded" if self.padded_vocab_size > self.vocab_size else "not padded",
        }

    @property
    def parameters(self) -> int:
        """Number of parameters with the padded vocabulary; a tied head counts once.

        A formula computes it, because creating the model takes a second in every command, even on the meta device.
        """
        embeddings = self._embedding + self.context_length * self.width
        return embeddings + (0 if self.tied else self._embedding) + self.layers * self._block + self._norm

    @property
    def _embedding(self) -> int:
        return self.padded_vocab_size * self.width

    @property
    def _block(self) -> int:
        """Parameters of a block with its two norms."""
        return 12 * self.width**2 + self.bias * 9 * self.width + 2 * self._norm

    @property
    def _norm(self) -> int:
        return (1 + self.bias) * self.width

    def flops_formulas(self) -> list[Formula]:
        text = "6 x matmul parameters + 12 x layers x context x width (arXiv 2204.02311, appendix B)"
        checkpointed = self.hardware_flops(recomputed=self.layers)
        return [
            Formula("PaLM", text, self.palm_flops),
            Formula("causal", "6 x matmul parameters + 6 x layers x context x width", self.causal_flops),
            Formula("6N", "6 x all parameters (arXiv 2001.08361, section 2.1)", 6.0 * self.parameters),
            Formula("hardware, checkpointed", "PaLM + a second forward pass of the blocks", checkpointed),
        ]

    @property
    def min_flops_per_token(self) -> float:
        return self.causal_flops

    def executed_flops_per_token(self, checkpointing: str) -> float:
        return self.hardware_flops(recomputed=self.recomputed_blocks(checkpointing))

    @property
    def matmul_parameters(self) -> int:
        """Parameters in matrix products: the blocks' matrices and the head with its padded vocabulary.

        Embeddings are looked up and not multiplied. A tied head is multiplied once.
        """
        return self.layers * 12 * self.width**2 + self.padded_vocab_size * self.width

    @property
    def palm_flops(self) -> float:
        """FLOPs per token by PaLM's formula (arXiv 2204.02311, appendix B), which ignores the causal mask."""
        return 6 * self.matmul_parameters + 12 * self.layers * self.context_length * self.width

    @property
    def causal_flops(self) -> float:
        """FLOPs per token if causal attention needs half of PaLM's FLOPs (FlashAttention-2, arXiv 2307.08691)."""
        return 6 * self.matmul_parameters + 6 * self.layers * self.context_length * self.width

    def hardware_flops(self, *, recomputed: int) -> float:
        """Return the FLOPs per token that the device executes if the forward pass of ``recomputed`` blocks runs twice.

        If all blocks are recomputed, this is known as 8N instead of 6N (Korthikanti et al., arXiv 2205.05198,
        appendix A). The head is not recomputed.
        """
        block = 2 * 12 * self.width**2 + 4 * self.context_length * self.width
        return self.palm_flops + recomputed * block

    def recomputed_blocks(self, checkpointing: str) -> int:
        """Return the number of blocks whose matrix products and attention are recomputed with this activation
        checkpointing.

        With selective checkpointing it is 0, because their outputs are stored.
        """
        return {"full": self.layers, "alternate": (self.layers + 1) // 2}.get(checkpointing, 0)

    def unsupported_reason(self, setting: str, value: Any) -> str:
        """Return why FlexAttention does not support this shape; every other setting applies to every GPT-2."""
        if (setting, value) != ("attention", "flex"):
            return ""
        if self.dropout:
            return "FlexAttention does not support dropout"
        return "FlexAttention needs heads of at least 16 elements" if self.width // self.heads < 16 else ""

    def with_vocab_size(self, ids: int, end_of_text: int, source: str) -> Self:
        """Replace the default vocabulary size by the data's; it is padded to a multiple of 64 if it was padded."""
        padded, model = -(-ids // 64) * 64, self
        if self.vocab_size == ModelConfig.vocab_size != ids and not self.init_from:
            pads = self.padded_vocab_size > self.vocab_size
            model = replace(self, vocab_size=ids, padded_vocab_size=padded if pads else ids)
        if model.vocab_size != ids:
            raise UserError(
                f"{source} has {ids:,} token ids, but --model has vocab_size={self.vocab_size:,}. Use "
                f"vocab_size={ids},padded_vocab_size={padded}, or data with another --tokenizer."
            )
        return replace(model, end_of_text=end_of_text)


PRESETS: dict[str, ModelConfig] = {
    "gpt2-124m": ModelConfig(),
    "gpt2-355m": ModelConfig(layers=24, heads=16, width=1024),
    "gpt2-774m": ModelConfig(layers=36, heads=20, width=1280),
    "gpt2-1558m": ModelConfig(layers=48, heads=25, width=1600),
    "small": ModelConfig(layers=4, heads=4, width=256, context_length=512),
    "edu-3m": ModelConfig(layers=4, heads=4, width=256, context_length=512, vocab_size=512, padded_vocab_size=512),
    "tiny": ModelConfig(layers=2, heads=2, width=64, context_length=128),
}
"""The four published sizes of GPT-2, and three small models that train on a CPU.

``edu-3m`` is the model of a published study. Its vocabulary is so small that the blocks, not the head, determine time
and memory.
"""


_HF_NAMES = {
    "layers": "n_layer", "heads": "n_head", "width": "n_embd", "context_length": "n_positions",
    "vocab_size": "vocab_size",
}  # fmt: skip
"""Names in GPT2Config of transformers, by the field of :class:`ModelConfig`."""


def parse_preset(text: str, preset: str, changes: Sequence[str]) -> ModelConfig:
    """Parse a ``preset`` and its ``changes`` in the ``text`` of ``--model``. Raises ``UserError`` if it is unknown."""
    if preset not in PRESETS:
        raise UserError(
            f"--model {preset!r} is not a preset. Use one of {', '.join(PRESETS)}, or a custom model as "
            "package.module:callable."
        )
    return _apply_changes(
        PRESETS[preset], text, changes, [f.name for f in fields(ModelConfig) if f.name != "init_from"]
    )


def parse_hf_folder(text: str, folder: str, changes: Sequence[str]) -> ModelConfig:
    """Parse the ``folder`` with a GPT-2 in the Hugging Face format, and ``changes``, in the ``text`` of ``--model``."""
    return _apply_changes(_read_hf_config(folder), text, changes, ["dropout"])


def _read_hf_config(folder: str) -> ModelConfig:
    """Read the shape of the GPT-2 in ``folder``, whose weights a run starts from."""
    path = Path(folder).resolve()
    try:
        hf_config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        if hf_config["model_type"] != "gpt2":
            raise UserError(
                f"--model hf:{folder} has a model of type {hf_config['model_type']}, but only GPT-2 is supported. Use "
                "the folder of a GPT-2."
            )
        sizes = {name: int(hf_config[hf_name]) for name, hf_name in _HF_NAMES.items()}
    except (OSError, ValueError, KeyError, TypeError) as damage:
        raise UserError(
            f"--model hf:{folder}: cannot read config.json of a GPT-2 ({damage!r}). Use a folder in the Hugging Face "
            "format."
        ) from damage
    padded, tied = -(-sizes["vocab_size"] // 64) * 64, bool(hf_config.get("tie_word_embeddings", True))
    return replace(ModelConfig(tied=tied, init_from=str(path)), **sizes, padded_vocab_size=padded)


def _apply_changes(model: ModelConfig, text: str, changes: Sequence[str], names: Sequence[str]) -> ModelConfig:
    types = {field.name: field.type for field in fields(ModelConfig) if field.name in names}
    values: dict[str, Any] = {}
    for change in changes:
        name, _, value = change.partition("=")
        if name not in types or not value:
            raise UserError(
                f"--model {text!r}: {change!r} is not a valid change. Use FIELD=VALUE with one of the fields "
                f"{', '.join(types)}."
            )
        try:
            kind = types[name]
            values[name] = {"true": True, "false": False}[value.lower()] if kind is bool else kind(value)  # type: ignore[operator]
        except (ValueError, KeyError):
            raise UserError(f"--model {text!r}: {value!r} is not a valid value of {name}.") from None
    return replace(model, **values)
