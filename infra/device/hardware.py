"""What a device can do: its capabilities, and its peak rate from the datasheet, for MFU.

Unknown hardware has no peak and therefore no MFU; it is never guessed.

Dense rates without sparsity, in FLOP/s, from NVIDIA's datasheets (A100: 2020, H100 SXM, PCIe and NVL: 2022, H200 and
its NVL: 2023, L4 and L40S: 2023) and, of the RTX cards, its architecture papers. V100 has neither bf16 nor TF32.
"""

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

_PEAKS: tuple[tuple[str, float, float | None, float], ...] = (
    ("H200 NVL", 835.5e12, 417.7e12, 60e12),
    ("H200", 989.4e12, 494.7e12, 67e12),
    ("H100 NVL", 835.5e12, 417.7e12, 60e12),
    ("H100 PCIe", 756e12, 378e12, 51e12),
    ("H100", 989.4e12, 494.7e12, 67e12),
    ("A100", 312e12, 156e12, 19.5e12),
    ("A30", 165e12, 82e12, 10.3e12),
    ("A10G", 70e12, 35e12, 35e12),
    ("A10", 125e12, 62.5e12, 31.2e12),
    ("L40S", 362e12, 183e12, 91.6e12),
    ("L4", 121e12, 60e12, 30.3e12),
    ("RTX 4090", 165.2e12, 82.6e12, 82.6e12),
    ("RTX 3090", 71e12, 35.6e12, 35.6e12),
    ("V100", 125e12, None, 15.7e12),
)
"""Peaks in 16 bits by tensor cores, in TF32 by tensor cores, and in fp32 without them."""


def peak_flops(gpu_name: str | None, precision: str = "bf16") -> float | None:
    """Dense peak in FLOP/s of the GPU that torch or NVML calls ``gpu_name``, in ``precision``; None if unknown.

    Every precision but fp32 and tf32 has the peak of 16 bits; without TF32 such a product is computed in fp32.
    """
    words = (gpu_name or "").replace("-", " ")
    for name, sixteen_bits, tf32, fp32 in _PEAKS:
        if f" {name} " in f" {words} ":
            return {"fp32": fp32, "tf32": tf32 or fp32}.get(precision, sixteen_bits)
    return None


@dataclass(frozen=True)
class DeviceInfo:
    """The facts about a device that decide settings that are left open."""

    kind: Literal["cuda", "cpu"]
    name: str
    capability: tuple[int, int] = (0, 0)
    """CUDA compute capability; (0, 0) for a CPU."""
    bf16: bool = False
    """Whether it multiplies bf16 matrices in hardware."""
    memory: int = field(default=sys.maxsize, compare=False)
    """Bytes that this process can use there; without a bound where that is not known."""
    compile_blocker: str = field(default="", compare=False)
    """Why torch.compile cannot work there, and what to install; empty where it can."""

    def with_memory_limit(self, limit: int | None) -> "DeviceInfo":
        """The same device for a process that may use ``limit`` bytes; all that is free if that is None."""
        return self if limit is None else replace(self, memory=min(self.memory, limit))


A100 = DeviceInfo("cuda", "NVIDIA A100", (8, 0), bf16=True, memory=40 * 2**30)
"""Used where something is planned for a GPU that this machine does not have: the one with 40 GB."""

KNOWN_GPUS = {
    "A100": A100,
    "H100": DeviceInfo("cuda", "NVIDIA H100", (9, 0), bf16=True, memory=80 * 2**30),
    "H200": DeviceInfo("cuda", "NVIDIA H200", (9, 0), bf16=True, memory=141 * 10**9),
}
"""GPUs that can be planned for without one."""


def device_info() -> DeviceInfo:
    """Describe this machine's first visible GPU, or its CPU. Asks NVML, so that CUDA need not be initialized."""
    state = read_gpu()
    return cpu_info() if state is None else gpu_info(state)


def gpu_info(state: GpuState) -> DeviceInfo:
    """Describe the GPU of this machine that is in ``state``."""
    capability = state.capability or (0, 0)
    others = state.memory_used - (state.process_memory or 0)
    return DeviceInfo(
        "cuda", state.name, capability, bf16=capability >= (8, 0), memory=state.memory_total - others,
        compile_blocker=compile_blocker(capability),
    )  # fmt: skip


def cpu_info(cpuinfo: Path = Path("/proc/cpuinfo")) -> DeviceInfo:
    """Describe this machine's CPU; where ``cpuinfo`` is missing, bf16 counts as emulated."""
    try:
        flags = set(cpuinfo.read_text(encoding="utf-8").split())
    except OSError:
        flags = set[str]()
    compiler = os.environ.get("CXX") or any(map(shutil.which, ("g++", "clang++", "c++")))
    return DeviceInfo(
        "cpu", "cpu", bf16=bool(flags & {"avx512_bf16", "amx_tile"}), memory=host.available_memory(),
        compile_blocker="" if compiler else "there is no C++ compiler: install g++",
    )  # fmt: skip


def compile_blocker(capability: tuple[int, int], headers: Path | None = None) -> str:
    """The reason why torch.compile cannot work on a GPU, and what to install; empty if it can.

    It writes kernels in Triton, which builds their launchers in C with Python's ``headers``.
    """
    if capability < (7, 0):
        return "Triton needs a GPU of compute capability 7.0 or later"
    try:
        importlib.import_module("triton")
    except ModuleNotFoundError as missing:
        if missing.name == "triton":
            return "Triton is not installed: 'pip install triton'"
        return f"Triton cannot be imported ({missing}): 'pip install --force-reinstall triton'"
    except Exception as broken:  # noqa: BLE001 whatever a broken installation raises
        return f"Triton cannot be imported ({first_line(broken)}): 'pip install --force-reinstall triton'"
    if not (os.environ.get("CC") or any(map(shutil.which, ("gcc", "clang")))):
        return "there is no C compiler: install gcc"
    if not ((headers or Path(sysconfig.get_path("include"))) / "Python.h").exists():
        return "Python's headers are missing: install python3-dev"
    return ""
