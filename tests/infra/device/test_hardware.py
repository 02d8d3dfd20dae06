"""What a device can do is read from NVML and from the kernel, and is not guessed."""

import re
import sys
from pathlib import Path

import pytest

from infra.device.gpu import GpuState
from infra.device.hardware import DeviceInfo, cpu_info, find_compile_blocker, gpu_info


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
