"""What to train first on a device, and how commands print the next command with the time to expect.

A next command must give a result in minutes on the device that the command saw. A run with a time budget takes as long
on a slow device as on a fast one, so its time is known without knowing the device's speed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from infra.cli.units import format_duration
from infra.device.gpu_models import peak_flops
from infra.device.hardware import DeviceInfo

TRAINING_SECONDS: Mapping[str, float] = {"cpu": 120.0, "cuda": 300.0}
"""Time budget of a first run by kind of device: on a CPU enough for the small model to learn common words."""

START_SECONDS: Mapping[str, float] = {"cpu": 10.0, "cuda": 60.0}
"""Typical time before the first step ends and after the last one: imports, the data, MLflow and, on a GPU, the
compiler."""

SAMPLE_SECONDS = 10.0
"""Typical time in which pipeline.tokenize tokenizes the installed sample."""

FLOPS_PER_TOKEN = 855e6
"""FLOPs that training GPT-2 124M with 1,024 tokens takes per token (Kaplan et al. 2020, with attention)."""
ASSUMED_UTILIZATION = 0.4
"""Fraction of a GPU's published rate that a first run is assumed to reach; it only chooses the batch."""
MAX_STEP_SECONDS = 5.0
"""Predicted time of an optimizer step up to which a batch is chosen, so that the first minutes have dozens of steps."""
LARGE_GPU_BYTES = 30e9
"""Memory from which a GPU without a published rate is assumed to be as fast as an A100."""


@dataclass(frozen=True)
class _Size:
    """A model and a batch for a first run."""

    flags: str
    """Flags of train.run."""
    context_length: int
    """Tokens of a sequence of the model."""
    global_batch: int
    """Sequences of a step."""


_SMALL = tuple(_Size(f"--model tiny --global-batch {size} --learning-rate 3e-3", 128, size) for size in (8, 1))
"""Sizes for a CPU. A small model learns faster with a higher learning rate than the default one."""
_ON_GPU = (_Size("", 1024, 480), *(_Size(f"--global-batch {size}", 1024, size) for size in (96, 32, 8)))
"""Sizes for a GPU, largest first; without flags train.run trains GPT-2 124M with 480 sequences."""


@dataclass(frozen=True)
class NextCommand:
    """A command that can be executed on this machine, with the time that it will take."""

    command: str
    seconds: float
    """Seconds to expect, including the start of the command."""

    def __str__(self) -> str:
        """Format the command in Markdown, after the time to expect: a shell can execute what follows the colon."""
        return f"{format_about(self.seconds)}: `{self.command}`"


def format_about(seconds: float) -> str:
    """Format an estimated time: ``about 40 s``, ``about 3 min``, ``about 2 h``."""
    if seconds < 50:
        return f"about {max(5, 5 * round(seconds / 5))} s"
    return f"about {round(seconds / 60)} min" if seconds < 5400 else f"about {seconds / 3600:.0f} h"


def first_run(device_info: DeviceInfo, data: str, train_tokens: int, longest_val: int) -> NextCommand | None:
    """Return the command of a first run on the token shards ``data``; None if they are too few for any.

    Args:
        device_info: the device that will train.
        data: the folder of the shards, as an argument of a shell.
        train_tokens: number of training tokens.
        longest_val: number of tokens of the longest validation shard.
    """
    kind = "cpu" if device_info.gpu_blocker else device_info.kind
    device = "--device cpu" if device_info.gpu_blocker else ""
    sizes = _SMALL if kind == "cpu" else _sizes_on_gpu(device_info) + _SMALL
    for size in sizes:
        if train_tokens > size.context_length * size.global_batch:
            flags = (size.flags, time_budget(kind), without_validation(longest_val, size.context_length), device)
            return NextCommand(
                " ".join(filter(None, (f"python -m train.run --data {data}", *flags))),
                START_SECONDS[kind] + TRAINING_SECONDS[kind],
            )
    return None


def _sizes_on_gpu(device_info: DeviceInfo) -> tuple[_Size, ...]:
    """Return the sizes whose steps the GPU is predicted to train in some seconds, and the smallest one."""
    rate = peak_flops(device_info.name)
    if rate is None:
        return _ON_GPU[device_info.memory < LARGE_GPU_BYTES :]
    tokens = MAX_STEP_SECONDS * ASSUMED_UTILIZATION * rate / FLOPS_PER_TOKEN
    return tuple(size for size in _ON_GPU[:-1] if size.global_batch * size.context_length <= tokens) + _ON_GPU[-1:]


def global_batch(device_info: DeviceInfo) -> int:
    """Return the global batch in sequences that suits the speed of a GPU."""
    return _sizes_on_gpu(device_info)[0].global_batch


def time_budget(kind: Literal["cuda", "cpu"]) -> str:
    """Return the flag that ends a run on a device of this ``kind`` within minutes."""
    return f"--time-budget {format_duration(TRAINING_SECONDS[kind])}"


def without_validation(longest_val: int, context_length: int) -> str:
    """Return the flag that disables validation if the longest validation shard has no whole window; else nothing."""
    return "" if longest_val > context_length else "--cycle 20s+0"
