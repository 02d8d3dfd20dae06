"""The published rates of GPUs agree with each other, and a name finds its own GPU and no other."""

import pytest

from infra.device.gpu_models import GPU_MODELS, GpuModel, find_gpu_model
from infra.device.hardware import KNOWN_GPUS


@pytest.mark.parametrize("model", GPU_MODELS, ids=lambda model: model.name)
def test_the_rates_follow_from_multiprocessors_and_a_clock(model: GpuModel) -> None:
    """Ampere's GA10x and later have 128 units for fp32 in a multiprocessor, others 64; each does two operations."""
    has_64 = model.capability in ((7, 0), (7, 5), (8, 0))
    clock = model.fp32 * 1e12 / (model.multiprocessors * (64 if has_64 else 128) * 2)
    assert 1.3e9 < clock < 2.7e9
    assert model.tf32 is None or model.sixteen_bits == pytest.approx(2 * model.tf32, rel=0.02)
    if model.cuda_name.startswith("NVIDIA GeForce"):
        assert model.sixteen_bits == pytest.approx(2 * model.fp32, rel=0.01), "at half the rate of fp16 accumulation"


@pytest.mark.parametrize(
    ("name", "bandwidth"),
    [
        ("NVIDIA A100-SXM4-40GB", 1555), ("NVIDIA A100-PCIE-40GB", 1555), ("NVIDIA A100-SXM4-80GB", 2039),
        ("NVIDIA A100 80GB PCIe", 1935), ("NVIDIA H100 80GB HBM3", 3350), ("NVIDIA H100 PCIe", 2000),
        ("NVIDIA GH200 480GB", 4000), ("NVIDIA GH200 144G HBM3e", 4900), ("NVIDIA B200", 7672), ("Tesla T4", 320),
        ("NVIDIA RTX 6000 Ada Generation", 960), ("NVIDIA RTX A6000", 768), ("NVIDIA GeForce RTX 3060", 360),
        ("NVIDIA GeForce RTX 3060 Ti", 448), ("NVIDIA GeForce RTX 5090", 1792), ("NVIDIA L40S", 864),
        ("Tesla V100-PCIE-16GB", 900), ("NVIDIA GeForce RTX 4070 Ti SUPER", 672),
    ],
)  # fmt: skip
def test_a_gpu_is_found_by_the_name_that_cuda_reports(name: str, bandwidth: float) -> None:
    model = find_gpu_model(name)
    assert model
    assert model.bandwidth == bandwidth


@pytest.mark.parametrize("name", [None, "", "cpu", "NVIDIA GB10", "Quadro RTX 6000", "NVIDIA A1000"])
def test_another_gpu_is_unknown(name: str | None) -> None:
    assert find_gpu_model(name) is None


def test_every_gpu_to_plan_for_is_the_one_that_its_name_finds() -> None:
    planned = {model.plan_name: model for model in GPU_MODELS if model.mebibytes}
    assert {name: find_gpu_model(info.name) for name, info in KNOWN_GPUS.items()} == planned
    assert {"RTX-3060", "RTX-4070", "RTX-5090", "RTX-A6000", "RTX-6000-Ada", "L4", "L40S", "A10", "B200", "GH200"} <= {
        *planned
    }
