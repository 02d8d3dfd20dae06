"""The token embedding of a tied head, with one gradient for both uses of its weight in code compiled for a GPU.

The backward pass that torch derives fills a table with zeros, adds the gradients of the embeddings to its rows, and
adds the table to the gradient of the head. Here the rows are added to the gradient of the head itself, which saves two
passes over the table.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class TiedEmbedding(torch.autograd.Function):
    """Looks up ``tokens`` in ``weight``, and returns their embeddings and the weight for the head."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(tokens)
        return F.embedding(tokens, weight), weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (embedding_gradient, head_gradient), (tokens,) = gradients, ctx.saved_tensors
        sum_type = torch.promote_types(head_gradient.dtype, torch.float32)  # Frequent tokens have many small addends.
        total = head_gradient.to(sum_type).index_put((tokens,), embedding_gradient.to(sum_type), accumulate=True)
        return total.to(head_gradient.dtype), None
