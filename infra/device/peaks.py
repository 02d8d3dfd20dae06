"""Peak rates of GPUs from NVIDIA's publications, which MFU needs.

The peak of unknown hardware is not guessed; its MFU is unknown. A laptop's GPU has the name of a card but other
processors and clocks, and a MIG slice has a part of its card, so both have no peak here.

The rates are dense, without sparsity, in FLOP/s; products of 16-bit matrices accumulate in fp32, as torch computes
them. GeForce cards do that at half the rate of accumulating in fp16, which their advertised figures assume.

Sources:

- T4, V100, A100, A30, A10, A40, L4, L40, L40S, H100, H200, GH200, B200: datasheets (2018 to 2025). A V100 and a T4 have
  neither bf16 nor TF32.
- A10G: Amazon's description of the G5 instances.
- RTX 30xx, A4000, A5000, A6000: "NVIDIA Ampere GA102 GPU Architecture" (2021) and the cards' specifications.
- RTX 40xx, 6000 Ada: "NVIDIA Ada GPU Architecture" (2023) and the cards' specifications.
- RTX 50xx: "NVIDIA RTX Blackwell GPU Architecture" (2025) and the cards' specifications.

A GeForce card without a table of its tensor cores in these papers has the fp32 rate of its specification. By the
papers' tables, that is also the rate of TF32, and half the rate of 16 bits with fp32 accumulation.
"""


def _geforce(fp32: float) -> tuple[float, float, float]:
    """Return the rates of a GeForce card in 16 bits, TF32 and fp32 from its published rate in fp32."""
    return 2 * fp32, fp32, fp32


_PEAKS: dict[str, tuple[float, float | None, float]] = {
    "B200": (2250e12, 1125e12, 75e12),
    "GH200": (989.4e12, 494.7e12, 67e12),
    "H200 NVL": (835.5e12, 417.7e12, 60e12),
    "H200": (989.4e12, 494.7e12, 67e12),
    "H100 NVL": (835.5e12, 417.7e12, 60e12),
    "H100 PCIe": (756e12, 378e12, 51e12),
    "H100": (989.4e12, 494.7e12, 67e12),
    "A100": (312e12, 156e12, 19.5e12),
    "A40": (149.7e12, 74.8e12, 37.4e12),
    "A30": (165e12, 82e12, 10.3e12),
    "A10G": (70e12, 35e12, 35e12),
    "A10": (125e12, 62.5e12, 31.2e12),
    "L40S": (362e12, 183e12, 91.6e12),
    "L40": (181e12, 90.5e12, 90.5e12),
    "L4": (121e12, 60e12, 30.3e12),
    "T4": (65e12, None, 8.1e12),
    "V100": (125e12, None, 15.7e12),
    "RTX 6000 Ada Generation": (364.2e12, 182.1e12, 91.1e12),
    "RTX A6000": (154.8e12, 77.4e12, 38.7e12),
    "RTX A5000": (111.1e12, 55.6e12, 27.8e12),
    "RTX A4000": (76.7e12, 38.3e12, 19.2e12),
    "RTX 5090": (209.5e12, 104.8e12, 104.8e12),
    "RTX 5080": (112.6e12, 56.3e12, 56.3e12),
    "RTX 5070 Ti": (87.9e12, 43.9e12, 43.9e12),
    "RTX 5070": (61.7e12, 30.9e12, 30.9e12),
    "RTX 5060 Ti": _geforce(23.7e12),
    "RTX 5060": _geforce(19.2e12),
    "RTX 4090": (165.2e12, 82.6e12, 82.6e12),
    "RTX 4080 SUPER": _geforce(52.2e12),
    "RTX 4080": (97.5e12, 48.7e12, 48.7e12),
    "RTX 4070 Ti SUPER": _geforce(44.1e12),
    "RTX 4070 Ti": (80.2e12, 40.1e12, 40.1e12),
    "RTX 4070 SUPER": _geforce(35.5e12),
    "RTX 4070": _geforce(29.1e12),
    "RTX 4060 Ti": _geforce(22.1e12),
    "RTX 4060": _geforce(15.1e12),
    "RTX 3090 Ti": (80e12, 40e12, 40e12),
    "RTX 3090": (71e12, 35.6e12, 35.6e12),
    "RTX 3080 Ti": (68.2e12, 34.1e12, 34.1e12),
    "RTX 3080": (59.5e12, 29.8e12, 29.8e12),
    "RTX 3070 Ti": (43.5e12, 21.7e12, 21.7e12),
    "RTX 3070": (40.6e12, 20.3e12, 20.3e12),
    "RTX 3060 Ti": _geforce(16.2e12),
    "RTX 3060": _geforce(12.7e12),
}
"""Peak FLOP/s by name in 16 bits, in TF32 and in fp32; 16 bits and TF32 run on tensor cores, fp32 does not."""


def is_variant(gpu_name: str) -> bool:
    """Return whether ``gpu_name`` is that of a laptop's GPU or a MIG slice, whose peaks are not published."""
    return " Laptop " in gpu_name or " MIG " in gpu_name


def peak_flops(gpu_name: str | None, precision: str = "bf16") -> float | None:
    """Return the dense peak in FLOP/s in ``precision`` of the GPU with torch's or NVML's ``gpu_name``; None if unknown.

    Every precision except fp32 and tf32 has the peak of 16 bits. A GPU without TF32 computes it in fp32.
    """
    padded_name = f" {(gpu_name or '').replace('-', ' ')} "
    if is_variant(padded_name):
        return None
    for name, (sixteen_bits, tf32, fp32) in _PEAKS.items():
        # What follows an RTX card's number makes it another card: Ti, SUPER, D.
        if padded_name.endswith(f" {name} ") if name.startswith("RTX") else f" {name} " in padded_name:
            return {"fp32": fp32, "tf32": tf32 or fp32}.get(precision, sixteen_bits)
    return None
