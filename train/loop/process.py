"""The process of a program that trains and goes on: what a run changes in it, and what earlier runs have left there."""

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

_VARIABLES = ("PYTORCH_ALLOC_CONF", "THP_MEM_ALLOC_ENABLE", "TORCHINDUCTOR_CACHE_DIR")

_first_values: dict[str, str] = {}
"""What the first run of this process has chosen of what torch reads only once, by flag."""


@contextlib.contextmanager
def borrowed_process(execution: Execution) -> Iterator[bool]:
    """Run ``config`` in this process, and leave torch's settings, its random state and the environment as they were.

    Yields whether the peak of its resident set is that of the block, and not of what the process did before. Raises
    ``UserError`` for a setting that torch reads only once, and has read for an earlier run that had another.
    """
    if _first_values:  # an earlier run may have left cycles of objects that hold its tensors
        gc.collect()
    _check_unchanged(execution)
    variables = {name: os.environ.get(name) for name in _VARIABLES}
    # torch reads these when it makes its first tensor, which is that of the random state.
    enable_large_pages(execution)
    configure_allocator(execution.allocator)
    precision, state = torch.get_float32_matmul_precision(), random_state()
    try:
        yield memory.forget_resident_peak()
    finally:
        torch.set_float32_matmul_precision(precision)
        restore_random_state(state)
        for name, value in variables.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _check_unchanged(execution: Execution) -> None:
    """Raise ``UserError`` when ``config`` chooses another allocator or size of pages than the first run here."""
    if execution.device == "cuda" and {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        return  # the user's choice, which has precedence
    if execution.device == "cpu":
        flag, value = "--ablate large-pages", "with it" if "large-pages" in execution.ablate else "without it"
    else:
        flag, value = "--allocator", f"with {execution.allocator}"
    first = _first_values.setdefault(flag, value)
    if value != first:
        raise UserError(
            f"{flag}: an earlier run in this process was {first}, and torch cannot change it any more. Train in "
            "another process with 'python -m train.run', or compare settings with 'python -m tune.ladder'."
        )
