"""Whether the installed torch can use this machine's GPU, tried by :mod:`infra.device.torch_probe` in another process.

The build of torch that suits a GPU is named before anything is built: a driver that is too old, or kernels for other
GPUs, would otherwise end the first step with an error that names neither.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from infra.device.cuda import CudaDevice

PROBE_TIMEOUT_SECONDS = 120.0
"""Time for a process to import torch from a slow disk and to allocate memory of the GPU."""
EXPANDABLE = "expandable_segments:True"
"""The setting of torch's allocator that is tried."""
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables with which a user configures torch's allocator; the second is the name before torch 2.10."""

BUILDS: tuple[tuple[str, tuple[int, int], tuple[int, int], tuple[int, int]], ...] = (
    ("cu130", (13, 0), (7, 5), (12, 1)),
    ("cu126", (12, 0), (5, 0), (9, 0)),
    ("cu128", (12, 0), (7, 5), (12, 1)),
)
"""torch's builds: (name, CUDA version that the driver must support, oldest and newest compute capability), the one with
the newest torch first.

The capabilities are those of PyTorch's RELEASE.md and of ``PYTORCH_RELEASES_CODE_CC`` in torch/cuda/__init__.py of
torch 2.14. There are builds for CUDA 12.8 until torch 2.11 (github.com/pytorch/pytorch/issues/178665), for CUDA 12.6
until 2.14 (issues/190385). Each runs with any driver for its major version of CUDA (NVIDIA, CUDA Compatibility)."""


@dataclass(frozen=True)
class TorchSupport:
    """What torch can do with a GPU. A text is empty if there is no problem."""

    blocker: str = ""
    """Reason why torch cannot use the GPU, and the fix, as sentences without the last period."""
    allocator_blocker: str = ""
    """Reason why torch's allocator cannot use expandable segments."""
    pinned_blocker: str = ""
    """Reason why host memory cannot be pinned."""
    free_memory: int | None = None
    """Bytes of the GPU that were free; None if unknown."""


@cache
def torch_support(
    device: CudaDevice, driver_version: tuple[int, int], *, is_wsl: bool = False, is_first: bool = True
) -> TorchSupport:
    """Try ``device`` once with the installed torch in another process.

    Where a user has configured torch's allocator, that is what is tried. Nothing is tried where torch already uses the
    GPU in this process, such as in a notebook: it works, and the GPU may be set to allow one process only.

    Args:
        device: the GPU.
        driver_version: newest version of CUDA that the driver supports.
        is_wsl: whether the system is WSL2.
        is_first: whether the GPU is the first one that this process may use, which torch would use here.
    """
    # Another thread may be importing torch, which cannot use the GPU yet.
    is_initialized = getattr(sys.modules.get("torch.cuda"), "is_initialized", None)
    if is_first and is_initialized and is_initialized():
        import torch

        free, _ = torch.cuda.mem_get_info()
        return TorchSupport(free_memory=free + torch.cuda.memory_reserved())
    variables = {} if is_first else dict([device.setting.split("=")])
    allocator_blocker = "WSL2 does not support them on every GPU" if is_wsl else ""
    if not allocator_blocker and not any(name in os.environ for name in ALLOCATOR_VARIABLES):
        report = run_probe({ALLOCATOR_VARIABLES[0]: EXPANDABLE} | variables)
        if report.get("failed_step") != "allocation":
            return interpret(report, device, driver_version)
        allocator_blocker = _describe(report["failure"])
    return replace(interpret(run_probe(variables), device, driver_version), allocator_blocker=allocator_blocker)


def run_probe(variables: Mapping[str, str]) -> dict[str, Any]:
    """Return the last report of the probe, run with these environment ``variables``."""
    command = [sys.executable, "-P", str(Path(__file__).with_name("torch_probe.py"))]
    try:
        process = subprocess.run(
            command, env=os.environ | variables, capture_output=True, text=True, timeout=PROBE_TIMEOUT_SECONDS
        )
        output, failure = process.stdout, _last_line(process.stderr) if process.returncode else ""
    except subprocess.TimeoutExpired:
        output, failure = "", f"a first allocation did not end within {PROBE_TIMEOUT_SECONDS:.0f} s"
    reports = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    report: dict[str, Any] = reports[-1] if reports else {}
    return report | ({"failed_step": "process", "failure": failure} if failure else {})


def interpret(report: Mapping[str, Any], device: CudaDevice, driver_version: tuple[int, int]) -> TorchSupport:
    """Return what the probe's ``report`` means for ``device`` with a driver for CUDA ``driver_version``."""
    blocker, alternative = "", ""
    if "torch" in report:
        version, cuda, architectures = report["torch"], report["cuda"], report["architectures"]
        if not cuda:
            blocker = f"torch {version} is a build without CUDA"
        elif driver_version[0] < int(cuda.split(".")[0]):
            supported = ".".join(map(str, driver_version))
            blocker = f"torch {version} needs a driver for CUDA {cuda}, and this one supports CUDA {supported}"
            alternative = "update the NVIDIA driver, or "
        elif not has_kernels(architectures, device.capability):
            capability = ".".join(map(str, device.capability))
            blocker = f"torch {version} has no kernels for its compute capability {capability}"
    if blocker:
        advice = alternative + build_advice(device.capability, driver_version)
        return TorchSupport(f"{blocker}. {advice[0].upper()}{advice[1:]}")
    failed_step, failure, free = report.get("failed_step"), report.get("failure", ""), report.get("free")
    if failed_step == "pinned":
        return TorchSupport(pinned_blocker=failure, free_memory=free)
    if failed_step:
        return TorchSupport(f"torch fails on it ({_describe(failure)}). Check it with nvidia-smi")
    return TorchSupport(free_memory=free)


def has_kernels(architectures: Sequence[str], capability: tuple[int, int]) -> bool:
    """Return whether a build for ``architectures``, such as sm_86 and compute_90, runs on a GPU of ``capability``.

    Kernels run on later minor versions of their architecture, and PTX (compute_90) on all later ones. Kernels of an
    architecture with a letter only run there.
    """
    for architecture in architectures:
        kind, _, number = architecture.partition("_")
        if not number.isdigit():
            number, is_exact = number.rstrip("af"), True
        else:
            is_exact = False
        version = int(number[:-1]), int(number[-1])
        if version == capability or (kind == "compute" and version <= capability and not is_exact):
            return True
        if not is_exact and version[0] == capability[0] and version <= capability:
            return True
    return not architectures  # Some builds do not report them.


def build_advice(capability: tuple[int, int], driver_version: tuple[int, int]) -> str:
    """Return which build of torch to install for a GPU of ``capability``, as the end of a sentence."""
    suitable = [build for build in BUILDS if build[2] <= capability <= build[3]]
    usable = [build for build in suitable if driver_version >= build[1]]
    if not suitable:
        return "use another GPU, because no build of torch supports this one"
    name = (usable or suitable[-1:])[0][0]
    update = "" if usable else "update the NVIDIA driver and "
    return f"{update}install the build of torch for CUDA {name[2:4]}.{name[4:]} ({name} in PyTorch's package index)"


def _describe(failure: str) -> str:
    """Return torch's ``failure`` without the place of an assertion in its code."""
    if "NVML_SUCCESS" in failure:
        return "torch needs NVML for them, which does not respond"
    return failure.partition(" INTERNAL ASSERT FAILED")[0]


def _last_line(text: str) -> str:
    return (text.strip() or "the process was killed").splitlines()[-1]
