"""The time that the operators of a step need on a card at the least: the roofline of what is really called.

In: steps of training, eager or compiled, that run while a :class:`StepTime` is entered, on a GPU or the pretended one.
Out: seconds at the card's rates. An operator takes as long as its bytes take at the reachable bandwidth, or its FLOPs
at the reachable rate, whichever is longer: each tensor that goes in is read once, and each that comes out is written
once. A compiled graph calls matrix products and attention as an eager one does, and Triton's kernels have tensors for
arguments, so that both are counted alike.
"""

import re
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from compute import ALLOCATIONS, LEFT_ALONE
from torch import Tensor
from torch._inductor.async_compile import AsyncCompile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from train.estimate.gpt2_speed import ATTENTION_EFFICIENCY
from train.estimate.gpu_rates import GpuRates

FREE = (*ALLOCATIONS, *LEFT_ALONE, "_unsafe_view")
"""Operators that move nothing."""


class StepTime(TorchDispatchMode):
    """While it is entered, adds up the ``seconds`` of what is called on ``card``, and counts Triton's ``launches``.

    ``precision`` is that of matrix products of fp32 tensors: fp32 or tf32. Make it before anything is compiled: from
    then on Triton's kernels are not compiled, and do nothing.
    """

    def __init__(self, card: GpuRates, precision: str) -> None:
        super().__init__()
        self.card, self.precision, self.seconds, self.launches, self.entered = card, precision, 0.0, 0, False
        AsyncCompile.triton = self._kernel  # type: ignore[method-assign,assignment]

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """What is compiled runs compiled."""
        return True

    def __enter__(self) -> "StepTime":
        self.entered = True
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        self.entered = False
        super().__exit__(*raised)

    def _kernel(self, name: str, source: str, **options: Any) -> Any:
        """A kernel of Triton; it reads or writes each of its tensors, and does both where its ``source`` says so."""
        found = re.search(r"def triton_\w*\(([^)]*)\)", source)
        assert found, source
        names = [part.partition(":")[0].strip() for part in found[1].split(",")]

        def run(*inputs: Any, **launch: Any) -> None:
            tensors = zip(names, inputs, strict=False)
            passes = sum((1 + name.startswith("in_out")) * moved([value]) for name, value in tensors)
            self.seconds += self.entered * passes / self.card.bandwidth
            self.launches += self.entered

        return SimpleNamespace(run=run)

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = operator._schema.name.removeprefix("aten::")
        if name == "_local_scalar_dense" and args[0].is_cuda:
            return 0  # no gradient overflowed, or the step would be left out
        result = operator(*args, **kwargs)
        if operator.is_view or name in FREE:
            return result
        arguments = dict(zip((argument.name for argument in operator._schema.arguments), args, strict=False)) | dict(
            kwargs
        )
        changed = [
            arguments.get(argument.name)
            for argument in operator._schema.arguments
            if argument.alias_info and argument.alias_info.is_write
        ]
        seconds = moved([*args, *(changed or [result])]) / self.card.bandwidth
        if count := flop_registry.get(operator.overloadpacket):
            seconds = max(seconds, count(*args, **kwargs, out_val=result) / self._rate(name, args))
        self.seconds += seconds
        return result

    def _rate(self, name: str, args: tuple[Any, ...]) -> float:
        """FLOP/s of a matrix product or of attention, of whose FLOPs the causal half is computed."""
        kinds = {leaf.dtype for leaf in tree_leaves(args) if isinstance(leaf, Tensor)}
        rate = self.card.matmul_rate("bf16" if kinds & {torch.float16, torch.bfloat16} else self.precision)
        assert rate
        return 2 * ATTENTION_EFFICIENCY * rate if "attention" in name else rate


def moved(values: Iterable[Any]) -> int:
    """Bytes of the CUDA tensors in ``values``; a dimension that repeats the same numbers is read once."""
    tensors = [leaf for leaf in tree_leaves(list(values)) if isinstance(leaf, Tensor) and leaf.is_cuda]
    return sum(
        tensor.element_size()
        * int(torch.Size(size for size, step in zip(tensor.shape, tensor.stride(), strict=True) if step).numel())
        for tensor in tensors
    )
