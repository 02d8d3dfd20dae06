"""Train in a process that continues afterwards, such as a notebook: restore the settings that a run changes."""

import contextlib
import gc
import os
from collections.abc import Iterator

import torch

from infra.errors import UserError
from train.config import Execution
from train.loop import memory
from train.loop.execution import configure_allocator, enable_large_pages
from train.run_files.checkpoint import random_state, restore_random_state

_VARIABLES = (
    "PYTORCH_ALLOC_CONF", "THP_MEM_ALLOC_ENABLE", "TORCHINDUCTOR_CACHE_DIR", "CUBLAS_WORKSPACE_CONFIG",
)  # fmt: skip

_first_values: dict[str, str] = {}
"""Values of the settings that torch reads only once, by flag, from the first run in this process."""


@contextlib.contextmanager
def borrowed_process(execution: Execution) -> Iterator[bool]:
    """Train in this process, and restore torch's settings, its random state and the environment afterwards.

    Yields whether the process's peak resident set covers this block only, without what the process did before it.
    Raises ``UserError`` for a setting that torch reads only once, if an earlier run in this process had another value.
    """
    if _first_values:  # an earlier run may have left cycles of objects that hold its tensors
        gc.collect()
    _check_unchanged(execution)
    variables = {name: os.environ.get(name) for name in _VARIABLES}
    # torch reads these when it makes its first tensor, which is the random state's.
    enable_large_pages(execution)
    configure_allocator(execution.allocator)
    precision, state = torch.get_float32_matmul_precision(), random_state()
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        yield memory.forget_resident_peak()
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.use_deterministic_algorithms(is_deterministic, warn_only=warns_only)
        restore_random_state(state)
        for name, value in variables.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _check_unchanged(execution: Execution) -> None:
    """Raise ``UserError`` if ``execution`` has another value of a setting that torch reads once than the first run in
    this process."""
    for flag, value in _settings_of_process(execution):
        first = _first_values.setdefault(flag, value)
        if value != first:
            raise UserError(
                f"{flag}: an earlier run in this process was {first}, and PyTorch cannot change that within a process. "
                "Train in another process with 'python -m train.run', or compare settings with 'python -m tune.ladder'."
            )


def _settings_of_process(execution: Execution) -> Iterator[tuple[str, str]]:
    """Yield (flag, description of its value) of the settings that torch reads once, unless the user's environment sets
    them."""
    if execution.device == "cpu":
        yield "--ablate", "with large-pages" if "large-pages" in execution.ablate else "without large-pages"
        return
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        yield "--allocator", f"with {execution.allocator}"
    if "CUBLAS_WORKSPACE_CONFIG" not in os.environ:
        yield "--deterministic", "deterministic" if execution.deterministic else "not deterministic"
