"""Models that no one here wrote, in the form that ``--model own_models:NAME`` takes, at sizes for a test."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)


class Causal(nn.Module):
    """A causal language model of ``transformers``, whose own loss would shift the targets again."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, targets: Tensor | None) -> Tensor:
        logits = self.model(inputs, use_cache=False).logits
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def gpt2(vocab_size: int, context_length: int, width: int = 64, layers: int = 2, heads: int = 2) -> nn.Module:
    return Causal(GPT2LMHeadModel(GPT2Config(
        vocab_size=vocab_size, n_positions=context_length, n_embd=width, n_layer=layers, n_head=heads,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        activation_function="gelu_pytorch_tanh",
    )))  # fmt: skip


def _sizes(vocab_size: int, context_length: int) -> dict[str, Any]:
    return {
        "vocab_size": vocab_size, "max_position_embeddings": context_length, "hidden_size": 64,
        "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip


def llama(vocab_size: int, context_length: int) -> nn.Module:
    return Causal(LlamaForCausalLM(LlamaConfig(**_sizes(vocab_size, context_length))))


def qwen(vocab_size: int, context_length: int) -> nn.Module:
    return Causal(Qwen2ForCausalLM(Qwen2Config(**_sizes(vocab_size, context_length))))


class Encoder(nn.Module):
    """torch's own encoder under a causal mask, which gives no logits without targets."""

    def __init__(self, vocab_size: int, context_length: int, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.positions = nn.Parameter(torch.zeros(context_length, width))
        layer = nn.TransformerEncoderLayer(width, 2, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocab_size)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(inputs.size(1), device=inputs.device)
        hidden = self.encoder(self.embedding(inputs) + self.positions, mask=mask, is_causal=True)
        return F.cross_entropy(self.head(hidden).flatten(0, 1).float(), targets.flatten())
