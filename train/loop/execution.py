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

from infra.errors import UserError
from train.config import TrainConfig
from train.model.attention import (
    ATTENTION,
    AttentionFunction,
    MaskFunction,
    block_mask,
    dense_mask,
    first_usable,
    ordered_for,
)
from train.model.gpt import GPT
from train.model.recompute import refuse_budget

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
    if config.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError(
            "torch sees no CUDA GPU: install a build of torch with CUDA and a driver for it, or use --device cpu."
        )
    return torch.device("cuda", torch.cuda.current_device())


def build(config: TrainConfig, device: torch.device) -> GPT:
    """The model of a resolved config with random weights by its seed, on ``device``."""
    if config.checkpointing == "budget":
        refuse_budget()
    torch.manual_seed(config.seed)
    model = GPT(
        config.model,
        attention=_attention(config),
        mask=_mask(config),
        checkpointing=config.checkpointing,
        loss=config.loss,
        loss_chunks=config.loss_chunks,
        activations=torch.bfloat16 if config.precision == "bf16-activations" else None,
    ).to(device)
    if config.optimizer == "adamw-bf16":
        model.to(torch.bfloat16)
    if config.fp8:
        _to_fp8(model)
    return model


def plain(config: TrainConfig) -> GPT:
    """The model for use after training: eager, with torch's own choice of attention kernel, for texts of any length.

    The training's own execution may not be suitable: cuDNN's kernel refuses a single token, a CPU has none of a GPU's
    kernels, and compiled code would be recompiled for every length.
    """
    return GPT(config.model, mask=_dense(config)).eval()


def _attention(config: TrainConfig) -> AttentionFunction:
    if config.attention != "auto":
        return ATTENTION[config.attention]
    return ordered_for(torch.cuda.get_device_capability(), config.model.context_length, masked=config.mask_books)


def attention_kernel(config: TrainConfig, device: torch.device) -> str:
    """The kernel that computes attention on ``device``: as configured, or the first usable one of the GPU's list."""
    if config.attention != "auto":
        return config.attention
    model, length = config.model, config.model.context_length
    kind = AUTOCAST.get(config.precision, torch.bfloat16 if config.precision == "bf16-activations" else torch.float32)
    shape = (1, model.heads, length, model.width // model.heads)
    q = torch.empty(shape, dtype=kind, device=device, requires_grad=True)
    mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=device) if config.mask_books else None
    return first_usable(_attention(config), q, model.dropout, mask)


def _mask(config: TrainConfig) -> MaskFunction:
    if config.attention == "flex":
        return partial(block_mask, end_of_text=_end_of_text(config) if config.mask_books else None)
    return _dense(config)


def _dense(config: TrainConfig) -> MaskFunction:
    return partial(dense_mask, end_of_text=_end_of_text(config)) if config.mask_books else lambda tokens: None


def _end_of_text(config: TrainConfig) -> int:
    return config.model.end_of_text % config.model.vocabulary


def _to_fp8(model: GPT) -> None:
    try:
        from torchao.float8 import convert_to_float8_training  # type: ignore[import-not-found]
    except ImportError:
        raise UserError(
            "--fp8 needs torchao, which is not installed: 'pip install torchao', or leave it out."
        ) from None
    convert_to_float8_training(model.blocks, module_filter_fn=lambda module, name: isinstance(module, nn.Linear))


def compiled(model: GPT, config: TrainConfig) -> Callable[..., Tensor]:
    """What the loop calls for a forward pass: the model, compiled as configured, for shapes that never change."""
    if config.compile == "off":
        return model
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(INDUCTOR_CACHE.expanduser()))
    # Before 2.13, torch's key has whether autocast is on and not its type: fp16 would run what was compiled for bf16
    # (pytorch issue 181564).
    torch.compiler.config.cache_key_tag = config.precision
    keep_compiled_attention()
    if config.compile == "blocks":
        for block in model.blocks:
            block.compile(dynamic=False)
        model.mean_loss = torch.compile(model.mean_loss, dynamic=False)
        return model
    mode, options = MODES.get(config.compile), OPTIONS.get(config.compile)
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


def arithmetic(config: TrainConfig) -> contextlib.AbstractContextManager[Any]:
    """The context in which a resolved config's forward passes run."""
    kind = AUTOCAST.get(config.precision)
    return torch.autocast(config.device, kind) if kind else contextlib.nullcontext()


@contextlib.contextmanager
def no_collections(config: TrainConfig) -> Iterator[None]:
    """Disable automatic garbage collection during the block, except with ``--ablate collect``."""
    if config.device == "cuda":
        gc.collect()  # what an earlier run in this process left on the GPU
    if "collect" not in config.ablate:
        gc.disable()
    try:
        yield
    finally:
        gc.enable()


def choose_allocator(config: TrainConfig) -> None:
    """Set how torch takes memory of the GPU, before it first does: it reads the variable at its first allocation.

    A value that the user has set stays, under the name that torch had before 2.10 as well.
    """
    named = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys()
    if config.allocator in ALLOCATORS and not named:
        os.environ["PYTORCH_ALLOC_CONF"] = ALLOCATORS[config.allocator]


def choose_pages(config: TrainConfig) -> None:
    """Put large tensors in pages of 2 MB on the CPU, instead of the default 4 KB, which ``--ablate pages`` keeps.

    The C library returns large freed blocks to the system, so that the next step's logits get new pages, each zeroed
    on its first use: twelve steps of ``tiny`` have 2.5 million page faults with small pages, 0.14 million with large.
    torch reads the variable at its first allocation, so a process that has made tensors before keeps its pages.
    """
    if config.device == "cpu":
        os.environ["THP_MEM_ALLOC_ENABLE"] = str(int("pages" not in config.ablate))
