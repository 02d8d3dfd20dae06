"""The settings that a search can vary, by its objective, and their values on the command line."""

from collections.abc import Callable, Sequence
from typing import Any

from infra.errors import UserError, suggest_nearest
from train.config import AUTO, CHOICES, EAGER_BACKENDS, SETTING_TYPES
from train.estimate.recomputation import CHECKPOINTING_BY_TIME

KNOBS = (
    "allocator", "attention", "checkpointing", "compile", "fp8", "loader_threads", "loss", "loss_chunks", "optimizer",
    "precision",
)  # fmt: skip
"""Settings that can be searched, because they do not change the mathematics of a step."""

NOT_SEARCHED = ("auto", "adafactor", "muon", "lion", "sgd", *EAGER_BACKENDS)
"""Values of knobs that are not searched: ``auto``, and optimizers with other mathematics."""

SETTINGS = (
    "learning_rate", "global_batch", "schedule", "warmup_steps", "weight_decay", "beta1", "beta2", "optimizer",
    "clip_norm",
)  # fmt: skip
"""Settings of a step's mathematics that can be searched."""

SHAPE = ("layers", "heads", "width", "dropout")
"""Changes of a preset model that can be searched, such as ``layers`` in ``tiny,layers=4``."""


def parse_knobs(words: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """Parse the values to try by knob from ``words`` such as ``compile=off,whole``.

    ``checkpointing=auto`` stands for every kind.
    """

    def check(name: str, word: str) -> None:
        if name not in KNOBS:
            raise UserError(f"--knobs {word}: {name!r} is not a knob. Choose from {', '.join(KNOBS)}.")

    return {
        name: CHECKPOINTING_BY_TIME
        if (name, values) == ("checkpointing", AUTO)
        else tuple(_value(name, text) for text in values.split(","))
        for name, values in _values_by_name(words, check).items()
    }


def _values_by_name(words: Sequence[str], check: Callable[[str, str], None]) -> dict[str, str]:
    """Split ``words`` into values by name; ``check`` raises ``UserError`` for a name, in its word, that is no knob."""
    texts: dict[str, str] = {}
    for word in words:
        name, _, values = word.partition("=")
        name = name.replace("-", "_")
        check(name, word)
        if name in texts:
            raise UserError(f"--knobs contains {name} twice. Combine its values, as in {name}=A,B.")
        texts[name] = values
    return texts


def _value(name: str, text: str) -> Any:
    kind = SETTING_TYPES[name]
    if kind is int and text.isdecimal():
        return int(text)
    choices = {value: value for value in CHOICES.get(name, ()) if value not in NOT_SEARCHED}
    values: dict[str, Any] = {"true": True, "false": False} if kind is bool else choices
    if text not in values:
        valid = f"Choose from {', '.join(values)}." if values else "Use integers."
        raise UserError(f"--knobs {name}={text}: {text!r} is not a valid value. {valid}")
    return values[text]


def parse_learning_knobs(words: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """Parse the values to try by knob from ``words`` such as ``learning_rate=3e-4,6e-4``."""

    def check(name: str, word: str) -> None:
        if name in KNOBS and name not in SETTINGS:
            raise UserError(
                f"--knobs {word}: {name} is a setting of the execution, which does not change what a step learns. Find "
                f"its value first, with --objective speed, and then use --config runs/NAME/best.json."
            )
        if name not in SETTINGS + SHAPE:
            raise UserError(f"--knobs {word}: {name!r} is not a knob{suggest_nearest(name, SETTINGS + SHAPE)}")

    if not words:
        raise UserError("--objective loss has no --knobs to search. Use for example learning_rate=3e-4,6e-4,1.2e-3.")
    return {
        name: tuple(dict.fromkeys(_learning_value(name, text) for text in values.split(",")))
        for name, values in _values_by_name(words, check).items()
    }


def _learning_value(name: str, text: str) -> Any:
    choices = CHOICES.get(name, ())
    kind = {"dropout": float}.get(name, int) if name in SHAPE else SETTING_TYPES[name]
    try:
        if choices:
            return choices[choices.index(text)]
        return int(text) if kind is int else float(text)
    except ValueError:
        valid = f"Choose from {', '.join(choices)}." if choices else f"Use {'integers' if kind is int else 'numbers'}."
        raise UserError(f"--knobs {name}={text}: {text!r} is not a valid value. {valid}") from None
