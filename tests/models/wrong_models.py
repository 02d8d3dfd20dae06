"""Models that cannot be trained, each for one reason."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Bigram(nn.Module):
    """A model of one matrix, which is right."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.rows = nn.Embedding(vocabulary, vocabulary)

    def forward(self, inputs: Tensor, targets: Tensor | None) -> Tensor:
        logits = self.rows(inputs)
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Unreduced(Bigram):
    def forward(self, inputs: Tensor, targets: Tensor | None) -> Tensor:
        logits = self.rows(inputs)
        return F.cross_entropy(logits.flatten(0, 1), logits.argmax(-1).flatten(), reduction="none")


class Detached(Bigram):
    def forward(self, inputs: Tensor, targets: Tensor | None) -> Tensor:
        return super().forward(inputs, targets).detach()


class Raising(Bigram):
    def forward(self, inputs: Tensor, targets: Tensor | None) -> Tensor:
        raise ValueError("of two\nlines")


def nothing(vocabulary: int) -> None:
    return None


def few(vocabulary: int) -> nn.Module:
    return Bigram(vocabulary - 1)


def sparse(vocabulary: int) -> nn.Module:
    model = Bigram(vocabulary)
    model.rows.sparse = True
    return model


def double(vocabulary: int) -> nn.Module:
    return Bigram(vocabulary).to(torch.float64)


def lazy(vocabulary: int) -> nn.Module:
    model = Bigram(vocabulary)
    model.add_module("late", nn.LazyLinear(3))
    return model


def frozen(vocabulary: int) -> nn.Module:
    return Bigram(vocabulary).requires_grad_(False)


def broken(vocabulary: int) -> nn.Module:
    raise RuntimeError("it cannot be built")
