"""Build and export the module of a GPT-2."""

from functools import partial
from pathlib import Path

import torch

from train.config import EAGER_BACKENDS, Execution
from train.model_config import ModelConfig
from train.models.attention import AttentionInputs, MaskFunction, block_mask, dense_mask, supported_kernels
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
            loss=loss_function(execution.loss, execution.loss_chunks, compiles=execution.compile not in EAGER_BACKENDS),
            activations=torch.bfloat16 if execution.precision == "bf16-activations" else None,
        )

    def build_for_inference(self, *, mask_books: bool, has_weights: bool) -> GPT:
        with torch.device("meta" if has_weights else "cpu"):
            return GPT(self.model, mask=self._dense_mask(mask_books))

    def load_initial_weights(self, module: GPT) -> None:
        if self.model.init_from:
            load_hf_weights(module, Path(self.model.init_from))

    def attention_kernels(self, execution: Execution, device: torch.device) -> list[str]:
        """Return the kernels in order of preference; plain operations are the last choice of ``auto``."""
        inputs = self.attention_inputs(execution, device) if execution.attention == "auto" else None
        if inputs is None:
            return [execution.attention]
        queries = inputs.queries.requires_grad_()
        attention = self._attention(execution)
        return [*supported_kernels(attention, queries, self.model.dropout, inputs.mask), "manual"]

    def attention_inputs(self, execution: Execution, device: torch.device) -> AttentionInputs | None:
        """Return two heads of two sequences as the blocks compute them, from one tensor of queries, keys and values.

        Only one sequence has a mask, in which a book ends: the mask of a long context takes more than all heads.
        FlexAttention has no inputs, because its kernel is not checked.
        """
        if execution.attention == "flex":
            return None
        model = self.model
        sequences, heads, time = 1 if execution.mask_books else 2, min(2, model.heads), model.context_length
        dtype = ATTENTION_TYPES.get(execution.precision, torch.float32)
        shape = (sequences, time, 3, heads, model.width // model.heads)
        qkv = torch.randn(shape, device=device, dtype=dtype)
        tokens = torch.full((sequences, time), self._end_of_text - 1, device=device)
        tokens[:, time // 3] = self._end_of_text
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        return AttentionInputs(q, k, v, self._mask(execution)(tokens))

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
