"""The memory that a process needs on the GPU in addition to the tensors of torch's allocator: the context and kernels.

Memory predictions assume a value for it, and it differs between GPUs, drivers and versions of torch. A new process
creates a context, and then runs the kernels of a training step once. This process reads the GPU's free memory before
and after each, and so needs no permissions for NVML. Other processes must not start or end meanwhile.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

PROGRAM = "infra.doctor.memory_steps"
"""Module of the process that is measured."""


def measure_memory(device: torch.device) -> dict[str, int]:
    """Return the bytes by part, ``context`` and ``kernels``; empty on a CPU, and where they cannot be measured."""
    if device.type != "cuda":
        return {}
    torch.cuda.init()  # This process's own context must not count.
    try:
        with _process() as reserved_bytes:
            return subtract(lambda: torch.cuda.mem_get_info(device)[0], reserved_bytes)
    except (OSError, ValueError):  # The process has died, for example because the GPU permits only one.
        return {}


def subtract(free_bytes: Callable[[], int], reserved_bytes: Callable[[], int]) -> dict[str, int]:
    """Return the bytes by part from the GPU's free memory before the process starts and after each of its two steps.

    ``reserved_bytes`` runs the next step, and returns what torch's allocator has reserved then.
    """
    used: list[int] = []
    start = free_bytes()
    for _ in range(2):
        reserved = reserved_bytes()
        used.append(start - free_bytes() - reserved)
    return {"context": used[0], "kernels": max(0, used[1] - used[0])} if used[0] > 0 else {}


@contextmanager
def _process() -> Iterator[Callable[[], int]]:
    """Yield a function that has the process run its next step, and returns the bytes that its allocator reserved."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        stderr=subprocess.DEVNULL, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    with process:
        assert process.stdin
        assert process.stdout
        steps, results = process.stdin, process.stdout

        def next_step() -> int:
            steps.write("\n")
            steps.flush()
            return json.loads(results.readline())["reserved"]

        try:
            yield next_step
        finally:
            process.kill()
