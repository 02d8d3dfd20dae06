"""Reading a GPU often works, or says that there is none."""

import pytest

from infra.device.gpu import GpuMeter


def test_a_machine_without_a_gpu_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert GpuMeter().read() is None


@pytest.mark.gpu
def test_a_gpu_reports_its_memory_and_never_less_energy() -> None:
    meter = GpuMeter()
    first, second = meter.read(), meter.read()
    assert first is not None
    assert second is not None
    assert first.memory is not None
    if first.joules is not None and second.joules is not None:
        assert first.joules <= second.joules
