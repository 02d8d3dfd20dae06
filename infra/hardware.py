"""Datasheet peaks by GPU name, for MFU. Unknown hardware has no peak and therefore no MFU, never a guess.

Dense rates without sparsity, in FLOP/s, for bf16 tensor cores, from NVIDIA's datasheets (A100: 2020,
H100 SXM, PCIe and NVL: 2022, H200 and its NVL: 2023, L4/L40S: 2023, V100 has no bf16; its fp16 rate stands in).
"""

_PEAK_BF16 = (
    ("H200 NVL", 835.5e12),
    ("H200", 989.4e12),
    ("H100 NVL", 835.5e12),
    ("H100 PCIe", 756e12),
    ("H100", 989.4e12),
    ("A100", 312e12),
    ("A30", 165e12),
    ("A10G", 70e12),
    ("A10", 125e12),
    ("L40S", 362e12),
    ("L4", 121e12),
    ("RTX 4090", 165.2e12),
    ("RTX 3090", 71e12),
    ("V100", 125e12),
)


def peak_flops(gpu_name: str | None) -> float | None:
    """Dense bf16 tensor-core peak in FLOP/s of the GPU that torch or NVML calls ``gpu_name``; None if unknown."""
    words = (gpu_name or "").replace("-", " ")
    for name, peak in _PEAK_BF16:
        if f" {name} " in f" {words} ":
            return peak
    return None
