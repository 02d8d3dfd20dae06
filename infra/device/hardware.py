"""Capabilities of devices, from which ``auto`` settings are resolved."""

import importlib
import os
import shutil
import sys
import sysconfig
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from infra.device import host
from infra.device.cuda import read_driver
from infra.device.gpu import GpuState, gpu_state
from infra.device.gpu_models import GPU_MODELS
from infra.device.torch_support import TorchSupport, torch_support
from infra.errors import first_line


@dataclass(frozen=True)
class DeviceInfo:
    """Properties of a device, from which ``auto`` settings are resolved."""

    kind: Literal["cuda", "cpu"]
    name: str
    capability: tuple[int, int] = (0, 0)
    """CUDA compute capability; (0, 0) for a CPU."""
    bf16: bool = False
    """Whether the device multiplies bf16 matrices in hardware."""
    memory: int = field(default=sys.maxsize, compare=False)
    """Bytes of the device's memory that this process can use; ``sys.maxsize`` if unknown."""
    compile_blocker: str = field(default="", compare=False)
    """Reason why torch.compile cannot work on the device, and the package to install; empty if it works."""
    allocator_blocker: str = field(default="", compare=False)
    """Reason why torch's allocator cannot use expandable segments on the GPU; empty if it can."""
    pinned_blocker: str = field(default="", compare=False)
    """Reason why host memory cannot be pinned for copies to the GPU; empty if it can."""
    gpu_blocker: str = field(default="", compare=False)
    """Reason why the GPU of this machine cannot be used, and the fix, without the last period; empty if it can."""
    gpu_absence: str = field(default="", compare=False)
    """Reason why there is no GPU, for a CPU; empty for a GPU."""
    memory_cap_reason: str = field(default="", compare=False)
    """Reason why torch's allocator is capped to the free memory even without a limit; empty if it is not."""
    nvml_failure: str = field(default="", compare=False)
    """Reason why NVML does not report the GPU's memory in use; empty if it does."""

    def with_memory_limit(self, limit: int | None) -> "DeviceInfo":
        """Return the device for a process that may use ``limit`` bytes; None means all available memory."""
        return self if limit is None else replace(self, memory=min(self.memory, limit))


KNOWN_GPUS = {
    model.plan_name: DeviceInfo(
        "cuda", model.cuda_name, model.capability, bf16=model.capability >= (8, 0), memory=model.memory
    )
    for model in GPU_MODELS
    if model.mebibytes
}
"""GPUs by name that a run can be planned for on a machine without them."""

A100 = KNOWN_GPUS["A100"]
"""The A100 with 40 GB, for plans on a machine without a GPU."""


def device_info() -> DeviceInfo:
    """Describe this machine's first visible GPU, or its CPU, without a context of CUDA in this process."""
    return examine_device()[1]


def examine_device() -> tuple[GpuState | None, DeviceInfo]:
    """Return the state of this machine's first visible GPU and its properties, or None and those of the CPU."""
    driver = read_driver()
    if driver.devices:
        state, device, is_wsl = gpu_state(driver.devices[0]), driver.devices[0], host.is_wsl()
        return state, gpu_info(state, torch_support(device, driver.version, is_wsl=is_wsl), is_wsl=is_wsl)
    absence, is_broken = driver.absence, driver.is_broken
    advice = f"{absence}. Check it with nvidia-smi" if is_broken else ""
    return None, replace(cpu_info(), gpu_blocker=advice, gpu_absence=absence)


def gpu_info(state: GpuState, support: TorchSupport | None = None, *, is_wsl: bool = False) -> DeviceInfo:
    """Describe a GPU in ``state``, for which torch has ``support``."""
    support = support or TorchSupport()
    capability = state.capability or (0, 0)
    if state.is_integrated:  # CUDA counts the page cache as used.
        memory = min(state.memory_total, host.available_memory())
    elif state.memory_used is None:
        memory = state.memory_total if support.free_memory is None else support.free_memory
    else:
        memory = state.memory_total - (state.memory_used - (state.process_memory or 0))
    cap_reason = "the GPU shares the host's memory" if state.is_integrated else ""
    if is_wsl:
        cap_reason = "WSL2 would take more from the host, which is far slower, instead of running out"
    return DeviceInfo(
        "cuda", state.name, capability, bf16=capability >= (8, 0), memory=memory,
        compile_blocker=find_compile_blocker(capability), allocator_blocker=support.allocator_blocker,
        pinned_blocker=support.pinned_blocker, gpu_blocker=support.blocker, memory_cap_reason=cap_reason,
        nvml_failure=state.nvml_failure,
    )  # fmt: skip


def cpu_info(cpuinfo: Path = Path("/proc/cpuinfo")) -> DeviceInfo:
    """Describe this machine's CPU. If the file ``cpuinfo`` is missing, bf16 counts as emulated."""
    try:
        flags = set(cpuinfo.read_text(encoding="utf-8").split())
    except OSError:
        flags = set[str]()
    compiler = os.environ.get("CXX") or any(map(shutil.which, ("g++", "clang++", "c++")))
    return DeviceInfo(
        "cpu", "cpu", bf16=bool(flags & {"avx512_bf16", "amx_tile"}), memory=host.available_memory(),
        compile_blocker="" if compiler else "the C++ compiler is missing; install g++",
    )  # fmt: skip


def find_compile_blocker(capability: tuple[int, int], headers: Path | None = None) -> str:
    """Return the reason why torch.compile cannot work on a GPU, and the package to install; empty if it works.

    torch.compile generates kernels for Triton, which compiles their launchers from C with Python's ``headers``.
    """
    if capability < (7, 0):
        return "Triton needs a GPU of compute capability 7.0 or later"
    try:
        importlib.import_module("triton")
    except ModuleNotFoundError as missing:
        if missing.name == "triton":
            return "Triton is not installed; run 'pip install triton'"
        return f"Triton cannot be imported ({missing}); run 'pip install --force-reinstall triton'"
    except Exception as error:  # noqa: BLE001 a broken installation may raise any exception
        return f"Triton cannot be imported ({first_line(error)}); run 'pip install --force-reinstall triton'"
    if not (os.environ.get("CC") or any(map(shutil.which, ("gcc", "clang")))):
        return "the C compiler is missing; install gcc"
    if not ((headers or Path(sysconfig.get_path("include"))) / "Python.h").exists():
        return "the Python headers are missing; install python3-dev"
    return ""
