"""Build and export the module of a GPT-2."""

from functools import partial
from pathlib import Path

import torch

from train.config import Execution
from train.model_config import ModelConfig
from train.models.attention import MaskFunction, block_mask, dense_mask, first_supported_kernel
from train.models.builder import Export, ModelBuilder
from train.models.gpt2 import GPT
from train.models.hf_weights import load_hf_weights, to_hf_config, to_hf_state_dict
from train.models.loss import loss_function

ATTENTION_TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "bf16-activations": torch.bfloat16}
"""Type of queries, keys and values by precision; fp32 for all other precisions."""


class GPT2Builder(ModelBuilder[ModelConfig]):
    """Builds a :class:`GPT`."""

    def inspect(self) -> ModelConfig:
        """Return the model unchanged, because formulas describe it."""
        return self.model

    def build(self, execution: Execution) -> GPT:
        return GPT(
            self.model,
            attention=self._attention(execution),
            mask=self._mask(execution),
            checkpointing=execution.checkpointing,
            loss=loss_function(execution.loss, execution.loss_chunks),
            activations=torch.bfloat16 if execution.precision == "bf16-activations" else None,
        )

    def build_for_inference(self, *, mask_books: bool, has_weights: bool) -> GPT:
        with torch.device("meta" if has_weights else "cpu"):
            return GPT(self.model, mask=self._dense_mask(mask_books))

    def load_initial_weights(self, module: GPT) -> None:
        if self.model.init_from:
            load_hf_weights(module, Path(self.model.init_from))

    def attention_kernel(self, execution: Execution, device: torch.device) -> str:
        if execution.attention != "auto":
            return execution.attention
        model, length = self.model, self.model.context_length
        kind = ATTENTION_TYPES.get(execution.precision, torch.float32)
        shape = (1, model.heads, length, model.width // model.heads)
        q = torch.empty(shape, dtype=kind, device=device, requires_grad=True)
        mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=device) if execution.mask_books else None
        return first_supported_kernel(self._attention(execution), q, model.dropout, mask)

    def user_error(self, stage: str, failure: Exception) -> None:
        """Return None, because the model is code of this program."""

    def export(self, module: GPT, folder: Path) -> Export:
        loading = f"Load it with transformers: GPT2LMHeadModel.from_pretrained({str(folder)!r})."
        return Export(to_hf_state_dict(module), to_hf_config(self.model), loading)

    def _mask(self, execution: Execution) -> MaskFunction:
        if execution.attention == "flex":
            return partial(block_mask, end_of_text=self._end_of_text if execution.mask_books else None)
        return self._dense_mask(execution.mask_books)

    def _dense_mask(self, mask_books: bool) -> MaskFunction:
        return partial(dense_mask, end_of_text=self._end_of_text) if mask_books else lambda tokens: None

    @property
    def _end_of_text(self) -> int:
        return self.model.end_of_text % self.model.vocab_size
