"""Published properties of GPUs: what plans compute with, and the peak rates that MFU needs.

The peak of unknown hardware is not guessed; its MFU is unknown. A laptop's GPU has the name of a card but other
processors and clocks, and a MIG slice has a part of its card, so both are unknown here.

The rates are dense, without sparsity; products of 16-bit matrices accumulate in fp32, as torch computes them. GeForce
cards do that at half the rate of accumulating in fp16, which their advertised figures assume.

Sources:

- T4, V100, A100, A30, A10, A40, L4, L40, L40S, H100, H200, GH200: datasheets (2018 to 2025). A V100 and a T4 have
  neither bf16 nor TF32.
- B200: "NVIDIA Blackwell Architecture Technical Brief" (HGX, 1,000 W). The bandwidth is that of the 7,680 bits at
  3,996 MHz that its driver reports (github.com/pytorch/ao/pull/4002); datasheets say up to 8 TB/s.
- A10G: Amazon's description of the G5 instances.
- RTX 30xx, A4000, A5000, A6000: "NVIDIA Ampere GA102 GPU Architecture" (2021) and the cards' specifications.
- RTX 40xx, 6000 Ada: "NVIDIA Ada GPU Architecture" (2023) and the cards' specifications.
- RTX 50xx: "NVIDIA RTX Blackwell GPU Architecture" (2025) and the cards' specifications.
- Compute capabilities: NVIDIA's list of CUDA GPUs (developer.nvidia.com/cuda-gpus).
- Memory: the total that nvidia-smi shows, with error correction where it is on by default.

A GeForce card without a table of its tensor cores in these papers has the fp32 rate of its specification. By the
papers' tables, that is also the rate of TF32, and half the rate of 16 bits with fp32 accumulation.
"""

from dataclasses import dataclass

_MIB, _GIGA, _TERA = 2**20, 1e9, 1e12


@dataclass(frozen=True)
class GpuModel:
    """A type of GPU. Rates are in units of 10^12 FLOP/s, bandwidth in 10^9 bytes/s."""

    name: str
    """Words of the name that CUDA reports, without hyphens."""
    capability: tuple[int, int]
    multiprocessors: int
    sixteen_bits: float
    """Rate of matrix products in bf16 or fp16 on tensor cores."""
    tf32: float | None
    """Rate of matrix products in TF32 on tensor cores; None for a GPU without TF32."""
    fp32: float
    """Rate in fp32 without tensor cores."""
    bandwidth: float
    mebibytes: int | None = None
    """MiB of memory; None for a GPU that is only recognized, and cannot be planned for by name."""

    @property
    def memory_bandwidth(self) -> float:
        """Bytes/s of the memory."""
        return self.bandwidth * _GIGA

    @property
    def memory(self) -> int:
        """Bytes of memory; 0 if they are unknown."""
        return (self.mebibytes or 0) * _MIB

    @property
    def cuda_name(self) -> str:
        """Name as CUDA reports it, without what differs between boards."""
        maker = "NVIDIA GeForce" if self._is_geforce else "Tesla" if self.capability < (8, 0) else "NVIDIA"
        return f"{maker} {self.name}"

    @property
    def plan_name(self) -> str:
        """Name in flags: ``RTX-3090``."""
        return self.name.removesuffix(" Generation").replace(" ", "-")

    @property
    def _is_geforce(self) -> bool:
        return self.name.startswith("RTX ") and self.name[4:6].isdigit() and "Ada" not in self.name

    def peak(self, precision: str) -> float:
        """Return the FLOP/s of matrix products; every precision except fp32 and tf32 has the rate of 16 bits."""
        rates = {"fp32": self.fp32, "tf32": self.tf32 or self.fp32}
        return rates.get(precision, self.sixteen_bits) * _TERA

    def has_name(self, gpu_name: str) -> bool:
        """Return whether ``gpu_name``, as CUDA reports it, is that of a GPU of this type."""
        if self.name.startswith("RTX"):  # What follows the number makes it another card: Ti, SUPER, D.
            return f" {gpu_name}".endswith(f" {self.name}")
        return set(self.name.split()) <= set(gpu_name.replace("-", " ").split())


GPU_MODELS: tuple[GpuModel, ...] = (
    GpuModel("A100", (8, 0), 108, 312, 156, 19.5, 1555, 40960),
    GpuModel("A100 80GB", (8, 0), 108, 312, 156, 19.5, 2039, 81920),
    GpuModel("A100 80GB PCIe", (8, 0), 108, 312, 156, 19.5, 1935),
    GpuModel("A10", (8, 6), 72, 125, 62.5, 31.2, 600, 23028),
    GpuModel("A10G", (8, 6), 80, 70, 35, 35, 600),
    GpuModel("A30", (8, 0), 56, 165, 82, 10.3, 933),
    GpuModel("A40", (8, 6), 84, 149.7, 74.8, 37.4, 696),
    GpuModel("L4", (8, 9), 58, 121, 60, 30.3, 300, 23034),
    GpuModel("L40", (8, 9), 142, 181, 90.5, 90.5, 864),
    GpuModel("L40S", (8, 9), 142, 362, 183, 91.6, 864, 46068),
    GpuModel("H100 PCIe", (9, 0), 114, 756, 378, 51, 2000),
    GpuModel("H100 NVL", (9, 0), 132, 835.5, 417.7, 60, 3900),
    GpuModel("H100", (9, 0), 132, 989.4, 494.7, 67, 3350, 81559),
    GpuModel("H200 NVL", (9, 0), 132, 835.5, 417.7, 60, 4800),
    GpuModel("H200", (9, 0), 132, 989.4, 494.7, 67, 4800, 143771),
    GpuModel("GH200 144G HBM3e", (9, 0), 132, 989.4, 494.7, 67, 4900),
    GpuModel("GH200", (9, 0), 132, 989.4, 494.7, 67, 4000, 97871),
    GpuModel("B200", (10, 0), 148, 2250, 1125, 80, 7672, 183359),
    GpuModel("T4", (7, 5), 40, 65, None, 8.1, 320, 15360),
    GpuModel("V100 PCIE", (7, 0), 80, 112, None, 14, 900),
    GpuModel("V100S", (7, 0), 80, 130, None, 16.4, 1134),
    GpuModel("V100", (7, 0), 80, 125, None, 15.7, 900),
    GpuModel("RTX A4000", (8, 6), 48, 76.7, 38.3, 19.2, 448),
    GpuModel("RTX A5000", (8, 6), 64, 111.1, 55.6, 27.8, 768),
    GpuModel("RTX A6000", (8, 6), 84, 154.8, 77.4, 38.7, 768, 49140),
    GpuModel("RTX 6000 Ada Generation", (8, 9), 142, 364.2, 182.1, 91.1, 960, 49140),
    GpuModel("RTX 3060", (8, 6), 28, 25.4, 12.7, 12.7, 360, 12288),
    GpuModel("RTX 3060 Ti", (8, 6), 38, 32.4, 16.2, 16.2, 448),
    GpuModel("RTX 3070", (8, 6), 46, 40.6, 20.3, 20.3, 448, 8192),
    GpuModel("RTX 3070 Ti", (8, 6), 48, 43.5, 21.7, 21.7, 608),
    GpuModel("RTX 3080", (8, 6), 68, 59.5, 29.8, 29.8, 760, 10240),
    GpuModel("RTX 3080 Ti", (8, 6), 80, 68.2, 34.1, 34.1, 912),
    GpuModel("RTX 3090", (8, 6), 82, 71, 35.6, 35.6, 936, 24576),
    GpuModel("RTX 3090 Ti", (8, 6), 84, 80, 40, 40, 1008),
    GpuModel("RTX 4060", (8, 9), 24, 30.2, 15.1, 15.1, 272, 8188),
    GpuModel("RTX 4060 Ti", (8, 9), 34, 44.2, 22.1, 22.1, 288),
    GpuModel("RTX 4070", (8, 9), 46, 58.2, 29.1, 29.1, 504, 12282),
    GpuModel("RTX 4070 SUPER", (8, 9), 56, 71, 35.5, 35.5, 504),
    GpuModel("RTX 4070 Ti", (8, 9), 60, 80.2, 40.1, 40.1, 504),
    GpuModel("RTX 4070 Ti SUPER", (8, 9), 66, 88.2, 44.1, 44.1, 672),
    GpuModel("RTX 4080", (8, 9), 76, 97.5, 48.7, 48.7, 717, 16376),
    GpuModel("RTX 4080 SUPER", (8, 9), 80, 104.4, 52.2, 52.2, 736),
    GpuModel("RTX 4090", (8, 9), 128, 165.2, 82.6, 82.6, 1008, 24564),
    GpuModel("RTX 5060", (12, 0), 30, 38.4, 19.2, 19.2, 448, 8151),
    GpuModel("RTX 5060 Ti", (12, 0), 36, 47.4, 23.7, 23.7, 448),
    GpuModel("RTX 5070", (12, 0), 48, 61.7, 30.9, 30.9, 672, 12227),
    GpuModel("RTX 5070 Ti", (12, 0), 70, 87.9, 43.9, 43.9, 896),
    GpuModel("RTX 5080", (12, 0), 84, 112.6, 56.3, 56.3, 960, 16303),
    GpuModel("RTX 5090", (12, 0), 170, 209.5, 104.8, 104.8, 1792, 32607),
)
"""The GPUs whose properties are published. Of several that match a name, the one with the longest name is meant."""


def is_variant(gpu_name: str) -> bool:
    """Return whether ``gpu_name`` is that of a laptop's GPU or a MIG slice, whose rates are not published."""
    return " Laptop " in gpu_name or " MIG " in gpu_name


def find_gpu_model(gpu_name: str | None) -> GpuModel | None:
    """Return the type of the GPU that CUDA or NVML calls ``gpu_name``; None if it is unknown."""
    if not gpu_name or is_variant(gpu_name):
        return None
    models = [model for model in GPU_MODELS if model.has_name(gpu_name)]
    return max(models, key=lambda model: len(model.name.split()), default=None)


def peak_flops(gpu_name: str | None, precision: str = "bf16") -> float | None:
    """Return the dense peak in FLOP/s in ``precision`` of the GPU that CUDA calls ``gpu_name``; None if unknown.

    A GPU without TF32 computes it in fp32.
    """
    model = find_gpu_model(gpu_name)
    return model and model.peak(precision)
