"""Models as texts of ``--model`` and as values in files: the one place that knows all kinds of models.

A kind has its own parser here and its fields in files. Everything else uses :class:`train.model_config.spec.ModelSpec`.
"""

from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator

from infra.cli.units import optional_flag, single_value_flag
from infra.schema import from_json
from train.model_config.custom import CustomModel, parse_custom
from train.model_config.gpt2 import ModelConfig, parse_hf_folder, parse_preset
from train.model_config.spec import ModelSpec

AnyModel = ModelConfig | CustomModel
"""All kinds of models, as a type of which files and flags have values."""


def parse_model(text: str) -> AnyModel:
    """``gpt2-124m``, ``tiny,layers=4``, ``package.module:callable,width=512``, or ``hf:FOLDER,dropout=0.1``."""
    name, *changes = [part.strip() for part in text.split(",")]
    if name.startswith("hf:"):
        return parse_hf_folder(text, name.removeprefix("hf:"), changes)
    return parse_custom(name, changes) if ":" in name else parse_preset(text, name, changes)


def short_name(model: ModelSpec) -> str:
    """The preset, the callable or the folder alone, for names of folders."""
    return Path(model.text.partition(",")[0].rpartition(":")[2]).name


def _read(value: Any) -> Any:
    """A model in a file: text as on the command line, or an object of all its fields."""
    if isinstance(value, dict):
        return from_json(CustomModel if "callable" in value else ModelConfig, value, "model")
    if isinstance(value, str):
        return parse_model(value)
    if value is None:
        return None
    raise ValueError(f"model is {value!r}; it should be a text as of --model, or an object of its fields.")


_MODEL = single_value_flag("MODEL[,NAME=VALUE...]", (ModelConfig, CustomModel), parse_model, lambda model: model.text)

_READ = BeforeValidator(_read)

Model = Annotated[AnyModel, _MODEL, _READ]
"""A preset with changes or a callable, on the command line or in a file; a file may also give all fields one by one."""

ModelOrNone = Annotated[AnyModel | None, optional_flag(_MODEL), _READ]
