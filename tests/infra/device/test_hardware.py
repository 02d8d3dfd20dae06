"""What a device can do is read from NVML and from the kernel, and is not guessed."""

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from infra.device.cuda import CudaDevice, CudaDriver, read_driver
from infra.device.gpu import GpuState
from infra.device.hardware import (
    DeviceInfo,
    combine_gpus,
    cpu_info,
    examine_device,
    find_compile_blocker,
    gpu_info,
    worker_gpus_info,
)
from infra.device.torch_support import TorchSupport


@pytest.mark.parametrize(
    ("capability", "facts"),
    [
        ((8, 0), DeviceInfo("cuda", "a GPU", (8, 0), bf16=True)),
        ((7, 5), DeviceInfo("cuda", "a GPU", (7, 5), bf16=False)),
        (None, DeviceInfo("cuda", "a GPU", (0, 0), bf16=False)),
    ],
)
def test_a_gpu_multiplies_bf16_from_ampere_on(capability: tuple[int, int] | None, facts: DeviceInfo) -> None:
    state = GpuState("a GPU", "570", 80 * 10**9, 0, None, (), None, None, None, None, capability=capability)
    assert gpu_info(state) == facts


@pytest.mark.parametrize(
    ("flags", "bf16"),
    [("fpu avx512f avx512_bf16", True), ("fpu amx_tile", True), ("fpu avx2 avx512f", False), (None, False)],
)
def test_a_cpu_multiplies_bf16_where_the_kernel_says_so(tmp_path: Path, flags: str | None, bf16: bool) -> None:
    if flags is not None:
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
    assert cpu_info(tmp_path / "cpuinfo") == DeviceInfo("cpu", "cpu", bf16=bf16)


def test_what_others_use_of_a_gpu_is_not_free() -> None:
    state = GpuState("a GPU", "570", 80 * 10**9, 30 * 10**9, 10 * 10**9, (7,), None, None, None, None)
    info = gpu_info(state)
    assert info.memory == 60 * 10**9, "what this process holds itself it can use"
    assert info.with_memory_limit(40 * 10**9).memory == 40 * 10**9
    assert info.with_memory_limit(70 * 10**9).memory == info.with_memory_limit(None).memory == 60 * 10**9


def test_without_nvml_the_free_memory_is_what_torch_reported() -> None:
    state = GpuState("a GPU", None, 80 * 10**9, None, None, (), None, None, None, None, nvml_failure="Not Supported")
    info = gpu_info(state, TorchSupport(free_memory=70 * 10**9))
    assert (info.memory, info.nvml_failure) == (70 * 10**9, "Not Supported")
    assert gpu_info(state).memory == 80 * 10**9


def test_memory_is_capped_where_it_would_be_taken_from_the_host() -> None:
    state = GpuState("a GPU", "570", 2**50, 0, None, (), None, None, None, None)
    assert not gpu_info(state).memory_cap_reason
    assert "WSL2" in gpu_info(state, is_wsl=True).memory_cap_reason
    shared = gpu_info(replace(state, is_integrated=True))
    assert "host" in shared.memory_cap_reason
    assert shared.memory < 2**50, "what the host has free"


@pytest.mark.parametrize(
    ("visible", "named"), [("", "hides all GPUs"), ("-1", "hides all GPUs"), (None, "NVIDIA driver")]
)
def test_a_machine_without_a_gpu_says_why(monkeypatch: pytest.MonkeyPatch, visible: str | None, named: str) -> None:
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
        if read_driver().devices:
            pytest.skip("there is a GPU")
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    state, info = examine_device()
    assert state is None
    assert named in info.gpu_absence
    assert not info.gpu_blocker


@pytest.mark.parametrize(
    ("triton", "programs", "capability", "named"),
    [
        ("", ("gcc",), (8, 0), ""),
        ("", ("clang",), (7, 0), ""),
        (None, ("gcc",), (8, 0), "Triton is not installed; run 'pip install triton'"),
        ("import libtriton_that_is_missing", ("gcc",), (8, 0), "cannot be imported .*libtriton_that_is_missing"),
        ("raise OSError('libcuda.so')", ("gcc",), (8, 0), r"cannot be imported \(libcuda.so\)"),
        ("", ("c++",), (8, 0), "install gcc"),
        ("", ("gcc",), (6, 1), "compute capability 7.0"),
    ],
)
def test_what_compiling_for_a_gpu_lacks_is_named(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    triton: str | None,
    programs: tuple[str, ...],
    capability: tuple[int, int],
    named: str,
) -> None:
    for program in programs:
        (tmp_path / program).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    headers = tmp_path / "include"
    headers.mkdir()
    (headers / "Python.h").touch()
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    if triton is None:
        monkeypatch.setitem(sys.modules, "triton", None)  # as if it were not installed
    else:
        (tmp_path / "triton.py").write_text(triton)
    reason = find_compile_blocker(capability, headers)
    assert re.search(named, reason) if named else not reason
    (headers / "Python.h").unlink()
    assert find_compile_blocker(capability, headers) == (
        reason or "the Python headers are missing; install python3-dev"
    )
    sys.modules.pop("triton", None)


def test_a_cpu_compiles_with_a_cpp_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert "install g++" in cpu_info().compile_blocker
    (tmp_path / "g++").touch(mode=0o755)
    assert not cpu_info().compile_blocker


SMALL = CudaDevice("NVIDIA GeForce RTX 3060", "3060aaaa-0000-4000-8000-000000000000", (8, 6), 12 * 10**9, False)
LARGE = CudaDevice("NVIDIA GeForce RTX 3090", "3090bbbb-0000-4000-8000-000000000000", (8, 6), 24 * 10**9, False)
OLD = CudaDevice("Tesla V100-SXM2-16GB", "0000cccc-0000-4000-8000-000000000000", (7, 0), 16 * 10**9, False)


def try_torch(device: CudaDevice, version: tuple[int, int], **options: bool) -> TorchSupport:
    """Torch as it is built for CUDA 13."""
    return TorchSupport("torch has no kernels for it. Install another build" if device.capability < (7, 5) else "")


@pytest.mark.parametrize(
    ("devices", "blocker", "note"),
    [
        ((LARGE, SMALL), "", ""),
        ((SMALL, SMALL), "", ""),
        (
            (SMALL, LARGE),
            "",
            "RTX 3060 with 12.0 GB is used; CUDA_VISIBLE_DEVICES=GPU-3090bbbb selects .* with 24.0 GB",
        ),
        ((OLD,), "Install another build$", ""),
        ((OLD, OLD), "Install another build$", ""),
        ((OLD, SMALL), "Install another build, or use .* RTX 3060 with CUDA_VISIBLE_DEVICES=GPU-3060aaaa$", ""),
        ((SMALL, OLD), "", "CUDA_VISIBLE_DEVICES=GPU-0000cccc selects Tesla V100"),
    ],
)
def test_a_machines_other_gpu_is_named_where_it_is_larger_or_the_only_usable_one(
    devices: tuple[CudaDevice, ...], blocker: str, note: str
) -> None:
    state, info = examine_device(CudaDriver(devices, (13, 0)), try_torch)
    assert state
    assert state.name == info.name == devices[0].name
    assert re.search(blocker or "^$", info.gpu_blocker)
    assert re.search(note or "^$", info.gpu_note)


def test_several_workers_train_on_what_all_their_gpus_support() -> None:
    both = worker_gpus_info(2, CudaDriver((LARGE, SMALL), (13, 0)), try_torch)
    assert (both.name, both.memory) == (SMALL.name, SMALL.memory)
    assert "limits the micro-batch" in both.gpu_note
    assert "2 GPUs" in both.gpu_note
    alike = worker_gpus_info(2, CudaDriver((SMALL, SMALL, LARGE), (13, 0)), try_torch)
    assert (alike.memory, alike.gpu_note) == (SMALL.memory, "")
    blocked = worker_gpus_info(2, CudaDriver((LARGE, OLD), (13, 0)), try_torch)
    assert blocked.name == OLD.name
    assert "CUDA_VISIBLE_DEVICES" in blocked.gpu_blocker
    t4, a100 = (DeviceInfo("cuda", "a GPU", c, bf16=c >= (8, 0), memory=10) for c in ((7, 5), (8, 0)))
    mixed = combine_gpus([a100, replace(t4, compile_blocker="no gcc")])
    assert (mixed.capability, mixed.bf16, mixed.compile_blocker) == ((7, 5), False, "no gcc")
