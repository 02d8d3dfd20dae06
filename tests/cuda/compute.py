"""Eager CUDA operators, computed on the CPU over the pretended device's memory, which is this process's own.

In: an operator's call with CUDA tensors, when torch has decided all about it but which device's kernel runs. Out: its
results, in tensors of torch's CUDA allocator. An operator is computed when it is launched, after all that its stream
was given before. Copies between host and device are left to the device, which is late with them. Compiled kernels are
not computed.
"""

import ctypes
import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._inductor.async_compile import AsyncCompile
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

POISON, POISONED = 0x5B, 2**22
"""What new memory holds, up to so many bytes: a test that allocates gigabytes must not have them taken."""

ALLOCATIONS = ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided")
LEFT_ALONE = ("detach", "record_stream", "set_", "resize_", "is_pinned", "_pin_memory", "alias", "lift_fresh")
"""What computes nothing."""

WAITING = ("nonzero", "equal", "unique_dim", "_unique2", "masked_select")
"""Operators whose kernels wait for the device, because the host needs a size or an answer."""


DEVICE = ctypes.CDLL(None)
"""The pretended device, which is loaded before all else."""


def misuses() -> str:
    """What was done to the device, since this was last asked, that is wrong on a real one and would go unnoticed."""
    DEVICE.pretended_misuses.restype = ctypes.c_char_p
    return DEVICE.pretended_misuses().decode()


class OnCpu(TorchDispatchMode):
    """While it is entered, eager CUDA operators are computed."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._compute = DEVICE.pretended_compute
        self._compute.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_int]

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if isinstance(operator, HigherOrderOperator):  # FlexAttention, which has a form in plain operators
            with self:
                return operator.dispatch(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
        if fake or any(isinstance(tensor, FakeTensor) for tensor in tensors):
            return operator(*args, **kwargs)
        if any(type(tensor) not in (Tensor, torch.nn.Parameter) for tensor in tensors):
            return NotImplemented  # a subclass first says what it consists of
        makes = kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda"
        if not makes and not any(tensor.is_cuda for tensor in tensors):
            return operator(*args, **kwargs)
        with self:
            composed = operator.decompose(*args, **kwargs)
        if composed is not NotImplemented:
            return composed
        name = operator._schema.name.removeprefix("aten::")
        if name in ALLOCATIONS:
            return self._poisoned(operator(*args, **kwargs))
        if operator.is_view or name in LEFT_ALONE or name == "_local_scalar_dense" or _is_copy(name, args, kwargs):
            return operator(*args, **kwargs)
        if name in WAITING:
            torch.cuda.current_stream().synchronize()
        self._launch(tensors)
        return _computed(name, operator, args, kwargs)

    def _launch(self, tensors: list[Tensor]) -> None:
        """Have the device do what the stream was given before, and note that ``tensors`` are used there."""
        used = [tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.is_cuda]
        self._compute(torch.cuda.current_stream().cuda_stream, (ctypes.c_void_p * len(used))(*used), len(used))

    def _poisoned(self, tensor: Tensor) -> Tensor:
        """Nobody may rely on what new memory holds, nor read what was freed."""
        storage = tensor.untyped_storage()
        if tensor.is_cuda and 0 < storage.nbytes() <= POISONED:
            self._launch([tensor])
            ctypes.memset(storage.data_ptr(), POISON, storage.nbytes())
        return tensor


def _is_copy(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether bytes cross between host and device as they are, which is the device's to do."""
    if name == "copy_":
        to, source = args[0], args[1]
        device, dtype, contiguous = to.device, to.dtype, to.is_contiguous()
    elif name == "_to_copy":
        source = args[0]
        device, dtype, contiguous = kwargs.get("device") or source.device, kwargs.get("dtype") or source.dtype, True
    else:
        return False
    crosses = torch.device(device).type != source.device.type
    return crosses and dtype == source.dtype and contiguous and source.is_contiguous()


def _computed(name: str, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The results of ``operator``; one that works in place returns its argument itself."""
    mapped: dict[int, tuple[Tensor, Tensor]] = {}

    def on_cpu(tensor: Tensor) -> Tensor:
        if not tensor.is_cuda:
            return tensor
        return mapped.setdefault(id(tensor), (_over_the_same_memory(tensor), tensor))[0]

    args, kwargs = tree_map_only(Tensor, on_cpu, (args, kwargs))
    if kwargs.get("device") is not None:
        kwargs["device"] = torch.device("cpu")
    compute = ATTENTION.get(name) or PRODUCTS.get(operator) or operator
    results = compute(*args, **kwargs)
    arguments = {id(alias): tensor for alias, tensor in mapped.values()}
    stays = name == "_to_copy" and not mapped  # to the device, with another dtype

    def back(result: Tensor) -> Tensor:
        return arguments[id(result)] if id(result) in arguments else _on_the_device(result)

    return _on_the_device(results) if stays else tree_map_only(Tensor, back, results)


def _product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """A product of 16-bit matrices in fp32, which the CPU has no operator for."""
    return left.to(dtype) @ right.to(dtype)


def _product_into(left: Tensor, right: Tensor, dtype: torch.dtype, *, out: Tensor) -> Tensor:
    return torch.mm(left.to(dtype), right.to(dtype), out=out)


def _sum_into(total: Tensor, left: Tensor, right: Tensor, dtype: torch.dtype, *, out: Tensor) -> Tensor:
    return torch.addmm(total, left.to(dtype), right.to(dtype), out=out)


PRODUCTS = {
    torch.ops.aten.mm.dtype: _product,
    torch.ops.aten.mm.dtype_out: _product_into,
    torch.ops.aten.addmm.dtype_out: _sum_into,
}


def _over_the_same_memory(tensor: Tensor) -> Tensor:
    """A CPU tensor that is the CUDA tensor: the same bytes, shape and strides."""
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    memory = (ctypes.c_ubyte * storage.nbytes()).from_address(storage.data_ptr())
    whole = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=tensor.dtype).set_(whole, tensor.storage_offset(), tensor.shape, tensor.stride())


def _on_the_device(result: Tensor) -> Tensor:
    made = torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device="cuda")
    if result.numel():
        last = sum((size - 1) * stride for size, stride in zip(result.shape, result.stride(), strict=True))
        ctypes.memmove(made.data_ptr(), result.data_ptr(), (last + 1) * result.element_size())
    return made


# --- attention: its CUDA operators have no kernels for the CPU ---


def _scores(query: Tensor, key: Tensor, bias: Tensor | None, causal: bool, scale: float | None) -> Tensor:
    scores = query.float() @ key.float().transpose(-2, -1) * (scale or 1 / math.sqrt(query.shape[-1]))
    if bias is not None:
        scores = scores + bias.float()
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), float("-inf"))
    return scores


def _forward(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """The output, in the layout that the kernels write, and the log of the sums."""
    scores = _scores(query, key, bias, causal, scale)
    log_sums = torch.logsumexp(scores, -1)
    output = ((scores - log_sums[..., None]).exp() @ value.float()).to(query.dtype)
    return _as_written(output), log_sums


def _as_written(tensor: Tensor) -> Tensor:
    """``tensor`` (batch, heads, length, width) in the layout (batch, length, heads, width)."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def _backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value, in the layout that the kernels write, as the output is."""
    weights = _scores(query, key, bias, causal, scale).softmax(-1)
    of_weights = gradient.float() @ value.float().transpose(-2, -1)
    of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True))
    of_scores = of_scores * (scale or 1 / math.sqrt(query.shape[-1]))
    gradients = (
        of_scores @ key.float(),
        of_scores.transpose(-2, -1) @ query.float(),
        weights.transpose(-2, -1) @ gradient.float(),
    )
    return tuple(_as_written(found.to(query.dtype)) for found in gradients)  # type: ignore[return-value]


def _no_dropout(dropout: float) -> None:
    if dropout:
        raise NotImplementedError("the pretended device has no random numbers for dropout in attention")


def _state() -> Tensor:
    return torch.zeros((), dtype=torch.int64)


def _flash(query, key, value, dropout=0.0, causal=False, return_debug_mask=False, *, scale=None) -> Any:
    _no_dropout(dropout)
    output, log_sums = _forward(query, key, value, None, causal, scale)
    lengths = query.shape[2], key.shape[2]
    random = torch.zeros(2, dtype=torch.uint64)
    return output, log_sums, None, None, *lengths, random, torch.zeros((), dtype=torch.uint64), query.new_empty(0)


def _flash_backward(
    gradient, query, key, value, output, log_sums, cumulative_query, cumulative_key, longest_query, longest_key,
    dropout, causal, random, unused, *, scale=None,
) -> Any:  # fmt: skip
    return _backward(gradient, query, key, value, None, causal, scale)


def _efficient(query, key, value, bias, log_sums, dropout=0.0, causal=False, *, scale=None) -> Any:
    _no_dropout(dropout)
    return *_forward(query, key, value, bias, causal, scale), _state(), _state()


def _efficient_backward(
    gradient, query, key, value, bias, output, log_sums, seed, offset, dropout, wanted, causal=False, *, scale=None
) -> Any:
    return *_backward(gradient, query, key, value, bias, causal, scale), None


def _cudnn(query, key, value, bias, log_sums, dropout=0.0, causal=False, return_debug_mask=False, *, scale=None) -> Any:
    _no_dropout(dropout)
    output, found = _forward(query, key, value, bias, causal, scale)
    return output, found[..., None], None, None, query.shape[2], key.shape[2], _state(), _state(), None


def _cudnn_backward(
    gradient, query, key, value, output, log_sums, seed, offset, bias, cumulative_query, cumulative_key,
    longest_query, longest_key, dropout, causal, *, scale=None,
) -> Any:  # fmt: skip
    return _backward(gradient, query, key, value, bias, causal, scale)


ATTENTION: dict[str, Callable[..., Any]] = {
    f"_scaled_dot_product_{kernel}_attention{direction}": function
    for kernel, both in {
        "flash": (_flash, _flash_backward),
        "efficient": (_efficient, _efficient_backward),
        "cudnn": (_cudnn, _cudnn_backward),
    }.items()
    for direction, function in zip(("", "_backward"), both, strict=True)
}
"""The operators' own parameters, in their order."""


IDLE = SimpleNamespace(run=lambda *inputs, **launch: None)
"""A kernel that does nothing."""


def compile_nothing() -> None:
    """Let Inductor lower graphs as ever, and replace each Triton kernel by one that does nothing.

    The memory of compiled code is then real, and nothing waits for Triton's compiler.
    """
    AsyncCompile.triton = lambda self, *source, **options: IDLE  # type: ignore[method-assign,assignment]


def compile_only() -> None:
    """Let Triton compile each kernel, too, for the card that there is or is pretended, and run none of them."""
    compile_one = AsyncCompile.triton

    def compiled(self: AsyncCompile, *source: str, **options: Any) -> SimpleNamespace:
        compile_one(self, *source, **options)
        return IDLE

    AsyncCompile.triton = compiled  # type: ignore[method-assign,assignment]
