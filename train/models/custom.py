"""A model of the user's: make it by its callable, look at what it is, and switch how its blocks are executed.

In: a :class:`CustomModel`. Out: the ``nn.Module`` that its callable returns. Whatever is wrong with it raises
``UserError``, because only its author can mend it.
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
from train.config import Checkpointing
from train.model_config.custom import CustomModel, ModelInfo, source_sha256
from train.models import recompute
from train.models.blocks import find_block_lists, repeated_blocks

ASSUMED_DROPOUT = 1.0
"""The dropout of a custom model's blocks, for which the random state is kept wherever they are recomputed."""


def build_model(model: CustomModel) -> nn.Module:
    """The module that the callable returns, imported where this process runs, in training mode."""
    named = f"--model {model.callable}"
    build = _imported(model)
    if isinstance(build, nn.Module):
        raise UserError(f"{named} is a module itself: name its class, or a function that returns a new one.")
    try:
        parameters = inspect.signature(build).parameters.values()
    except ValueError as untold:  # of some types that are written in C
        raise UserError(f"{named} does not tell its arguments ({untold}): name a function that calls it.") from None
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    takes_all = takes_all and getattr(build, "__init__", None) is not nn.Module.__init__  # which refuses all
    sizes = {"context_length": model.context_length, "vocab_size": model.vocab_size}
    taken = {name: size for name, size in sizes.items() if takes_all or name in {each.name for each in parameters}}
    keyword_arguments = taken | model.values
    try:
        inspect.signature(build).bind(**keyword_arguments)
    except TypeError as mismatch:
        raise UserError(
            f"{named} cannot be called with {', '.join(keyword_arguments) or 'no arguments'}: {mismatch}."
        ) from None
    try:
        module = build(**keyword_arguments)
    except (Exception, SystemExit) as failure:
        raise UserError(f"{named} fails: {_describe_exception(failure, model)}.") from failure
    if not isinstance(module, nn.Module):
        raise UserError(f"{named} returns {type(module).__name__}, and must return a torch.nn.Module.")
    return module.train()


def _imported(model: CustomModel) -> Callable[..., Any]:
    """The callable. Raises ``UserError`` where its source is not the one that the config was made with."""
    named = f"--model {model.callable}"
    if source_sha256(model.callable) != model.source_sha256:
        raise UserError(
            f"{named}: the source of its module has changed since this config was made (sha256 "
            f"{model.source_sha256[:12]}): restore it, or start a new run with --model and --name."
        )
    module, _, name = model.callable.partition(":")
    try:
        build = getattr(importlib.import_module(module), name, None)
    except (Exception, SystemExit) as failure:
        raise UserError(f"{named} cannot be imported: {_describe_exception(failure, model)}.") from failure
    if not callable(build):
        raise UserError(f"{named}: the module {module} has no callable {name!r}.")
    return build


@cache  # a ladder decides many configs of one model
def inspect_model(model: CustomModel) -> ModelInfo:
    """What ``model`` is, from one forward pass of one sequence: on torch's meta device, which computes nothing.

    A model that asks for values there runs on the CPU instead. Raises ``UserError`` for one that cannot be trained.
    """
    _imported(model)  # what is wrong with it does not depend on the device
    with suppress(Exception, SystemExit):
        return _inspect_on_device(model, torch.device("meta"))
    try:
        return _inspect_on_device(model, torch.device("cpu"))
    except UserError:
        raise
    except (Exception, SystemExit) as failure:
        raise model_error(model, "its forward pass", failure) from failure


def model_error(model: CustomModel, stage: str, failure: BaseException) -> UserError:
    """What tells its author that ``model`` has failed in ``stage`` of a run, and where."""
    return UserError(f"--model {model.callable} fails in {stage}: {_describe_exception(failure, model)}.")


def raised_in_forward(module: nn.Module, failure: BaseException) -> bool:
    """Whether ``failure`` was raised within the forward pass of ``module``, which compiled code has under its name."""
    own = inspect.unwrap(type(module).forward).__code__
    frames = (frame.f_code for frame, _ in traceback.walk_tb(failure.__traceback__))
    return any((code.co_filename, code.co_name) == (own.co_filename, own.co_name) for code in frames)


def _inspect_on_device(model: CustomModel, device: torch.device) -> ModelInfo:
    with device:
        module = build_model(model)
        again = build_model(model)
    named = f"--model {model.callable}"
    if again is module:
        raise UserError(f"{named} returns the same module again: return a new one at each call.")
    module.to(device)
    _refuse_untrainable(module, named)
    tokens = torch.zeros(1, model.context_length, dtype=torch.int64, device=device)
    state_names = module.state_dict().keys()
    # The counter knows the matrix products, and not every device's fused kernel.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, _Calls(tokens.shape) as calls:
        loss = module(tokens, tokens)
    if not (isinstance(loss, Tensor) and loss.dim() == 0 and not loss.is_complex()):
        kind = type(loss).__name__
        shape = f"a {kind} of {loss.dtype} and shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else kind
        raise UserError(f"{named} returns {shape} for (inputs, targets), and must return the mean loss, a scalar.")
    if not loss.requires_grad:
        raise UserError(f"{named} gives a loss without a gradient: none of its parameters can be trained by it.")
    if late := module.state_dict().keys() - state_names:
        raise UserError(f"{named} makes {min(late)} in its forward pass, where no optimizer knows it: make it earlier.")
    logits, gradients = None, ()
    with suppress(Exception):
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        gradients = torch.autograd.grad(loss, trained, allow_unused=True)
    with suppress(Exception), torch.no_grad():
        logits = module.eval()(tokens[:, :2], None)  # of a text that has just begun
    logits = logits if isinstance(logits, Tensor) and logits.dim() == 3 and logits.size(1) <= 2 else None
    ids = min(filter(None, (calls.ids, logits is not None and logits.size(-1))), default=model.vocab_size)
    if ids < model.vocab_size:
        raise UserError(
            f"{named} has {ids:,} ids, and the data have {model.vocab_size:,}: make it as large; the callable gets the "
            "number as its argument 'vocab_size'."
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
    )


def _refuse_untrainable(user_module: nn.Module, named: str) -> None:
    """Raise ``UserError`` for parameters that the optimizers do not take."""
    trained = {name: parameter for name, parameter in user_module.named_parameters() if parameter.requires_grad}
    if not trained:
        raise UserError(f"{named} has no parameters to train.")
    for name, parameter in trained.items():
        if nn.parameter.is_lazy(parameter):
            raise UserError(f"{named}: the shape of {name} is not known before its first use: give it one.")
        if parameter.dtype not in (torch.float32, torch.bfloat16):
            raise UserError(
                f"{named}: {name} is {parameter.dtype}, which the optimizers do not take: make it float32; "
                "--precision chooses the type of the arithmetic."
            )
    # By their storages' objects, which are kept meanwhile, because the meta device has no addresses.
    storages = [(name, each.untyped_storage(), each.storage_offset()) for name, each in user_module.named_parameters()]
    first: dict[tuple[int, int], str] = {}
    for name, storage, offset in storages:
        if (other := first.setdefault((id(storage), int(offset)), name)) != name:
            raise UserError(
                f"{named}: {name} and {other} are two parameters with the same memory, as after an assignment to "
                ".data, which a move to another device separates: assign the parameter itself to tie them."
            )
    for name, module in user_module.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise UserError(f"{named}: {name} gives sparse gradients, which the optimizers do not take: make it dense.")
    for name, value in user_module.state_dict().items():
        if not isinstance(value, Tensor):
            raise UserError(
                f"{named}: {name} in its state is {type(value).__name__}: a checkpoint keeps tensors alone."
            )


class _Calls(TorchFunctionMode):
    """Notices calls of ``scaled_dot_product_attention``, also those that ``nn.MultiheadAttention`` makes, and the ids.

    ``ids`` are the rows of the largest embedding in which tokens of this ``shape`` are looked up; 0 without any.
    """

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape, self.attention, self.ids = shape, False, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        within = func is F.multi_head_attention_forward and not kwargs.get("need_weights", True)
        self.attention = self.attention or within or func is F.scaled_dot_product_attention
        if func is F.embedding and args[0].shape == self.shape:
            self.ids = max(self.ids, args[1].size(0))
        return func(*args, **kwargs)


def with_execution_switches(
    module: nn.Module, checkpointing: Checkpointing, kernels: Sequence[SDPBackend]
) -> nn.Module:
    """``module`` with its blocks executed as asked: by the first suitable of ``kernels``, if any, and recomputed.

    The kernel is chosen within a block, so that its recomputation takes the same.
    """
    for number, block in enumerate(repeated_blocks(module)):
        forward = block.forward
        if kernels:
            forward = _within(lambda: sdpa_kernel(list(kernels), set_priority=True), forward)
        if checkpointing in ("full", "selective") or (checkpointing == "alternate" and number % 2 == 0):
            again = recompute.selective if checkpointing == "selective" else recompute.full
            forward = _recomputed(block, forward, again)
        block.forward = forward
    if checkpointing == "budget":
        module.forward = _within(recompute.budget, module.forward)
    return module


def _within(context: Callable[[], AbstractContextManager[Any]], forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def inside(*inputs: Any, **named: Any) -> Any:
        with context():
            return forward(*inputs, **named)

    return inside


def _recomputed(block: nn.Module, forward: Callable[..., Any], again: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def inside(*inputs: Any, **named: Any) -> Any:
        return (
            again(forward, *inputs, dropout=ASSUMED_DROPOUT, **named) if block.training else forward(*inputs, **named)
        )

    return inside


def _describe_exception(failure: BaseException, model: CustomModel) -> str:
    """The kind of the ``failure`` and its first line, with the last line of the model's own source that led to it."""
    spec = importlib.util.find_spec(model.callable.partition(":")[0])
    frames = [frame for frame in traceback.extract_tb(failure.__traceback__) if spec and frame.filename == spec.origin]
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(failure).__name__}: {first_line(failure).rstrip('.')}{where}"
