"""What is trained: a GPT-2 by its shape, with presets, or a custom model by the callable that returns it."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator

from infra.cli.units import optional_flag, single_value_flag
from infra.errors import UserError
from infra.schema import from_json, strict
from train.custom_model import CustomModel, check_sizes, source_sha256


@strict
@dataclass(frozen=True)
class ModelConfig:
    """The shape of a GPT-2: sizes count elements, not bytes."""

    layers: int = 12
    heads: int = 12
    width: int = 768
    context_length: int = 1024
    vocab_size: int = 50257
    padded_vocab_size: int = 50304
    """Rows of the embedding and the head; a multiple of 64 fills whole tensor-core tiles. Ids past
    ``vocab_size`` never occur."""
    dropout: float = 0.0
    bias: bool = True
    tied: bool = True
    """Share the token embedding with the head."""
    end_of_text: int = -1
    """Id of the token that ends a book, by the tokenizer of the data; -1 is the last."""
    start: str = ""
    """Folder, in Hugging Face's format, with whose weights a run begins; empty: random ones."""

    def __post_init__(self) -> None:
        check_sizes(self)
        if self.width % self.heads:
            raise UserError(f"Model width={self.width} is not divisible by heads={self.heads}.")
        if self.padded_vocab_size < self.vocab_size:
            raise UserError(
                f"Model padded_vocab_size={self.padded_vocab_size} is smaller than vocab_size={self.vocab_size}."
            )
        if not -1 <= self.end_of_text < self.vocab_size:
            raise UserError(f"Model end_of_text={self.end_of_text} is not an id below vocab_size={self.vocab_size}.")
        if not 0 <= self.dropout < 1:
            raise UserError(f"Model dropout={self.dropout} must be at least 0 and below 1.")

    has_logits = True
    summary = ""
    source_paths = ()

    def unsupported_reason(self, setting: str, value: Any) -> str:
        """FlexAttention is not for every shape."""
        if (setting, value) != ("attention", "flex"):
            return ""
        if self.dropout:
            return "FlexAttention has no dropout"
        return "FlexAttention's heads are at least 16 wide" if self.width // self.heads < 16 else ""

    def with_vocab_size(self, ids: int, end_of_text: int, source: str) -> "ModelConfig":
        """The default vocabulary gives way, padded to a multiple of 64 if it was padded."""
        padded, model = -(-ids // 64) * 64, self
        if self.vocab_size == ModelConfig.vocab_size != ids and not self.start:
            pads = self.padded_vocab_size > self.vocab_size
            model = replace(self, vocab_size=ids, padded_vocab_size=padded if pads else ids)
        if model.vocab_size != ids:
            raise UserError(
                f"{source} has {ids:,} token ids and --model has vocab_size={self.vocab_size:,}: give --model with "
                f"vocab_size={ids},padded_vocab_size={padded}, or data that were made with another --tokenizer."
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
"""The four published GPT-2 sizes, and three that train on a CPU.

``edu-3m`` is the model of a study that treats its loop as a black box, with a vocabulary of its own, so that the blocks
and not the head decide time and memory.
"""


_PUBLISHED = {
    "layers": "n_layer", "heads": "n_head", "width": "n_embd", "context_length": "n_positions",
    "vocab_size": "vocab_size",
}  # fmt: skip
"""The fields of GPT2Config that are ours under another name."""


def parse_model(text: str) -> "AnyModel":
    """``gpt2-124m``, ``tiny,layers=4``, ``package.module:callable,width=512``, or ``hf:FOLDER,dropout=0.1``."""
    preset, *changes = [part.strip() for part in text.split(",")]
    if preset.startswith("hf:"):
        return _apply_changes(_read_hf_config(preset.removeprefix("hf:")), text, changes, ["dropout"])
    if ":" in preset:
        return _parse_custom(preset, changes)
    if preset not in PRESETS:
        raise UserError(
            f"--model {preset!r} is not a preset; the presets are {', '.join(PRESETS)}. A model of your own is named "
            "as package.module:callable."
        )
    return _apply_changes(PRESETS[preset], text, changes, [f.name for f in fields(ModelConfig) if f.name != "start"])


def _read_hf_config(folder: str) -> ModelConfig:
    """The shape that a folder in Hugging Face's format has, whose weights a run is to start from."""
    where = Path(folder).resolve()
    try:
        hf_config = json.loads((where / "config.json").read_text(encoding="utf-8"))
        if hf_config["model_type"] != "gpt2":
            raise UserError(f"--model hf:{folder} holds a {hf_config['model_type']}: only GPT-2 can be started from.")
        sizes = {name: int(hf_config[hf_name]) for name, hf_name in _PUBLISHED.items()}
    except (OSError, ValueError, KeyError, TypeError) as damage:
        raise UserError(f"--model hf:{folder}: no config.json of a GPT-2 can be read there ({damage!r}).") from damage
    padded, tied = -(-sizes["vocab_size"] // 64) * 64, bool(hf_config.get("tie_word_embeddings", True))
    return replace(ModelConfig(tied=tied, start=str(where)), **sizes, padded_vocab_size=padded)


def _apply_changes(model: ModelConfig, text: str, changes: list[str], names: Sequence[str]) -> ModelConfig:
    types = {field.name: field.type for field in fields(ModelConfig) if field.name in names}
    values: dict[str, Any] = {}
    for change in changes:
        name, _, value = change.partition("=")
        if name not in types or not value:
            raise UserError(f"--model {text!r}: {change!r} is not FIELD=VALUE with a field among {', '.join(types)}.")
        try:
            kind = types[name]
            values[name] = {"true": True, "false": False}[value.lower()] if kind is bool else kind(value)  # type: ignore[operator]
        except (ValueError, KeyError):
            raise UserError(f"--model {text!r}: {value!r} is not a value for {name}.") from None
    return replace(model, **values)


def _parse_custom(name: str, changes: list[str]) -> CustomModel:
    sizes = {"context_length": CustomModel.context_length, "vocab_size": CustomModel.vocab_size}
    for change in changes:
        size, _, value = change.partition("=")
        if size in sizes:
            if not value.isdecimal():
                raise UserError(f"--model {name}: {value!r} is not a value for {size}.")
            sizes[size] = int(value)
    arguments = ",".join(change for change in changes if change.partition("=")[0] not in sizes)
    return CustomModel(name, arguments, source_sha256(name), sizes["context_length"], sizes["vocab_size"])


def format_model(model: "AnyModel") -> str:
    """The shortest text that :func:`parse_model` turns into ``model``."""
    if isinstance(model, CustomModel):
        sizes = [f"{size}={getattr(model, size)}" for size in ("context_length", "vocab_size")
                 if getattr(model, size) != getattr(CustomModel, size)]  # fmt: skip
        return ",".join(filter(None, [model.callable, model.arguments, *sizes]))
    if model.start:
        return f"hf:{model.start}" + (f",dropout={model.dropout}" if model.dropout else "")
    texts = []
    for name, preset in PRESETS.items():
        changed = {k: v for k, v in asdict(model).items() if v != getattr(preset, k)}
        texts.append(",".join([name, *(f"{k}={str(v).lower()}" for k, v in changed.items())]))
    return min(texts, key=lambda text: text.count(","))


def short_name(model: "AnyModel") -> str:
    """The preset, the callable or the folder alone, for names of folders."""
    return Path(format_model(model).partition(",")[0].rpartition(":")[2]).name


def _read(value: Any) -> Any:
    """A model in a file: text as on the command line, or an object of all its fields."""
    if isinstance(value, dict):
        return from_json(CustomModel if "callable" in value else ModelConfig, value, "model")
    if isinstance(value, str):
        return parse_model(value)
    if value is None:
        return None
    raise ValueError(f"model is {value!r}; it should be a text as of --model, or an object of its fields.")


AnyModel = ModelConfig | CustomModel
"""What is trained. The rest of the system asks it for ``context_length``, ``vocab_size`` and ``end_of_text``, and:

- ``unsupported_reason(setting, value)``: why a value of a setting of a run or a rung does not apply to it; empty where
  it does
- ``with_vocab_size(ids, end_of_text, source)``: it with the ids of the data at ``source``, or ``UserError``
- ``has_logits``: whether it gives logits, from which text can be written
- ``source_paths``: files and folders that it is imported from, unless they are installed
- ``summary``: what was found of it by running it, in words; empty where formulas know it

Only its arithmetic (:mod:`train.estimate.flops`), its memory (:mod:`train.estimate.memory`) and the module itself
(:mod:`train.loop.execution`, :mod:`train.reporting.hugging_face`) differ by its type.
"""

_MODEL = single_value_flag("MODEL[,NAME=VALUE...]", (ModelConfig, CustomModel), parse_model, format_model)

_READ = BeforeValidator(_read)

Model = Annotated[AnyModel, _MODEL, _READ]
"""A preset with changes or a callable, on the command line or in a file; a file may also give all fields one by one."""

ModelOrNone = Annotated[AnyModel | None, optional_flag(_MODEL), _READ]
