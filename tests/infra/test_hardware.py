"""What a device can do is read from NVML and from the kernel, and is not guessed."""

from pathlib import Path

import pytest

from infra import hardware
from infra.gpu import GpuState
from infra.hardware import DeviceFacts, cpu_facts, device_facts


@pytest.mark.parametrize(
    ("capability", "facts"),
    [
        ((8, 0), DeviceFacts("cuda", "a GPU", (8, 0), bf16=True)),
        ((7, 5), DeviceFacts("cuda", "a GPU", (7, 5), bf16=False)),
        (None, DeviceFacts("cuda", "a GPU", (0, 0), bf16=False)),
    ],
)
def test_a_gpu_multiplies_bf16_from_ampere_on(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None, facts: DeviceFacts
) -> None:
    state = GpuState("a GPU", "570", 80 * 10**9, 0, None, (), None, None, None, None, capability=capability)
    monkeypatch.setattr(hardware, "read_gpu", lambda: state)
    assert device_facts() == facts


@pytest.mark.parametrize(
    ("flags", "bf16"),
    [("fpu avx512f avx512_bf16", True), ("fpu amx_tile", True), ("fpu avx2 avx512f", False), (None, False)],
)
def test_a_cpu_multiplies_bf16_where_the_kernel_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: str | None, bf16: bool
) -> None:
    monkeypatch.setattr(hardware, "Path", lambda _: tmp_path / "cpuinfo")
    monkeypatch.setattr(hardware, "read_gpu", lambda: None)
    if flags is not None:
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
    assert device_facts() == cpu_facts() == DeviceFacts("cpu", "cpu", bf16=bf16)
