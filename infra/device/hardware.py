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
from infra.device.gpu import GpuState, read_gpu
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

    def with_memory_limit(self, limit: int | None) -> "DeviceInfo":
        """Return the device for a process that may use ``limit`` bytes; None means all available memory."""
        return self if limit is None else replace(self, memory=min(self.memory, limit))


A100 = DeviceInfo("cuda", "NVIDIA A100", (8, 0), bf16=True, memory=40 * 2**30)
"""The A100 with 40 GB, for plans on a machine without a GPU."""

KNOWN_GPUS = {
    "A100": A100,
    "A100-80GB": replace(A100, memory=80 * 2**30),
    "A10": DeviceInfo("cuda", "NVIDIA A10", (8, 6), bf16=True, memory=23028 * 2**20),
    "L4": DeviceInfo("cuda", "NVIDIA L4", (8, 9), bf16=True, memory=23034 * 2**20),
    "L40S": DeviceInfo("cuda", "NVIDIA L40S", (8, 9), bf16=True, memory=46068 * 2**20),
    "RTX-3090": DeviceInfo("cuda", "NVIDIA GeForce RTX 3090", (8, 6), bf16=True, memory=24576 * 2**20),
    "RTX-4090": DeviceInfo("cuda", "NVIDIA GeForce RTX 4090", (8, 9), bf16=True, memory=24564 * 2**20),
    "H100": DeviceInfo("cuda", "NVIDIA H100", (9, 0), bf16=True, memory=80 * 2**30),
    "H200": DeviceInfo("cuda", "NVIDIA H200", (9, 0), bf16=True, memory=141 * 10**9),
    "B200": DeviceInfo("cuda", "NVIDIA B200", (10, 0), bf16=True, memory=180 * 10**9),
    "T4": DeviceInfo("cuda", "Tesla T4", (7, 5), memory=15360 * 2**20),
}
"""GPUs by name that a run can be planned for on a machine without them."""


def device_info() -> DeviceInfo:
    """Describe this machine's first visible GPU, or its CPU, without initializing CUDA."""
    state = read_gpu()
    return cpu_info() if state is None else gpu_info(state)


def gpu_info(state: GpuState) -> DeviceInfo:
    """Describe this machine's GPU from its ``state`` in NVML."""
    capability = state.capability or (0, 0)
    used_by_others = state.memory_used - (state.process_memory or 0)
    return DeviceInfo(
        "cuda", state.name, capability, bf16=capability >= (8, 0), memory=state.memory_total - used_by_others,
        compile_blocker=find_compile_blocker(capability),
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
