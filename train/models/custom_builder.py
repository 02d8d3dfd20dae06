"""Build and export the module of a custom model."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from torch.nn.attention import SDPBackend

from infra.errors import UserError
from infra.schema import to_json
from train.config import Execution
from train.model_config.custom import CustomModel
from train.models import custom
from train.models.attention import kernel_order
from train.models.blocks import shared_names
from train.models.builder import Export, ModelBuilder


class CustomModelBuilder(ModelBuilder[CustomModel]):
    """Builds the module that a callable returns, and changes how its blocks are executed."""

    def inspect(self) -> CustomModel:
        return self.model if self.model.info else replace(self.model, info=custom.inspect_model(self.model))

    def build(self, execution: Execution) -> nn.Module:
        kernels: list[SDPBackend] = []
        if self.model.calls_attention and execution.attention == "manual":
            kernels = [SDPBackend.MATH]
        elif self.model.calls_attention and execution.attention != "sdpa":
            kernels = kernel_order(self._attention(execution))
        return custom.with_execution_switches(custom.build_model(self.model), execution.checkpointing, kernels)

    def build_for_inference(self, *, mask_books: bool, has_weights: bool) -> nn.Module:
        """Build the module with real weights in any case, because it may have tensors outside its state."""
        return custom.build_model(self.model)

    def attention_kernels(self, execution: Execution, device: torch.device) -> list[str]:
        if not self.model.calls_attention:
            return ["custom"]
        return ["math" if execution.attention == "manual" else execution.attention]

    def load_initial_weights(self, module: nn.Module) -> None:
        """Do nothing, because a custom model starts from the weights that its callable creates."""

    def user_error(self, stage: str, failure: Exception) -> UserError:
        return custom.model_error(self.model, stage, failure)

    def export(self, module: nn.Module, folder: Path) -> Export:
        shared = shared_names(module)
        weights = {name: value.contiguous().cpu() for name, value in module.state_dict().items() if name not in shared}
        loading = f"Load it with safetensors.torch.load_model into the module that {self.model.callable} returns."
        return Export(weights, to_json(replace(self.model, info=None)), loading)
