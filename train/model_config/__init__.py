"""Specifications of models, without torch: a GPT-2 by its shape, or a custom model by the callable that creates it."""

from train.model_config.gpt2 import PRESETS, ModelConfig
from train.model_config.spec import Formula, ModelSpec
from train.model_config.text import AnyModel, Model, ModelOrNone, parse_model, short_name

__all__ = [
    "PRESETS",
    "AnyModel",
    "Formula",
    "Model",
    "ModelConfig",
    "ModelOrNone",
    "ModelSpec",
    "parse_model",
    "short_name",
]
