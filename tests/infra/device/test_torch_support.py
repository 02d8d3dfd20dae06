"""What torch can do with a GPU, by the report of its trial."""

from typing import Any

import pytest

from infra.device import torch_support
from infra.device.cuda import CudaDevice
from infra.device.torch_support import build_advice, has_kernels, interpret

CU130 = {"torch": "2.14.1+cu130", "cuda": "13.0", "architectures": ["sm_75", "sm_80", "sm_86", "sm_90", "sm_120"]}
T4 = CudaDevice("Tesla T4", "uuid", (7, 5), 15 * 10**9, is_integrated=False)
V100 = CudaDevice("Tesla V100", "uuid", (7, 0), 16 * 10**9, is_integrated=False)


@pytest.mark.parametrize(
    ("report", "device", "driver", "named"),
    [
        (CU130, T4, (13, 0), []),
        (CU130, T4, (13, 1), []),
        (CU130, V100, (13, 0), ["2.14.1+cu130", "7.0. Install", "cu126"]),
        (CU130, T4, (12, 2), ["CUDA 13.0", "CUDA 12.2. Update the NVIDIA driver, or install", "cu126"]),
        (CU130 | {"cuda": None, "architectures": []}, T4, (13, 0), ["without CUDA", "cu130"]),
        (CU130 | {"failed_step": "initialization", "failure": "CUDA error: busy"}, T4, (13, 0), ["CUDA error: busy"]),
        (CU130 | {"failed_step": "process", "failure": "Segmentation fault"}, T4, (13, 0), ["Segmentation fault"]),
        ({"failed_step": "process", "failure": "No module named 'torch'"}, T4, (13, 0), ["No module named 'torch'"]),
    ],
)
def test_a_gpu_that_torch_cannot_use_is_explained_with_the_build_to_install(
    report: dict[str, Any], device: CudaDevice, driver: tuple[int, int], named: list[str]
) -> None:
    blocker = interpret(report, device, driver).blocker
    assert bool(blocker) is bool(named)
    assert all(text in blocker for text in named), blocker


def test_a_failure_to_pin_memory_leaves_the_gpu_usable() -> None:
    support = interpret(CU130 | {"free": 7, "failed_step": "pinned", "failure": "out of memory"}, T4, (13, 0))
    assert (support.blocker, support.pinned_blocker, support.free_memory) == ("", "out of memory", 7)


@pytest.mark.parametrize(
    ("architectures", "capability", "runs"),
    [
        (["sm_80", "sm_86"], (8, 9), True),
        (["sm_86"], (8, 0), False),
        (["sm_120"], (12, 1), True),
        (["sm_90"], (10, 0), False),
        (["sm_90", "compute_90"], (10, 0), True),
        (["sm_90a"], (9, 0), True),
        (["sm_100a"], (10, 3), False),
        ([], (7, 0), True),
    ],
)
def test_kernels_run_on_later_minor_versions_of_their_architecture(
    architectures: list[str], capability: tuple[int, int], *, runs: bool
) -> None:
    assert has_kernels(architectures, capability) is runs


@pytest.mark.parametrize(
    ("capability", "driver", "named"),
    [
        ((12, 0), (12, 8), "CUDA 12.8"),
        ((6, 1), (13, 0), "CUDA 12.6"),
        ((8, 0), (11, 4), "update the NVIDIA driver"),
        ((3, 5), (13, 0), "another GPU"),
    ],
)
def test_the_build_to_install_suits_the_gpu_and_its_driver(
    capability: tuple[int, int], driver: tuple[int, int], named: str
) -> None:
    assert named in build_advice(capability, driver)


def test_the_probe_reports_the_build_of_torch_and_why_it_has_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    report = torch_support.run_probe({})
    assert report["torch"]
    assert report["failed_step"] == "initialization"
    assert report["failure"]
