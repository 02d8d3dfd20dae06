"""The shape of a GPT-2, and its presets."""

from dataclasses import asdict, dataclass, fields, replace
from typing import Annotated, Any

from pydantic import BeforeValidator

from infra.errors import UserError
from infra.schema import strict
from infra.units import one_word, or_none


@strict
@dataclass(frozen=True)
class ModelConfig:
    """The shape of a GPT-2: sizes count elements, not bytes."""

    layers: int = 12
    heads: int = 12
    width: int = 768
    context_length: int = 1024
    vocabulary: int = 50257
    padded_vocabulary: int = 50304
    """Rows of the embedding and the head; a multiple of 64 fills whole tensor-core tiles. Ids past
    ``vocabulary`` never occur."""
    dropout: float = 0.0
    bias: bool = True
    tied: bool = True
    """Share the token embedding with the head."""
    end_of_text: int = -1
    """Id of the token that ends a book, by the vocabulary of the data; -1 is the last."""

    def __post_init__(self) -> None:
        for size in ("layers", "heads", "width", "context_length", "vocabulary"):
            if getattr(self, size) < 1:
                raise UserError(f"model {size}={getattr(self, size)} must be at least 1.")
        if self.width % self.heads:
            raise UserError(f"model width={self.width} is not divisible by heads={self.heads}.")
        if self.padded_vocabulary < self.vocabulary:
            raise UserError(
                f"model padded_vocabulary={self.padded_vocabulary} is smaller than vocabulary={self.vocabulary}."
            )
        if not -1 <= self.end_of_text < self.vocabulary:
            raise UserError(f"model end_of_text={self.end_of_text} is not an id below vocabulary={self.vocabulary}.")
        if not 0 <= self.dropout < 1:
            raise UserError(f"model dropout={self.dropout} must be at least 0 and below 1.")


PRESETS: dict[str, ModelConfig] = {
    "gpt2-124m": ModelConfig(),
    "gpt2-355m": ModelConfig(layers=24, heads=16, width=1024),
    "gpt2-774m": ModelConfig(layers=36, heads=20, width=1280),
    "gpt2-1558m": ModelConfig(layers=48, heads=25, width=1600),
    "small": ModelConfig(layers=4, heads=4, width=256, context_length=512),
    "edu-3m": ModelConfig(layers=4, heads=4, width=256, context_length=512, vocabulary=512, padded_vocabulary=512),
    "tiny": ModelConfig(layers=2, heads=2, width=64, context_length=128),
}
"""The four published GPT-2 sizes, and three that train on a CPU.

``edu-3m`` is the model of a study that treats its loop as a black box, with a vocabulary of its own, so that the blocks
and not the head decide time and memory.
"""


def parse_model(text: str) -> ModelConfig:
    """``gpt2-124m``, or a preset with changes: ``tiny,layers=4,dropout=0.1``."""
    preset, *changes = [part.strip() for part in text.split(",")]
    if preset not in PRESETS:
        raise UserError(f"--model {preset!r} is not a preset; the presets are {', '.join(PRESETS)}.")
    types = {field.name: field.type for field in fields(ModelConfig)}
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
    return replace(PRESETS[preset], **values)


def format_model(model: ModelConfig) -> str:
    """The shortest text that :func:`parse_model` turns into ``model``."""
    texts = []
    for name, preset in PRESETS.items():
        changed = {k: v for k, v in asdict(model).items() if v != getattr(preset, k)}
        texts.append(",".join([name, *(f"{k}={str(v).lower()}" for k, v in changed.items())]))
    return min(texts, key=lambda text: text.count(","))


_MODEL = one_word("PRESET[,FIELD=VALUE...]", ModelConfig, parse_model, format_model)

_READ = BeforeValidator(lambda value: parse_model(value) if isinstance(value, str) else value)

Model = Annotated[ModelConfig, _MODEL, _READ]
"""A preset with changes, on the command line or in a file; a file may also give all sizes one by one."""

ModelOrNone = Annotated[ModelConfig | None, or_none(_MODEL), _READ]
