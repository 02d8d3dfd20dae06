"""Reading a GPU often works, or says that there is none."""

import pytest

from infra.device.gpu import GpuMeter, find_visible_gpu


def test_a_machine_without_a_gpu_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert GpuMeter().read() is None


@pytest.mark.parametrize(
    ("visible", "handles"),
    [
        (None, [0, 1, None]),
        ("3,1", [3, 1, None]),
        (" GPU-8f6a , 0", ["GPU-8f6a", 0, None]),
        ("", [None, None, None]),
    ],
)
def test_the_gpus_of_a_process_are_those_that_it_may_see(visible: str | None, handles: list[int | str | None]) -> None:
    """NVML, here of a machine with two, knows nothing of the variable."""
    assert [find_visible_gpu(index, visible, 2) for index in range(3)] == handles


@pytest.mark.gpu
def test_a_gpu_reports_its_memory_and_never_less_energy() -> None:
    meter = GpuMeter()
    first, second = meter.read(), meter.read()
    assert first is not None
    assert second is not None
    assert first.memory is not None
    if first.joules is not None and second.joules is not None:
        assert first.joules <= second.joules
