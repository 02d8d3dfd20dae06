"""Models that cannot be trained, each for one reason."""

from collections import OrderedDict as OrderedDict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Bigram(nn.Module):
    """A model of one matrix, which is right."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.rows = nn.Embedding(vocab_size, vocab_size)

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


class Imaginary(Bigram):
    def forward(self, inputs: Tensor, targets: Tensor | None) -> Tensor:
        return super().forward(inputs, targets) * 1j


class Pair(Bigram):
    def forward(self, inputs: Tensor, targets: Tensor | None) -> Any:  # type: ignore[override]
        return self.rows(inputs), super().forward(inputs, targets)


class Inputs(Bigram):
    def forward(self, inputs: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(inputs, None)


class Late(Bigram):
    def forward(self, inputs: Tensor, targets: Tensor | None) -> Tensor:
        self.more = nn.Linear(1, 1)
        return super().forward(inputs, targets)


class Noted(Bigram):
    def get_extra_state(self) -> str:
        return "a note"


class Empty(nn.Module):
    def forward(self, inputs: Tensor, targets: Tensor | None) -> Tensor:
        return inputs.float().mean()


class Idle(Bigram):
    """Can be trained: what has no part in its loss stays as it is."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.spare = nn.Linear(1, 1)


class Short(Bigram):
    """Has too few positions, which nothing tells that does not compute."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.positions = nn.Embedding(16, vocab_size)

    def forward(self, inputs: Tensor, targets: Tensor | None) -> Tensor:
        places = self.positions(torch.arange(inputs.size(1), device=inputs.device))
        return super().forward(inputs, targets) + places.mean()


class Whole(Bigram):
    """Takes texts of one length alone."""

    def __init__(self, vocab_size: int, context_length: int) -> None:
        super().__init__(vocab_size)
        self.positions = nn.Parameter(torch.zeros(context_length, vocab_size))

    def forward(self, inputs: Tensor, targets: Tensor | None) -> Tensor:
        logits = self.rows(inputs) + self.positions
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Twice(Bigram):
    """Adds to the loss of a step those of the steps before it, of which nothing is left."""

    earlier: Tensor | float = 0.0

    def forward(self, inputs: Tensor, targets: Tensor | None) -> Tensor:
        self.earlier = super().forward(inputs, targets) + self.earlier
        return self.earlier


class Unseen(Bigram):
    """Fails where it is evaluated."""

    def forward(self, inputs: Tensor, targets: Tensor | None) -> Tensor:
        assert self.training, "not now"
        return super().forward(inputs, targets)


class Tired(Bigram):
    """Fails in its seventh step."""

    def forward(self, inputs: Tensor, targets: Tensor | None) -> Tensor:
        self.steps = getattr(self, "steps", 0) + (self.training and inputs.device.type != "meta")
        assert self.steps < 7, "enough"
        return super().forward(inputs, targets)


class Summed(Bigram):
    """Can be trained, and its loss is not the mean."""

    def forward(self, inputs: Tensor, targets: Tensor | None) -> Tensor:
        loss = super().forward(inputs, targets)
        return loss if targets is None else loss * targets.numel()


class Spoiled(Bigram):
    """Gives no numbers where it is evaluated."""

    def forward(self, inputs: Tensor, targets: Tensor | None) -> Tensor:
        return super().forward(inputs, targets) * (1.0 if self.training else float("nan"))


class ByData(Bigram):
    """Ties its head to its embedding by its memory alone."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.head = nn.Linear(vocab_size, vocab_size, bias=False)
        self.head.weight.data = self.rows.weight.data


def positional(vocab_size: int, /) -> nn.Module:
    return Bigram(vocab_size)


def leaving(vocab_size: int) -> nn.Module:
    raise SystemExit("by itself")


model = Bigram(257)


def again(vocab_size: int) -> nn.Module:
    return model


def half(vocab_size: int) -> nn.Module:
    return Bigram(vocab_size).half()


def turned(vocab_size: int) -> nn.Module:
    model = Bigram(vocab_size)
    model.register_parameter("turn", nn.Parameter(torch.ones(2, dtype=torch.complex64)))
    return model


def nothing(vocab_size: int) -> None:
    return None


def few(vocab_size: int) -> nn.Module:
    return Bigram(vocab_size - 1)


def sparse(vocab_size: int) -> nn.Module:
    model = Bigram(vocab_size)
    model.rows.sparse = True
    return model


def double(vocab_size: int) -> nn.Module:
    return Bigram(vocab_size).to(torch.float64)


def lazy(vocab_size: int) -> nn.Module:
    model = Bigram(vocab_size)
    model.add_module("late", nn.LazyLinear(3))
    return model


def frozen(vocab_size: int) -> nn.Module:
    return Bigram(vocab_size).requires_grad_(False)


def broken(vocab_size: int) -> nn.Module:
    raise RuntimeError("it cannot be built")
