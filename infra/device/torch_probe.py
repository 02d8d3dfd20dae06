"""Try the GPU with torch as a program of its own, and print what torch reports as a line of JSON after each step.

An error of the GPU makes CUDA unusable in its process, torch reads the settings of its allocator only once, and a
context takes half a GB of the GPU: this process ends with them.
"""

import json
from typing import Any

import torch

TRIAL_BYTES = 32 * 2**20
"""Size of the tensor that is allocated, which fills a segment of the allocator."""


def main() -> None:
    """Report torch's build, the GPU's free memory, and errors of the first allocations."""
    report: dict[str, Any] = {
        "torch": torch.__version__, "cuda": torch.version.cuda, "architectures": torch.cuda.get_arch_list(),
    }  # fmt: skip
    print(json.dumps(report), flush=True)
    steps = {"initialization": _initialize, "allocation": _allocate, "pinned": _pin}
    for step, run in steps.items():
        try:
            report |= run()
        except (RuntimeError, AssertionError) as failure:  # torch asserts that it has CUDA.
            report["failed_step"], report["failure"] = step, str(failure).splitlines()[0]
            print(json.dumps(report), flush=True)
            return
        print(json.dumps(report), flush=True)


def _initialize() -> dict[str, Any]:
    torch.cuda.init()
    free, _ = torch.cuda.mem_get_info()
    return {"free": free}


def _allocate() -> dict[str, Any]:
    torch.zeros(TRIAL_BYTES, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    return {}


def _pin() -> dict[str, Any]:
    torch.empty(TRIAL_BYTES, dtype=torch.uint8, pin_memory=True)
    return {}


if __name__ == "__main__":
    main()
