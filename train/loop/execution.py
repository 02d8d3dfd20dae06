"""How a resolved config is executed: the device, the model with its kernels, compilation, the process environment."""

import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from infra.errors import UserError
from train.config import ACTIVATION_BUDGETS, EAGER_BACKENDS, Device, Execution, Optimizer
from train.model_config import ModelSpec
from train.models.blocks import LossModel, repeated_blocks
from train.models.builders import builder_of
from train.models.recompute import check_budget_supported

AUTOCAST = {"fp16": torch.float16, "bf16": torch.bfloat16}
MODES = {
    "max-autotune": "max-autotune-no-cudagraphs", "max-autotune-graphs": "max-autotune",
    "reduce-overhead": "reduce-overhead",
}  # fmt: skip
ALLOCATORS = {"split": "max_split_size_mb:512", "expandable": "expandable_segments:True"}
"""Values of PYTORCH_ALLOC_CONF by the value of ``--allocator``."""
OPTIONS: dict[str, dict[str, Any]] = {"coordinate-descent": {"coordinate_descent_tuning": True}}
INDUCTOR_CACHE = Path("~/.cache/throughline/inductor")
"""Directory of compiled kernels; PyTorch's default is in /tmp, which is lost with every container and restart."""


def torch_device(device: Device) -> torch.device:
    """Return the torch device that ``device`` names. Raises ``UserError`` when it is a GPU that torch does not see."""
    if device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError(
            "--device cuda: PyTorch found no CUDA GPU. Install a CUDA build of PyTorch and a driver for it, or "
            "use --device cpu."
        )
    return torch.device("cuda", torch.cuda.current_device())


def build_model(
    model_config: ModelSpec, execution: Execution, optimizer: Optimizer, seed: int, device: torch.device
) -> Any:
    """Return the model with random weights by the ``seed``, on ``device``."""
    if execution.checkpointing in ACTIVATION_BUDGETS:
        check_budget_supported(execution.checkpointing)
    torch.manual_seed(seed)
    model = builder_of(model_config).build(execution).to(device)
    if optimizer == "adamw-bf16":
        model.to(torch.bfloat16)
    if execution.fp8:
        _to_fp8(model)
    return model


def build_inference_model(model_config: ModelSpec, mask_books: bool, weights_of: nn.Module | None = None) -> Any:
    """Return the model for use after training: eager, with torch's own choice of attention kernel, for texts of any
    length.

    If ``weights_of`` is given, the model shares that model's weights without a copy. The execution of training may not
    be suitable: cuDNN's kernel rejects a single token, a CPU does not have a GPU's kernels, and compiled code would be
    recompiled for every length.
    """
    builder = builder_of(model_config)
    model = builder.build_for_inference(mask_books=mask_books, has_weights=weights_of is not None)
    if weights_of is not None:
        model.load_state_dict(weights_of.state_dict(), assign=True)
        model.to(next(weights_of.parameters()).device)
    return model.eval()


def _to_fp8(model: nn.Module) -> None:
    try:
        from torchao.float8 import convert_to_float8_training  # type: ignore[import-not-found]
    except ImportError:
        raise UserError(
            "--fp8 needs torchao, which is not installed. Install it with 'pip install torchao', or remove --fp8."
        ) from None
    for block in repeated_blocks(model):
        convert_to_float8_training(block, module_filter_fn=lambda module, name: isinstance(module, nn.Linear))


def compile_model(model: nn.Module, execution: Execution) -> Callable[..., Tensor]:
    """Return a function that runs the model's forward pass, compiled as configured, for shapes that never change."""
    if execution.compile == "off":
        return model
    use_kernel_cache()
    # Before 2.13, torch's key has whether autocast is on and not its type: fp16 would run what was compiled for bf16
    # (pytorch issue 181564).
    torch.compiler.config.cache_key_tag = execution.precision
    keep_compiled_attention()
    if execution.compile == "blocks":
        for block in repeated_blocks(model):
            block.compile(dynamic=False)
        if isinstance(model, LossModel):
            model.mean_loss = torch.compile(model.mean_loss, dynamic=False)
        return model
    if execution.compile in EAGER_BACKENDS:
        return torch.compile(model, dynamic=False, backend=execution.compile)
    mode, options = MODES.get(execution.compile), OPTIONS.get(execution.compile)
    return torch.compile(model, dynamic=False, mode=mode, options=options)


def use_kernel_cache() -> None:
    """Have kernels that are compiled from now on be stored where the next process finds them."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(INDUCTOR_CACHE.expanduser()))


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


def autocast_context(execution: Execution) -> contextlib.AbstractContextManager[Any]:
    """Return the context in which forward passes run."""
    kind = AUTOCAST.get(execution.precision)
    return torch.autocast(execution.device, kind) if kind else contextlib.nullcontext()


@contextlib.contextmanager
def gc_disabled(execution: Execution) -> Iterator[None]:
    """Disable automatic garbage collection during the block, except with ``--ablate gc-pause``."""
    if execution.device == "cuda":
        gc.collect()  # what an earlier run in this process left on the GPU
    enabled = gc.isenabled()
    if "gc-pause" not in execution.ablate:
        gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def configure_allocator(allocator: str) -> None:
    """Set how torch allocates memory of the GPU; must be called before its first allocation, when it reads the value.

    A value that the user has set stays, also if it has the name that torch used before 2.10.
    """
    user_values = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys()
    if allocator in ALLOCATORS and not user_values:
        os.environ["PYTORCH_ALLOC_CONF"] = ALLOCATORS[allocator]


def configure_determinism(execution: Execution) -> None:
    """Make torch reject or replace algorithms that are not deterministic, with ``--deterministic``.

    Must be called before the first matrix product on a GPU, when cuBLAS reads its variable: with its default workspaces
    it may choose another algorithm in another stream. A value that the user has set stays.
    """
    if not execution.deterministic:
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


def enable_large_pages(execution: Execution) -> None:
    """Put large tensors in pages of 2 MB on the CPU, instead of the default 4 KB, which ``--ablate large-pages`` keeps.

    The C library returns large freed blocks to the system, so that the next step's logits get new pages, each zeroed
    on its first use: twelve steps of ``tiny`` have 2.5 million page faults with small pages, 0.14 million with large.
    torch reads the variable at its first allocation, so a process that has made tensors before keeps its pages.
    """
    if execution.device == "cpu":
        os.environ["THP_MEM_ALLOC_ENABLE"] = str(int("large-pages" not in execution.ablate))
