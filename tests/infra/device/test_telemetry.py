"""What a machine does is read beside the work: seldom enough, without what is not there, and without ending it."""

import itertools
import time
from collections.abc import Iterator

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.device.downsampling import sampling_interval
from infra.device.gpu import GpuMeter, GpuReading
from infra.device.telemetry import POINTS_PER_INTERVAL, Energy, HostReader, Telemetry, gpu_metrics, prefix_node

CARD = GpuReading(97.0, 30 * 10**9, 690.0, 61, 1980, 0, 1000.0)
SILENT = GpuReading(None, None, None, None, None, None, None)


def points(begin: int, end: int) -> Iterator[int]:
    """The seconds of the points between two seconds of a run."""
    while (begin := begin + sampling_interval(begin, POINTS_PER_INTERVAL)) <= end:
        yield begin


def test_a_day_stays_under_ten_thousand_points() -> None:
    metrics = len(gpu_metrics(CARD)) + 4
    assert metrics == 12
    assert len(list(points(0, 3600))) == 354
    assert len(list(points(0, 86400))) * metrics == 7488
    assert list(points(0, 66)) == [*range(1, 61), 62, 64, 66]


@settings(max_examples=30)
@given(st.integers(0, 10**7), st.integers(0, 10**7))
def test_an_interval_is_short_against_the_run_and_a_resumed_run_has_no_more_points(begin: int, end: int) -> None:
    assert sampling_interval(begin, POINTS_PER_INTERVAL) <= begin / 60 + 1
    cut = len(list(points(0, min(begin, end)))) + len(list(points(min(begin, end), max(begin, end))))
    assert cut <= len(list(points(0, max(begin, end)))) + 1


def watched(
    monkeypatch: pytest.MonkeyPatch,
    seconds: float,
    begin: int = 0,
    host: HostReader | None = None,
    gpu: GpuMeter | None = None,
) -> list[tuple[int, dict[str, float]]]:
    """What is sent while this process works for ``seconds`` of a faster clock, which count as 20 times as many."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    sent: list[tuple[int, dict[str, float]]] = []
    points = Telemetry(lambda *point: sent.append(point), begin, period=0.05, host=host, gpu=gpu)
    with points:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            pass
    return sent


def test_points_count_on_and_have_the_numbers_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = watched(monkeypatch, 0.5, begin=180)
    seconds = [second for second, _ in sent]
    assert seconds == sorted(set(seconds))
    assert min(seconds) > 180
    assert all(b - a >= 4 for a, b in itertools.pairwise(seconds[:-1])), "four seconds a point, but for the rest"
    assert set().union(*(metrics for _, metrics in sent)) == {
        "system/worker_cpu_percent", "system/worker_memory_gb", "system/machine_cpu_percent",
        "system/machine_memory_percent",
    }, "and nothing about a GPU that is not there"  # fmt: skip
    _, last = sent[-1]
    assert last["system/worker_memory_gb"] == pytest.approx(psutil.Process().memory_info().rss / 1e9, rel=0.2)
    percent = [metrics.get("system/worker_cpu_percent", 0.0) for _, metrics in sent]
    assert max(percent) > 0, "the last point may be of milliseconds, and processor time is counted in hundredths"


def test_memory_is_in_units_of_ten_to_the_ninth_bytes() -> None:
    """As everywhere else, and not in GiB, which are 7% more."""
    read = HostReader().read(0.0)["system/worker_memory_gb"]
    assert read == pytest.approx(psutil.Process().memory_info().rss / 10**9, rel=0.03)


def test_what_was_read_since_the_last_point_is_sent_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """After twelve days, the next point is not due for hours."""
    assert sampling_interval(10**6, POINTS_PER_INTERVAL) > 8000
    ((second, metrics),) = watched(monkeypatch, 0.2, begin=10**6)
    assert 10**6 < second < 10**6 + 100
    assert metrics["system/worker_cpu_percent"] > 0


class PausedReader(HostReader):
    """The host's reader in a process that is stopped for a second at its second reading."""

    readings = 0

    def read(self, time_read: float) -> dict[str, float]:
        self.readings += 1
        if self.readings == 2:
            time.sleep(1.0)
        return super().read(time_read)


def test_after_a_pause_of_the_process_the_missed_readings_are_not_made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after SIGSTOP, or on a machine that was asleep."""
    host = PausedReader()
    watched(monkeypatch, 1.6, host=host)
    assert 2 < host.readings < 20, "1.6 s have 32 periods, of which 20 passed in the pause"


def test_means_are_those_of_the_readings_after_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with Telemetry(lambda second, metrics: None, period=0.02) as watched:
        middle = time.perf_counter() + 0.2
        while time.perf_counter() < middle + 0.2:
            pass
    watched._points = [
        (began, {name: [2 * sum_, 2 * count] for name, (sum_, count) in sums.items()} | {"new": [5.0, 2.0]})
        for began, sums in watched._points
    ]
    found = watched.averages_since(middle)
    assert found["new"] == 2.5
    assert found["system/processors"] == psutil.cpu_count()
    assert found["system/worker_memory_gb"] == pytest.approx(psutil.Process().memory_info().rss / 1e9, rel=0.2)
    first, *_ = watched._points
    assert set(watched.averages_since(first[0])) >= set(first[1])
    assert watched.averages_since(time.perf_counter()) == {}


class FailingReader(HostReader):
    """The host's reader, where every second reading fails."""

    calls = itertools.count()

    def read(self, time_read: float) -> dict[str, float]:
        if next(self.calls) % 2:
            raise OSError(24, "Too many open files")
        return super().read(time_read)


class LostGpu(GpuMeter):
    def read(self) -> GpuReading | None:
        raise RuntimeError("GPU is lost")


def test_what_cannot_be_read_is_left_out_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The /proc of a machine that is out of file descriptors, and a GPU that fell off the bus."""
    sent = watched(monkeypatch, 0.4, host=FailingReader(), gpu=LostGpu())
    assert any("system/machine_memory_percent" in metrics for _, metrics in sent)


def test_a_point_of_a_gpu_is_the_share_of_time_that_it_was_slowed_down() -> None:
    assert gpu_metrics(CARD) == {
        "system/gpu_utilization_percent": 97.0, "system/gpu_memory_gb": 30.0, "system/gpu_power_watts": 690.0,
        "system/gpu_temperature_celsius": 61.0, "system/gpu_sm_clock_mhz": 1980.0,
        "system/gpu_throttled_by_power_percent": 0.0, "system/gpu_throttled_by_heat_percent": 0.0,
        "system/gpu_throttled_by_hardware_percent": 0.0,
    }  # fmt: skip
    hot = gpu_metrics(GpuReading(1.0, 0, 1.0, 1, 1, 0x40 | 0x8, 1.0))
    assert [hot[f"system/gpu_throttled_by_{cause}_percent"] for cause in ("power", "heat", "hardware")] == [0, 100, 100]
    assert gpu_metrics(SILENT) == {}


def test_energy_is_that_of_the_time_in_question() -> None:
    """300 W for ten seconds, then 700 W."""
    energy, joules = Energy(), 5000.0
    for second in range(31):
        watts = 300.0 if second <= 10 else 700.0
        joules += watts * (second > 0)
        energy.add(second, GpuReading(None, None, watts, None, None, None, joules))
        if second % 2 == 0:
            energy.checkpoint()
    assert energy.joules_between(12.0, 25.5) == pytest.approx(13.5 * 700)
    assert energy.joules_between(2.0, 10.0) == pytest.approx(8 * 300)
    assert energy.joules_between(10.0, 12.0) == pytest.approx(2 * 700)
    assert energy.joules_between(40.0, 50.0) is None
    nothing = Energy()
    nothing.add(1.0, SILENT)
    assert nothing.joules_between(0.0, 1.0) is None


def test_metrics_of_several_machines_are_named_after_them_as_mlflows_own_are() -> None:
    assert prefix_node("w2", {"system/gpu_power_watts": 690.0}) == {"system/w2/gpu_power_watts": 690.0}
