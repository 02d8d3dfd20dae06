"""Suites: lists of config changes, each of which becomes one measured run.

In a cumulative suite each rung keeps the changes of the previous rungs. In other suites each rung changes the baseline.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from infra.errors import UserError, suggest_nearest
from infra.schema import to_json
from train.config import SETTING_TYPES, BatchConfig, TrainConfig, config_from_json
from train.model_config import ModelConfig, ModelSpec, parse_model
from tune.config import BATCH

Changes = Mapping[str, Any]
"""Values of settings of TrainConfig and, with the prefix ``model.``, of ModelConfig. Two more names are ``batch``,
which sets micro-batch and global batch, and ``vocabulary_multiple``, which pads the vocabulary to a multiple."""


@dataclass(frozen=True)
class Rung:
    """One change of the configuration."""

    name: str
    """Name of the rung."""
    changes: Changes = field(default_factory=dict)
    """Values of the settings that the rung changes."""
    changes_numerics: bool = False
    """Whether the rung is not numerically equivalent to the previous one; always true for another global batch."""


@dataclass(frozen=True)
class Suite:
    """A baseline and a list of rungs. The baseline is also the control that runs again between rungs."""

    name: str
    """Name of the suite."""
    title: str
    """Title of the results."""
    base: Changes
    """Settings of the baseline that differ from the defaults."""
    rungs: tuple[Rung, ...]
    """Rungs in the order of their runs."""
    cumulative: bool = False
    """Whether each rung keeps the changes of the previous rungs."""
    steps_timed: int = 1
    """Number of steps whose time is in the table of results, as in the study that the suite repeats."""
    seeds: int = 1
    """Number of seeds for rungs that change the precision or the numerics, to compare their validation losses."""


def search_result_rung(settings: Mapping[str, Any]) -> Rung:
    """Create a rung with the batch and the execution settings of a search's winner from its ``settings``."""
    names = (
        "global_batch", "micro_batch", "precision", "attention", "compile", "checkpointing", "loss", "loss_chunks",
        "optimizer", "loader_threads", "allocator",
    )  # fmt: skip
    return Rung("searched batch", {name: settings[name] for name in names}, changes_numerics=True)


STREAMING = "streaming"
"""Name of the rung of :func:`streaming_rung`."""


def streaming_rung(sources: Iterable[str]) -> Rung:
    """Create a rung that trains on a book stream from ``sources`` instead of on shards.

    Its loss may differ, because it trains on other windows in another order.
    """
    return Rung(STREAMING, {"stream": [*sources]}, changes_numerics=True)


def choose(suite: Suite, names: Iterable[str]) -> Suite:
    """Return ``suite`` with only the rungs of these ``names``, in the suite's order."""
    rung_names, names = [rung.name for rung in suite.rungs], list(names)
    for name in names:
        if name not in rung_names:
            raise UserError(
                f"--rungs {name!r} is not a rung of the suite {suite.name}{suggest_nearest(name, rung_names)}"
            )
    return replace(suite, rungs=tuple(rung for rung in suite.rungs if rung.name in names))


def shorten_for_cpu(suite: Suite) -> Suite:
    """Return ``suite`` for a CPU, with the model tiny and one eighth of each batch in the baseline and every rung."""

    def shorten(changes: Changes) -> Changes:
        sizes = ("batch", "micro_batch", "global_batch")
        small = {n: -(-changes[n] // 8) for n in sizes if isinstance(changes.get(n), int)}
        return {**changes, **small} | ({"model": "tiny"} if "model" in changes else {})

    start = {"model": "tiny", "micro_batch": BATCH, "global_batch": BatchConfig.global_batch}
    rungs = tuple(replace(rung, changes=shorten(rung.changes)) for rung in suite.rungs)
    return replace(suite, base=shorten(start | dict(replace_model(suite, None).base)), rungs=rungs)


def replace_model(suite: Suite, model: ModelSpec | None) -> Suite:
    """Return ``suite`` without its model, its context length, and the settings that do not apply to ``model``."""
    model_settings = ("model", "model.context_length") if "model" in suite.base else ()
    base = {name: value for name, value in suite.base.items() if name not in model_settings}
    return replace(suite, base={n: v for n, v in base.items() if not (model and model.unsupported_reason(n, v))})


def apply_changes(config: TrainConfig, changes: Changes, source: str = "the suite") -> TrainConfig:
    """Return ``config`` with the ``changes``. Raises ``UserError`` with their ``source`` if a change is invalid."""
    settings = {*SETTING_TYPES, *(f"model.{field.name}" for field in fields(ModelConfig))}
    settings = (settings | {"batch", "vocabulary_multiple"}) - {"data"}  # The ladder's --data sets it.
    for name in changes:
        if name not in settings:
            raise UserError(f"{source} changes {name!r}, which is not a setting{suggest_nearest(name, settings)}")
    for name in ("batch", "vocabulary_multiple"):
        if not (isinstance(changes.get(name, 1), int) and changes.get(name, 1) > 0):
            raise UserError(f"{source}: {name} is {changes[name]!r}, but must be an integer of at least 1.")
    try:
        model = parse_model(str(changes["model"])) if "model" in changes else config.model
    except UserError as mistake:
        raise UserError(f"{source}: {mistake}") from mistake
    for name, value in changes.items():
        if reason := model.unsupported_reason(name, value):
            raise UserError(f"{source}: {name}={value} does not apply to {model.text}: {reason}.")
    model_fields = {name.removeprefix("model."): value for name, value in changes.items() if name.startswith("model.")}
    if multiple := changes.get("vocabulary_multiple"):
        model_fields["padded_vocab_size"] = -(-model.vocab_size // multiple) * multiple
    values = {name: value for name, value in changes.items() if name in SETTING_TYPES}
    if batch := changes.get("batch"):
        values |= {"micro_batch": batch, "global_batch": batch}
    return config_from_json(config.to_json() | values | {"model": to_json(model) | model_fields}, source)
