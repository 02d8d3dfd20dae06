"""nanoGPT's model and training step, written from its published description, as the peer that speeds are compared with.

It is GPT-2 as in Radford et al. 2019 with the names of the published checkpoints: learned positions, pre-norm blocks
with one projection for queries, keys and values, torch's fused attention, exact GELU, and a head tied to the token
embedding. The step is autocast, gradients clipped at 1, and fused AdamW with decay on matrices, compiled as a whole.
It is part of the program, because the GPU test on a user's machine trains it next to this project's model.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from train.model_config import ModelConfig


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, shape: ModelConfig) -> None:
        super().__init__()
        self.heads = shape.heads
        self.c_attn = nn.Linear(shape.width, 3 * shape.width, bias=shape.bias)
        self.c_proj = nn.Linear(shape.width, shape.width, bias=shape.bias)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = self.c_attn(x).split(width, dim=2)
        q, k, v = (part.view(batch, time, self.heads, width // self.heads).transpose(1, 2) for part in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(mixed.transpose(1, 2).contiguous().view(batch, time, width))


class FeedForward(nn.Module):
    """Two layers with exact GELU between them."""

    def __init__(self, shape: ModelConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(shape.width, 4 * shape.width, bias=shape.bias)
        self.c_proj = nn.Linear(4 * shape.width, shape.width, bias=shape.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x)))


class Block(nn.Module):
    """One pre-norm block."""

    def __init__(self, shape: ModelConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(shape.width, bias=shape.bias)
        self.attn = Attention(shape)
        self.ln_2 = nn.LayerNorm(shape.width, bias=shape.bias)
        self.mlp = FeedForward(shape)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    """The model; ``forward(tokens, targets)`` returns the mean loss."""

    def __init__(self, shape: ModelConfig) -> None:
        super().__init__()
        self.wte = nn.Embedding(shape.padded_vocab_size, shape.width)
        self.wpe = nn.Embedding(shape.context_length, shape.width)
        self.h = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.ln_f = nn.LayerNorm(shape.width, bias=shape.bias)
        self.lm_head = nn.Linear(shape.width, shape.padded_vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        positions = torch.arange(tokens.size(1), device=tokens.device)
        x = self.wte(tokens) + self.wpe(positions)
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


NAMES = {
    "token_embedding": "wte", "position_embedding": "wpe", "blocks": "h", "norm_1": "ln_1", "norm_2": "ln_2",
    "norm": "ln_f", "attention": "attn", "qkv": "c_attn", "feed_forward": "mlp", "up": "c_fc", "projection": "c_proj",
    "head": "lm_head",
}  # fmt: skip
"""Names of parts of this project's GPT-2, and of the published checkpoints."""


def load_initial_weights(model: NanoGPT, ours: nn.Module) -> None:
    """Give ``model`` the weights of this project's GPT-2 of the same shape, so that both start from one point."""
    weights = {
        ".".join(NAMES.get(part, part) for part in name.split(".")): value for name, value in ours.state_dict().items()
    }
    model.load_state_dict(weights)


def make_optimizer(
    model: nn.Module, *, learning_rate: float, betas: tuple[float, float], decay: float, fused: bool
) -> torch.optim.AdamW:
    """Return AdamW with decay on matrices and embeddings alone."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=fused)
