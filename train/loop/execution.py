"""How a resolved config is executed: the device, the model with its kernels, compilation, the process environment."""

import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

from infra.errors import UserError
from train.config import TrainConfig
from train.custom_model import CustomModel
from train.model_config import ModelConfig
from train.models import custom
from train.models.attention import (
    ATTENTION,
    AttentionFunction,
    MaskFunction,
    attention_for_gpu,
    block_mask,
    dense_mask,
    first_supported_kernel,
    kernel_order,
)
from train.models.blocks import repeated_blocks
from train.models.gpt2 import GPT
from train.models.hf_weights import load_hf_weights
from train.models.recompute import check_budget_supported

AUTOCAST = {"fp16": torch.float16, "bf16": torch.bfloat16}
MODES = {
    "max-autotune": "max-autotune-no-cudagraphs", "max-autotune-graphs": "max-autotune",
    "reduce-overhead": "reduce-overhead",
}  # fmt: skip
ALLOCATORS = {"split": "max_split_size_mb:512", "expandable": "expandable_segments:True"}
"""Values of PYTORCH_ALLOC_CONF."""
OPTIONS: dict[str, dict[str, Any]] = {"coordinate-descent": {"coordinate_descent_tuning": True}}
INDUCTOR_CACHE = Path("~/.cache/throughline/inductor")
"""torch's default is in /tmp and is lost with every container and restart."""


def torch_device(config: TrainConfig) -> torch.device:
    """The device of a resolved config. Raises ``UserError`` when it is a GPU that torch does not see."""
    if config.execution.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError(
            "torch sees no CUDA GPU: install a build of torch with CUDA and a driver for it, or use --device cpu."
        )
    return torch.device("cuda", torch.cuda.current_device())


def build_model(config: TrainConfig, device: torch.device) -> Any:
    """The model of a resolved config with random weights by its seed, on ``device``."""
    if config.execution.checkpointing == "budget":
        check_budget_supported()
    torch.manual_seed(config.dataset.seed)
    model = (_custom(config, config.model) if isinstance(config.model, CustomModel) else _gpt(config)).to(device)
    if config.optimization.optimizer == "adamw-bf16":
        model.to(torch.bfloat16)
    if config.execution.fp8:
        _to_fp8(model)
    return model


def load_initial_weights(model: Any, config: TrainConfig) -> None:
    """Load the weights that a run of ``config`` begins with, if they are not random ones."""
    if isinstance(config.model, ModelConfig) and config.model.start:
        load_hf_weights(model, Path(config.model.start))


def _gpt(config: TrainConfig) -> GPT:
    return GPT(
        config.gpt2_config,
        attention=_attention(config),
        mask=_mask(config),
        checkpointing=config.execution.checkpointing,
        loss=config.execution.loss,
        loss_chunks=config.execution.loss_chunks,
        activations=torch.bfloat16 if config.execution.precision == "bf16-activations" else None,
    )


def _custom(config: TrainConfig, model: CustomModel) -> nn.Module:
    """A custom model with the switches of its blocks as configured."""
    attention, chosen = config.execution.attention, bool(model.found and model.found.attention)
    kernels: list[SDPBackend] = []
    if chosen and attention == "manual":
        kernels = [SDPBackend.MATH]
    elif chosen and attention != "sdpa":
        kernels = kernel_order(_attention(config))
    return custom.with_execution_switches(custom.build_model(model), config.execution.checkpointing, kernels)


def build_inference_model(config: TrainConfig, weights_of: nn.Module | None = None) -> Any:
    """The model for use after training: eager, with torch's own choice of attention kernel, for texts of any length.

    With ``weights_of`` a trained one it has those themselves, not a copy. The training's own execution may not be
    suitable: cuDNN's kernel refuses a single token, a CPU has none of a GPU's kernels, and compiled code would be
    recompiled for every length.
    """
    if isinstance(config.model, CustomModel):  # which may hold more than its state, such as tables of positions
        model = custom.build_model(config.model)
    else:
        with torch.device("cpu" if weights_of is None else "meta"):
            model = GPT(config.model, mask=_dense(config))
    if weights_of is not None:
        model.load_state_dict(weights_of.state_dict(), assign=True)
        model.to(next(weights_of.parameters()).device)
    return model.eval()


def _attention(config: TrainConfig) -> AttentionFunction:
    if config.execution.attention != "auto":
        return ATTENTION[config.execution.attention]
    return attention_for_gpu(
        torch.cuda.get_device_capability(), config.model.context_length, masked=config.execution.mask_books
    )


def attention_kernel(config: TrainConfig, device: torch.device) -> str:
    """The kernel that computes attention on ``device``: as configured, or the first usable one of the GPU's list."""
    if isinstance(config.model, CustomModel):
        if not (config.model.found and config.model.found.attention):
            return "the model's own"
        return "math" if config.execution.attention == "manual" else config.execution.attention
    if config.execution.attention != "auto":
        return config.execution.attention
    model, length = config.gpt2_config, config.model.context_length
    kind = AUTOCAST.get(
        config.execution.precision,
        torch.bfloat16 if config.execution.precision == "bf16-activations" else torch.float32,
    )
    shape = (1, model.heads, length, model.width // model.heads)
    q = torch.empty(shape, dtype=kind, device=device, requires_grad=True)
    mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=device) if config.execution.mask_books else None
    return first_supported_kernel(_attention(config), q, model.dropout, mask)


def _mask(config: TrainConfig) -> MaskFunction:
    if config.execution.attention == "flex":
        return partial(block_mask, end_of_text=_end_of_text(config) if config.execution.mask_books else None)
    return _dense(config)


def _dense(config: TrainConfig) -> MaskFunction:
    return partial(dense_mask, end_of_text=_end_of_text(config)) if config.execution.mask_books else lambda tokens: None


def _end_of_text(config: TrainConfig) -> int:
    return config.model.end_of_text % config.model.vocab_size


def _to_fp8(model: nn.Module) -> None:
    try:
        from torchao.float8 import convert_to_float8_training  # type: ignore[import-not-found]
    except ImportError:
        raise UserError(
            "--fp8 needs torchao, which is not installed: 'pip install torchao', or leave it out."
        ) from None
    for block in repeated_blocks(model):
        convert_to_float8_training(block, module_filter_fn=lambda module, name: isinstance(module, nn.Linear))


def compile_model(model: nn.Module, config: TrainConfig) -> Callable[..., Tensor]:
    """What the loop calls for a forward pass: the model, compiled as configured, for shapes that never change."""
    if config.execution.compile == "off":
        return model
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(INDUCTOR_CACHE.expanduser()))
    # Before 2.13, torch's key has whether autocast is on and not its type: fp16 would run what was compiled for bf16
    # (pytorch issue 181564).
    torch.compiler.config.cache_key_tag = config.execution.precision
    keep_compiled_attention()
    if config.execution.compile == "blocks":
        for block in repeated_blocks(model):
            block.compile(dynamic=False)
        if isinstance(model, GPT):
            model.mean_loss = torch.compile(model.mean_loss, dynamic=False)
        return model
    mode, options = MODES.get(config.execution.compile), OPTIONS.get(config.execution.compile)
    return torch.compile(model, dynamic=False, mode=mode, options=options)


def keep_compiled_attention() -> None:
    """Allow torch to cache graphs in which attention's kernel is chosen; without this every process traces them again.

    ``sdpa_kernel`` is traced as two functions that torch 2.11 to 2.15 does not consider cacheable
    (github.com/pytorch/pytorch/issues/194007), although their arguments are constants of the graph and therefore part
    of the cache's key. No documented interface serves: the options of ``torch.compile`` exclude a mode, and around the
    compiled call ``sdpa_kernel`` is not part of the key, so that a graph with another kernel would be taken.
    """
    import torch._inductor.config as inductor  # takes a second, for which uncompiled runs need not wait

    inductor.unsafe_marked_cacheable_functions |= {
        f"torch.nn.attention.{name}": torch.__version__ for name in ("_sdpa_kernel", "_backend_from_string")
    }


def autocast_context(config: TrainConfig) -> contextlib.AbstractContextManager[Any]:
    """The context in which a resolved config's forward passes run."""
    kind = AUTOCAST.get(config.execution.precision)
    return torch.autocast(config.execution.device, kind) if kind else contextlib.nullcontext()


@contextlib.contextmanager
def gc_disabled(config: TrainConfig) -> Iterator[None]:
    """Disable automatic garbage collection during the block, except with ``--ablate collect``."""
    if config.execution.device == "cuda":
        gc.collect()  # what an earlier run in this process left on the GPU
    enabled = gc.isenabled()
    if "collect" not in config.execution.ablate:
        gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def configure_allocator(config: TrainConfig) -> None:
    """Set how torch takes memory of the GPU, before it first does: it reads the variable at its first allocation.

    A value that the user has set stays, under the name that torch had before 2.10 as well.
    """
    named = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys()
    if config.execution.allocator in ALLOCATORS and not named:
        os.environ["PYTORCH_ALLOC_CONF"] = ALLOCATORS[config.execution.allocator]


def enable_large_pages(config: TrainConfig) -> None:
    """Put large tensors in pages of 2 MB on the CPU, instead of the default 4 KB, which ``--ablate pages`` keeps.

    The C library returns large freed blocks to the system, so that the next step's logits get new pages, each zeroed
    on its first use: twelve steps of ``tiny`` have 2.5 million page faults with small pages, 0.14 million with large.
    torch reads the variable at its first allocation, so a process that has made tensors before keeps its pages.
    """
    if config.execution.device == "cpu":
        os.environ["THP_MEM_ALLOC_ENABLE"] = str(int("pages" not in config.execution.ablate))
