"""Build a custom model by its callable, inspect it, and change how its blocks are executed.

Every fault of the model raises ``UserError``, because only its author can fix it.
"""

import importlib.util
import inspect
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import cache, wraps
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from infra.errors import UserError, first_line
from train.config import ACTIVATION_BUDGETS, Checkpointing
from train.model_config.custom import CustomModel, ModelInfo, source_sha256
from train.models import recompute
from train.models.blocks import find_block_lists, repeated_blocks

ASSUMED_DROPOUT = 1.0
"""Dropout probability assumed of custom blocks, so that recomputation always restores the random state."""


def build_model(model: CustomModel) -> nn.Module:
    """Import the callable in this process, call it, and return its module in training mode."""
    flag = f"--model {model.callable}"
    build = _import_callable(model)
    if isinstance(build, nn.Module):
        raise UserError(f"{flag} is an nn.Module instance. Name its class, or a function that returns a new module.")
    try:
        parameters = inspect.signature(build).parameters.values()
    except ValueError as error:  # Some types that are written in C have no signature.
        raise UserError(
            f"Cannot inspect the signature of {flag}: {error}. Use a Python function that calls it."
        ) from None
    accepts_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    # nn.Module.__init__ is declared with **kwargs, but rejects every argument.
    accepts_all = accepts_all and getattr(build, "__init__", None) is not nn.Module.__init__
    names = {parameter.name for parameter in parameters}
    sizes = {"context_length": model.context_length, "vocab_size": model.vocab_size}
    keyword_arguments = {name: size for name, size in sizes.items() if accepts_all or name in names} | model.values
    try:
        inspect.signature(build).bind(**keyword_arguments)
    except TypeError as mismatch:
        raise UserError(
            f"{flag} cannot be called with {', '.join(keyword_arguments) or 'no arguments'}: {mismatch}."
        ) from None
    try:
        module = build(**keyword_arguments)
    except (Exception, SystemExit) as failure:
        raise UserError(f"{flag} failed: {_describe_exception(failure, model)}.") from failure
    if not isinstance(module, nn.Module):
        raise UserError(f"{flag} returned {type(module).__name__}, but must return a torch.nn.Module.")
    return module.train()


def _import_callable(model: CustomModel) -> Callable[..., Any]:
    """Import the callable. Raises ``UserError`` if its module's source has changed since the config was created."""
    flag = f"--model {model.callable}"
    if source_sha256(model.callable) != model.source_sha256:
        raise UserError(
            f"{flag}: the source of its module has changed since this config was created (sha256 "
            f"{model.source_sha256[:12]}). Restore it, or start a new run with --model and --name."
        )
    module, _, name = model.callable.partition(":")
    try:
        build = getattr(importlib.import_module(module), name, None)
    except (Exception, SystemExit) as failure:
        raise UserError(f"{flag} cannot be imported: {_describe_exception(failure, model)}.") from failure
    if not callable(build):
        raise UserError(f"{flag}: the module {module} has no callable {name!r}.")
    return build


@cache  # A ladder resolves many configs with the same model.
def inspect_model(model: CustomModel) -> ModelInfo:
    """Inspect ``model`` by a forward pass of one sequence on torch's meta device, which computes nothing.

    A model that needs values runs on the CPU instead. Raises ``UserError`` for a model that cannot be trained.
    """
    _import_callable(model)  # An error of the import does not depend on the device, so it is raised here.
    with suppress(Exception, SystemExit):
        return _inspect_on_device(model, torch.device("meta"))
    try:
        return _inspect_on_device(model, torch.device("cpu"))
    except UserError:
        raise
    except (Exception, SystemExit) as failure:
        raise model_error(model, "running its forward pass", failure) from failure


def model_error(model: CustomModel, stage: str, failure: BaseException) -> UserError:
    """Describe that ``model`` failed in ``stage``, such as "building the model", with the line of its code."""
    return UserError(f"--model {model.callable} failed while {stage}: {_describe_exception(failure, model)}.")


def raised_in_forward(module: nn.Module, failure: BaseException) -> bool:
    """Return whether ``failure`` was raised in the forward pass of ``module``, whose function keeps its name when
    compiled."""
    forward = inspect.unwrap(type(module).forward).__code__
    frames = (frame.f_code for frame, _ in traceback.walk_tb(failure.__traceback__))
    return any((code.co_filename, code.co_name) == (forward.co_filename, forward.co_name) for code in frames)


def _inspect_on_device(model: CustomModel, device: torch.device) -> ModelInfo:
    with device:
        module = build_model(model)
        second_module = build_model(model)
    flag = f"--model {model.callable}"
    if second_module is module:
        raise UserError(f"{flag} returns the same module twice. Return a new module at each call.")
    module.to(device)
    _check_trainable(module, flag)
    tokens = torch.zeros(1, model.context_length, dtype=torch.int64, device=device)
    state_names = module.state_dict().keys()
    # The FLOP counter supports matrix products, but not the fused attention kernels of every device.
    calls = _Calls(tokens.shape, module)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, calls, calls.count_saved():
        loss = module(tokens, tokens)
    if not (isinstance(loss, Tensor) and loss.dim() == 0 and not loss.is_complex()):
        kind = type(loss).__name__
        shape = f"a {kind} of {loss.dtype} and shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else kind
        raise UserError(f"{flag} returned {shape} for (inputs, targets), but must return the mean loss, a scalar.")
    if not loss.requires_grad:
        raise UserError(f"The loss of {flag} has no gradient, so none of its parameters can be trained.")
    if new_names := module.state_dict().keys() - state_names:
        raise UserError(
            f"{flag} creates {min(new_names)} in forward(), where the optimizer cannot see it. Create it in __init__()."
        )
    logits, gradients = None, ()
    with suppress(Exception):
        trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
        gradients = torch.autograd.grad(loss, trainable, allow_unused=True)
    with suppress(Exception), torch.no_grad():
        logits = module.eval()(tokens[:, :2], None)  # Generation starts with texts as short as this.
    logits = logits if isinstance(logits, Tensor) and logits.dim() == 3 and logits.size(1) <= 2 else None
    ids = min(filter(None, (calls.ids, logits is not None and logits.size(-1))), default=model.vocab_size)
    if ids < model.vocab_size:
        raise UserError(
            f"{flag} supports {ids:,} token ids, but the data have {model.vocab_size:,}. Set its size from the "
            "argument 'vocab_size', which the callable receives if it has that parameter."
        )
    return ModelInfo(
        parameters=sum(parameter.numel() for parameter in module.parameters()),
        flops_per_token=3 * counter.get_total_flops() / model.context_length,
        blocks=tuple(
            f"{len(blocks)} {type(blocks[0]).__name__} in {name}" for name, blocks in find_block_lists(module).items()
        ),
        attention=calls.attention,
        logits=logits is not None,
        idle=any(gradient is None for gradient in gradients),
        tensor_bytes=calls.tensor_bytes,
    )


def _check_trainable(user_module: nn.Module, flag: str) -> None:
    """Raise ``UserError`` unless the optimizers and checkpoints support all parameters of ``user_module``."""
    trainable = {name: parameter for name, parameter in user_module.named_parameters() if parameter.requires_grad}
    if not trainable:
        raise UserError(f"{flag} has no trainable parameters.")
    for name, parameter in trainable.items():
        if nn.parameter.is_lazy(parameter):
            raise UserError(f"{flag}: parameter {name} is lazy. Set its shape when it is created.")
        if parameter.dtype not in (torch.float32, torch.bfloat16):
            raise UserError(
                f"{flag}: parameter {name} is {parameter.dtype}; float32 or bfloat16 is required. Use float32; "
                "--precision sets the compute type."
            )
    # The meta device has no addresses, so storages are compared by their Python objects, which the list keeps alive.
    storages = [
        (name, parameter.untyped_storage(), parameter.storage_offset())
        for name, parameter in user_module.named_parameters()
    ]
    first_names: dict[tuple[int, int], str] = {}
    for name, storage, offset in storages:
        if (first_name := first_names.setdefault((id(storage), int(offset)), name)) != name:
            raise UserError(
                f"{flag}: {name} and {first_name} are two parameters that share memory, for example after an "
                "assignment to .data; moving the model to another device would separate them. To tie them, assign the "
                "parameter itself."
            )
    for name, module in user_module.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise UserError(
                f"{flag}: {name} has sparse gradients, which the optimizers do not support. Use sparse=False."
            )
    for name, value in user_module.state_dict().items():
        if not isinstance(value, Tensor):
            raise UserError(
                f"{flag}: {name} in state_dict() is of type {type(value).__name__}, but a checkpoint can only store "
                "tensors."
            )


class _Calls(TorchFunctionMode):
    """Records whether attention is torch's ``scaled_dot_product_attention``, the number of token ids, and tensors.

    Calls by ``nn.MultiheadAttention`` count as well. ``ids`` is the number of rows of the largest embedding in which
    tokens of this ``shape`` are looked up; 0 if there is none. ``tensor_bytes`` counts the results of all functions,
    and again those that are saved for the backward pass, because functions also save tensors that they do not return.
    """

    def __init__(self, shape: torch.Size, module: nn.Module) -> None:
        super().__init__()
        self.shape, self.attention, self.ids, self.tensor_bytes = shape, False, 0, 0
        # Storages are compared by their Python objects, because on the meta device they have no addresses.
        self._weights = {id(storage): storage for storage in (p.untyped_storage() for p in module.parameters())}

    def count_saved(self) -> AbstractContextManager[Any]:
        """Count the tensors that the block saves for the backward pass, except for parameters."""

        def pack(tensor: Tensor) -> Tensor:
            if id(tensor.untyped_storage()) not in self._weights:
                self.tensor_bytes += tensor.nbytes
            return tensor

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        by_module = func is F.multi_head_attention_forward and not kwargs.get("need_weights", True)
        self.attention = self.attention or by_module or func is F.scaled_dot_product_attention
        if func is F.embedding and args[0].shape == self.shape:
            self.ids = max(self.ids, args[1].size(0))
        result = func(*args, **kwargs)
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, Tensor):
                self.tensor_bytes += value.nbytes
        return result


def with_execution_switches(
    module: nn.Module, checkpointing: Checkpointing, kernels: Sequence[SDPBackend]
) -> nn.Module:
    """Change ``module`` so that its blocks are recomputed, and use the first supported of ``kernels`` if there are any.

    The kernel is chosen inside a block, so that its recomputation uses the same kernel.
    """
    for number, block in enumerate(repeated_blocks(module)):
        forward = block.forward
        if kernels:
            forward = _in_context(lambda: sdpa_kernel(list(kernels), set_priority=True), forward)
        if checkpointing in ("full", "selective") or (checkpointing == "alternate" and number % 2 == 0):
            checkpoint = recompute.selective if checkpointing == "selective" else recompute.full
            forward = _with_recomputation(block, forward, checkpoint)
        block.forward = forward
    if checkpointing in ACTIVATION_BUDGETS:
        module.forward = _in_context(lambda: recompute.budget(checkpointing), module.forward)
    return module


def _in_context(context: Callable[[], AbstractContextManager[Any]], forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with context():
            return forward(*args, **kwargs)

    return wrapper


def _with_recomputation(
    block: nn.Module, forward: Callable[..., Any], checkpoint: Callable[..., Any]
) -> Callable[..., Any]:
    @wraps(forward)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not block.training:
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, dropout=ASSUMED_DROPOUT, **kwargs)

    return wrapper


def _describe_exception(failure: BaseException, model: CustomModel) -> str:
    """Format the type and first line of ``failure``, and the last line of the model's source in its traceback."""
    spec = importlib.util.find_spec(model.callable.partition(":")[0])
    frames = [frame for frame in traceback.extract_tb(failure.__traceback__) if spec and frame.filename == spec.origin]
    location = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(failure).__name__}: {first_line(failure).rstrip('.')}{location}"
