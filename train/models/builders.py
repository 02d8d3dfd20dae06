"""Registry of the builders of all kinds of models, by the class of their specification."""

from collections.abc import Callable
from typing import Any

from train.model_config import ModelConfig, ModelSpec
from train.model_config.custom import CustomModel
from train.models.builder import ModelBuilder
from train.models.custom_builder import CustomModelBuilder
from train.models.gpt2_builder import GPT2Builder

BUILDERS: dict[type[ModelSpec], Callable[[Any], ModelBuilder[Any]]] = {
    ModelConfig: GPT2Builder,
    CustomModel: CustomModelBuilder,
}


def builder_of(model: ModelSpec) -> ModelBuilder[Any]:
    """Create the builder of ``model``."""
    return BUILDERS[type(model)](model)
