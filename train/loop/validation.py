"""Validation: the same held-out windows at every call, in whole batches spread over the workers.

Losses per byte of text are comparable between vocabularies.
"""

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.encoding.vocabulary import Vocabulary
from train.config import TrainConfig
from train.data.loader import BatchLoader
from train.data.windows import Windows
from train.model.parallel import Workers


@torch.no_grad()
def validate(
    windows: Windows,
    config: TrainConfig,
    device: torch.device,
    workers: Workers,
    model: nn.Module,
    forward: Callable[..., Tensor],
    arithmetic: Callable[[], contextlib.AbstractContextManager[Any]],
) -> Tensor:
    """Losses of this worker's share of ``cycle.val`` global batches, or of the whole split if it has fewer.

    Batches have the shape of the training's, which compiled code relies on, so an incomplete last one is left out.
    """
    across = config.micro_batch * config.workers
    count = min(config.cycle.val * config.global_batch, max(windows.count, across)) // across
    loader = BatchLoader(
        windows, micro_batch=config.micro_batch, accumulation=1, position=0, device=device,
        rank=workers.rank, workers=workers.size, threads=config.loader_workers,
    )  # fmt: skip
    losses = torch.zeros(count, device=device)
    model.eval()
    for index in range(count):
        inputs, targets = loader.next()
        with arithmetic():
            losses[index] = forward(inputs, targets)
    model.train()
    return losses


def perplexity(loss: float | None) -> float | None:
    """exp of ``loss``, in nats per token; None when that overflows."""
    return math.exp(loss) if loss is not None and loss < 700 else None


def bits_per(loss: float | None, tokens: int, units: int | None) -> float | None:
    """``loss``, in nats per token, as bits per byte or character of a text with ``tokens`` tokens and ``units``."""
    return loss / math.log(2) * tokens / units if loss is not None and units else None


def bytes_of(windows: Windows, vocabulary: Vocabulary | None) -> int | None:
    """UTF-8 bytes of the text of ``windows``, from its tokens; None without a vocabulary."""
    if vocabulary is None:
        return None
    return sum(int(vocabulary.lengths[tokens].sum(dtype="int64")) for tokens in windows.streams)
