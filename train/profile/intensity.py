"""FLOPs per byte moved, by class of operator: whether faster memory or faster arithmetic would speed it up.

Every operator below autograd is counted as dispatched, with its inputs read and its outputs written once: contractions,
normalisations, and element-wise operators, which are the rest (Ivanov et al., arXiv 2007.00072, table 1).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

NORMALISATIONS = ("layer_norm", "softmax", "nll_loss", "sum", "mean", "norm")


@dataclass
class Work:
    """Arithmetic and traffic of one class of operators."""

    flops: float = 0.0
    bytes: float = 0.0

    @property
    def intensity(self) -> float:
        """FLOPs per byte; 0 when nothing is moved."""
        return self.flops / self.bytes if self.bytes else 0.0


class Intensity(TorchDispatchMode):
    """While the block runs, counts into ``classes``: contractions, normalisations, element-wise."""

    def __init__(self) -> None:
        super().__init__()
        self.classes = {name: Work() for name in ("contractions", "normalisations", "element-wise")}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        results = list(_tensors(out))
        if func.is_view or not results:
            return out
        inputs = list(_tensors([args, kwargs]))
        name = func.__name__
        counted = flop_registry.get(func.overloadpacket)
        if counted:
            kind, flops = "contractions", float(counted(*args, **(kwargs or {}), out_val=out))
        else:
            kind = "normalisations" if any(word in name for word in NORMALISATIONS) else "element-wise"
            flops = float(max(tensor.numel() for tensor in [*inputs, *results]))
        work = self.classes[kind]
        work.flops += flops
        work.bytes += sum(tensor.numel() * tensor.element_size() for tensor in [*inputs, *results])
        return out


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in the lists, tuples and dicts that an operator takes and gives."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _tensors(inner)


def measure(work: Any) -> dict[str, Work]:
    """The work of one call of ``work``, by class."""
    with Intensity() as counter:
        work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return counter.classes
