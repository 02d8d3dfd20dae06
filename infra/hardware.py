"""What a device can do: its capabilities, and its peak rate from the datasheet, for MFU.

Unknown hardware has no peak and therefore no MFU; it is never guessed.

Dense rates without sparsity, in FLOP/s, from NVIDIA's datasheets (A100: 2020, H100 SXM, PCIe and NVL: 2022, H200 and
its NVL: 2023, L4 and L40S: 2023) and, of the RTX cards, its architecture papers. V100 has neither bf16 nor TF32.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from infra.gpu import read_gpu

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
class DeviceFacts:
    """The facts about a device that decide settings that are left open."""

    kind: Literal["cuda", "cpu"]
    name: str
    capability: tuple[int, int] = (0, 0)
    """CUDA compute capability; (0, 0) for a CPU."""
    bf16: bool = False
    """Whether it multiplies bf16 matrices in hardware."""


A100 = DeviceFacts("cuda", "NVIDIA A100", (8, 0), bf16=True)
"""Used where something is planned for a GPU that this machine does not have."""


def device_facts() -> DeviceFacts:
    """The facts about this machine's first visible GPU, or its CPU. Asks NVML, so that CUDA need not be initialised."""
    state = read_gpu()
    if state is None:
        return cpu_facts()
    capability = state.capability or (0, 0)
    return DeviceFacts("cuda", state.name, capability, bf16=capability >= (8, 0))


def cpu_facts() -> DeviceFacts:
    """The facts about this machine's CPU; where /proc/cpuinfo is missing, bf16 counts as emulated."""
    try:
        flags = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    except OSError:
        flags = set[str]()
    return DeviceFacts("cpu", "cpu", bf16=bool(flags & {"avx512_bf16", "amx_tile"}))
