"""Registry of all kinds of models, which are texts in ``--model`` and values in files.

Each kind has its own parser. All other code uses :class:`train.model_config.spec.ModelSpec`.
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
"""Type of the model in flags and files: any kind of model."""


def parse_model(text: str) -> AnyModel:
    """Parse the text of ``--model``.

    Examples are ``gpt2-124m``, ``tiny,layers=4``, ``package.module:callable,width=512`` and ``hf:FOLDER,dropout=0.1``.
    """
    name, *changes = [part.strip() for part in text.split(",")]
    if name.startswith("hf:"):
        return parse_hf_folder(text, name.removeprefix("hf:"), changes)
    return parse_custom(name, changes) if ":" in name else parse_preset(text, name, changes)


def short_name(model: ModelSpec) -> str:
    """Return the name of the preset, callable or folder without changes, for default names of runs."""
    return Path(model.text.partition(",")[0].rpartition(":")[2]).name


def _read(value: Any) -> Any:
    """Read a model from a file: text as on the command line, or an object of all its fields."""
    if isinstance(value, dict):
        return from_json(CustomModel if "callable" in value else ModelConfig, value, "model")
    if isinstance(value, str):
        return parse_model(value)
    if value is None:
        return None
    raise ValueError(f"model is {value!r}; it should be a text as in --model, or an object of its fields.")


_MODEL = single_value_flag("MODEL[,NAME=VALUE...]", (ModelConfig, CustomModel), parse_model, lambda model: model.text)

_READ = BeforeValidator(_read)

Model = Annotated[AnyModel, _MODEL, _READ]
"""Type of a setting that is a model: a preset with changes or a callable. A file may also contain all its fields."""

ModelOrNone = Annotated[AnyModel | None, optional_flag(_MODEL), _READ]
"""Type of a setting that is a model or None."""
