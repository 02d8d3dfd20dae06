"""GPT-2 as published (Radford et al. 2019), with learned positions, pre-norm and tanh GELU.

Inputs are token ids (batch, time), and targets are the ids one position later. The output is the mean cross-entropy, or
logits if there are no targets. The implementations of attention, loss and recomputation and the type of the activations
are arguments, so that the mathematics is written once.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from train.config import ACTIVATION_BUDGETS, Checkpointing
from train.model_config import ModelConfig
from train.models import recompute
from train.models.attention import AttentionFunction, Mask, MaskFunction, sdpa
from train.models.blocks import LossModel
from train.models.embedding import TiedEmbedding
from train.models.linear import Linear
from train.models.loss import LossFunction, plain


class LayerNorm(nn.LayerNorm):
    """A layer norm that computes in the type of its input; torch accumulates in fp32 internally."""

    def forward(self, input: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return F.layer_norm(input, self.normalized_shape, self.weight.to(input.dtype), bias, self.eps)


class SelfAttention(nn.Module):
    """Multi-head causal self-attention with one projection for queries, keys and values."""

    def __init__(self, config: ModelConfig, attention: AttentionFunction) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.attention = attention
        shape = (3, config.heads, config.width // config.heads)
        self.qkv = Linear(config.width, 3 * config.width, bias=config.bias, output_shape=shape)
        self.projection = Linear(config.width, config.width, bias=config.bias)

    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        batch, time, width = x.shape
        qkv = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = self.attention(q, k, v, self.dropout if self.training else 0.0, mask)
        mixed = mixed.transpose(1, 2).reshape(batch, time, width)
        return F.dropout(self.projection(mixed), self.dropout, self.training)


class FeedForward(nn.Module):
    """Two layers with a hidden width of four times the input's, and tanh GELU as in GPT-2."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.up = Linear(config.width, 4 * config.width, bias=config.bias)
        self.projection = Linear(4 * config.width, config.width, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.up(x), approximate="tanh")
        return F.dropout(self.projection(hidden), self.dropout, self.training)


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, config: ModelConfig, attention: AttentionFunction) -> None:
        super().__init__()
        self.norm_1 = LayerNorm(config.width, bias=config.bias)
        self.attention = SelfAttention(config, attention)
        self.norm_2 = LayerNorm(config.width, bias=config.bias)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, mask: Mask = None) -> Tensor:
        x = x + self.attention(self.norm_1(x), mask)
        return x + self.feed_forward(self.norm_2(x))


class GPT(LossModel):
    """GPT-2. ``forward(tokens, targets)`` returns the mean loss, ``forward(tokens)`` the logits (padded vocabulary)."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        attention: AttentionFunction = sdpa,
        mask: MaskFunction = lambda tokens: None,
        checkpointing: Checkpointing = "none",
        loss: LossFunction = plain,
        activations: torch.dtype | None = None,
    ) -> None:
        """Create the modules with random weights.

        Args:
            config: shape of the model.
            attention: implementation of attention.
            mask: function that computes the attention mask from token ids.
            checkpointing: kind of activation checkpointing.
            loss: implementation of the loss.
            loss_chunks: number of chunks of the fused loss.
            activations: type of the residual stream; by default the type of the weights.
        """
        super().__init__()
        self.config = config
        self.mask = mask
        self.checkpointing = checkpointing
        self.loss = loss
        self.activations = activations
        self.token_embedding = nn.Embedding(config.padded_vocab_size, config.width)
        self.position_embedding = nn.Embedding(config.context_length, config.width)
        self.blocks = nn.ModuleList(Block(config, attention) for _ in range(config.layers))
        self.norm = LayerNorm(config.width, bias=config.bias)
        self.head = Linear(config.width, config.padded_vocab_size, bias=False)
        self.apply(self._init_weights)
        for name, parameter in self.named_parameters():
            if name.endswith("projection.weight"):  # GPT-2, section 2.3: residual layers are scaled by 1/sqrt(N).
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.layers))
        if config.tied:
            self.head.weight = self.token_embedding.weight

    @staticmethod
    def _init_weights(module: nn.Module) -> None:
        """Initialize weights with N(0, 0.02), because torch's N(0, 1) for a tied embedding starts at a loss of 37."""
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def hidden_states(self, tokens: Tensor, embeddings: Tensor) -> Tensor:
        """Compute the last block's output (B, T, D) for ``tokens`` (B, T) and their ``embeddings``."""
        positions = torch.arange(tokens.size(1), device=tokens.device)
        x = embeddings + self.position_embedding(positions)
        x = F.dropout(x.to(self.activations or x.dtype), self.config.dropout, self.training)
        mask = self.mask(tokens)
        for number, block in enumerate(self.blocks):
            x = self._run_block(number, block, x, mask)
        return x

    def _run_block(self, number: int, block: nn.Module, x: Tensor, mask: Mask) -> Tensor:
        stores_activations = self.checkpointing in ("none", *ACTIVATION_BUDGETS) or (
            self.checkpointing == "alternate" and number % 2 == 1
        )
        if stores_activations or not self.training:
            return block(x, mask)
        checkpoint = recompute.selective if self.checkpointing == "selective" else recompute.full
        return checkpoint(block, x, mask, dropout=self.config.dropout)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        if self.checkpointing in ACTIVATION_BUDGETS and self.training:
            with recompute.budget(self.checkpointing):
                return self._forward(tokens, targets)
        return self._forward(tokens, targets)

    def _forward(self, tokens: Tensor, targets: Tensor | None) -> Tensor:
        embeddings, head = self._embed(tokens)
        x = self.hidden_states(tokens, embeddings)
        return self.head(self.norm(x)) if targets is None else self.mean_loss(x, targets, head)

    def _embed(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the embeddings of ``tokens`` and the weight of the head."""
        weight = self.token_embedding.weight
        if self.config.tied and weight.is_cuda and torch.compiler.is_compiling():
            return TiedEmbedding.apply(weight, tokens)  # type: ignore[no-any-return]
        return self.token_embedding(tokens), self.head.weight

    def mean_loss(self, x: Tensor, targets: Tensor, head: Tensor) -> Tensor:
        """Compute norm, head and cross-entropy of the last block's output, one unit of ``--compile blocks``.

        In evaluation mode the loss excludes the padding of the vocabulary, which the exported model does not have.
        """
        return self.loss(self.norm(x), head, targets, None if self.training else self.config.vocab_size)
