"""Telemetry of a machine while it trains: its GPU, and CPU time and memory of this process and of the machine.

A thread reads NVML and psutil once a second. It sends points, each the mean over an interval, as metrics
``system/...``, which MLflow shows in a separate tab. It also records the GPU's energy. A value that cannot be read is
omitted and tried again, because a failure of telemetry must not end the training.
"""

import threading
import time
from collections.abc import Callable
from typing import Self

import numpy as np
import psutil

from infra.cli.units import GB
from infra.device.downsampling import sampling_interval
from infra.device.gpu import GpuMeter, GpuReading

READING_PERIOD_SECONDS = 1.0
"""Seconds between two readings."""

POINTS_PER_INTERVAL = 60
"""Points after which the interval doubles from 1 s; an hour has 354 points of each metric, and a day 624."""

THROTTLE_BITS = {"power": 0x84, "heat": 0x60, "hardware": 0x8}
"""Bits of NVML's throttle reasons by cause.

- power: the power limit (software's cap) or the power supply (power brake)
- heat: software's or hardware's thermal slowdown
- hardware: hardware's slowdown, which is caused by heat or by the power supply
"""


def prefix_node(name: str, metrics: dict[str, float]) -> dict[str, float]:
    """Return ``metrics`` named ``system/NAME/...`` with the machine's ``name``, like MLflow's own system metrics."""
    return {metric.replace("system/", f"system/{name}/", 1): value for metric, value in metrics.items()}


class Telemetry:
    """Background readings of this process's machine until :meth:`stop`, or until the ``with`` block ends.

    Args:
        send: called on the background thread with the second and the metrics of each point.
        second: second at which to continue the count, for a resumed run.
        period: seconds between two readings.
        host: reader of CPU time and memory; by default of this process.
        gpu: meter of the GPU; by default of the first visible one.
    """

    def __init__(
        self,
        send: Callable[[int, dict[str, float]], object],
        second: int = 0,
        *,
        period: float = READING_PERIOD_SECONDS,
        host: "HostReader | None" = None,
        gpu: GpuMeter | None = None,
    ) -> None:
        self._send = send
        self._last_second = second
        self._period = period
        self._host = host or HostReader()
        self._gpu = gpu or GpuMeter()
        self._energy = Energy()
        self._points: list[tuple[float, dict[str, list[float]]]] = []
        """(time of the first reading, (sum, number) of the readings by metric) of each point."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="telemetry", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Send the mean of the readings since the last point, and stop reading."""
        self._ended.set()
        self._thread.join()

    def joules(self, since: float, until: float) -> float | None:
        """Return the GPU's energy in joules between two times of ``time.perf_counter``; None if unknown."""
        return self._energy.joules_between(since, until)

    def averages_since(self, since: float) -> dict[str, float]:
        """Return the mean of each metric over the points that began after ``since``, a time of ``time.perf_counter``.

        The result also has the number of processors. It is empty if no point began after ``since``.
        """
        totals: dict[str, list[float]] = {}
        for start, sums in self._points:
            if start >= since:
                for name, (total, count) in sums.items():
                    old_total, old_count = totals.get(name, (0.0, 0.0))
                    totals[name] = [old_total + total, old_count + count]
        averages = {name: total / count for name, (total, count) in totals.items()}
        return averages | {"system/processors": float(psutil.cpu_count() or 1)} if averages else {}

    def _watch(self) -> None:
        start_time, start_second = time.perf_counter(), self._last_second
        next_reading = point_start = start_time
        readings: dict[str, list[float]] = {}
        while True:
            is_ended = self._ended.wait(max(0.0, next_reading - time.perf_counter()))
            time_read = time.perf_counter()
            next_reading = max(next_reading + self._period, time_read)  # A paused process must not catch up.
            second = start_second + round((time_read - start_time) / self._period)
            point_start = point_start if readings else time_read
            for name, value in self._read(time_read).items():
                readings.setdefault(name, []).append(value)
            seconds_since_point = second - self._last_second
            is_full = seconds_since_point >= sampling_interval(self._last_second, POINTS_PER_INTERVAL)
            if is_full or (is_ended and seconds_since_point > 0):
                self._last_second = second
                self._energy.checkpoint()
                sums = {name: [sum(values), len(values)] for name, values in readings.items()}
                self._points.append((point_start, sums))
                self._send(second, {name: total / count for name, (total, count) in sums.items()})
                readings.clear()
            if is_ended:
                self._energy.checkpoint()
                return

    def _read(self, time_read: float) -> dict[str, float]:
        values: dict[str, float] = {}
        try:
            values |= self._host.read(time_read)
        except Exception:  # noqa: BLE001 a hidden /proc or a lack of file descriptors must not end the training
            values.clear()
        try:
            reading = self._gpu.read()
            if reading is not None:
                self._energy.add(time_read, reading)
                values |= gpu_metrics(reading)
        except Exception:  # noqa: BLE001 a GPU that has fallen off the bus must not end the training here
            return values
        return values


class HostReader:
    """Reader of the CPU time and memory of this process and of the machine."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._previous: tuple[float, float] | None = None

    def read(self, time_read: float) -> dict[str, float]:
        """Read metrics at ``time_read``: memory, and the percentage of CPU time since the last reading."""
        values = {
            "system/worker_memory_gb": self._process.memory_info().rss / GB,
            "system/machine_memory_percent": psutil.virtual_memory().percent,
        }
        times, machine_percent = self._process.cpu_times(), psutil.cpu_percent()
        cpu_seconds = times.user + times.system
        if self._previous is not None and time_read > self._previous[0]:
            previous_time, previous_cpu_seconds = self._previous
            cores_used = (cpu_seconds - previous_cpu_seconds) / (time_read - previous_time)
            values["system/worker_cpu_percent"] = 100 * cores_used
            values["system/machine_cpu_percent"] = machine_percent
        self._previous = time_read, cpu_seconds
        return values


def gpu_metrics(reading: GpuReading) -> dict[str, float]:
    """Return the metrics of one reading; the mean of a throttling metric is the percentage of time throttled."""
    metrics = {
        "system/gpu_utilization_percent": reading.utilization,
        "system/gpu_memory_gb": None if reading.memory is None else reading.memory / GB,
        "system/gpu_power_watts": reading.watts,
        "system/gpu_temperature_celsius": reading.celsius,
        "system/gpu_sm_clock_mhz": reading.sm_clock,
    }
    if reading.throttle_reasons is not None:
        for cause, bits in THROTTLE_BITS.items():
            metrics[f"system/gpu_throttled_by_{cause}_percent"] = 100.0 * bool(reading.throttle_reasons & bits)
    return {name: float(value) for name, value in metrics.items() if value is not None}


class Energy:
    """Energy of a GPU over time, from NVML's counter, which all boards since Volta have."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._joules: list[float] = []
        self._latest: tuple[float, float] | None = None

    def add(self, time_read: float, reading: GpuReading) -> None:
        """Record a reading as the latest one; the first reading also becomes a checkpoint."""
        if reading.joules is not None:
            self._latest = time_read, reading.joules
            if not self._times:
                self.checkpoint()

    def checkpoint(self) -> None:
        """Store the latest reading. One per point is enough, because energies between them are interpolated."""
        if self._latest is not None and self._latest[0] not in self._times[-1:]:
            self._times.append(self._latest[0])
            self._joules.append(self._latest[1])

    def joules_between(self, since: float, until: float) -> float | None:
        """Return the joules between two times; None if both are before the first or after the last reading."""
        if len(self._times) < 2 or since >= until or until <= self._times[0] or since >= self._times[-1]:
            return None
        start, end = np.interp([since, until], self._times, self._joules)
        return float(end - start)
