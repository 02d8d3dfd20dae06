"""What a machine does while it trains: its GPU, and the processor and memory of this process and of the machine.

In: readings of NVML and psutil, once a second, on a thread of its own. Out: points, each the mean over an interval, as
metrics ``system/...``, which MLflow shows in a tab of their own; and the GPU's energy. What cannot be
read is left out and tried again: nothing here may end the work that it watches.
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

PERIOD = 1.0
"""Seconds between two readings."""

POINTS = 60
"""Points of each length of the interval, 1 s at first: an hour has 354 points of each metric, a day 624."""

THROTTLED = {"power": 0x84, "heat": 0x60, "hardware": 0x8}
"""NVML's reasons for lowered clocks, by what one would change: the power limit or supply (software's cap, power brake),
cooling (software's and hardware's thermal slowdown); or hardware's slowdown, which has one of these causes."""


def prefix_node(name: str, metrics: dict[str, float]) -> dict[str, float]:
    """``metrics`` under names with that of their machine, as MLflow's own system metrics have it where there are
    several: ``system/NAME/...``."""
    return {metric.replace("system/", f"system/{name}/", 1): value for metric, value in metrics.items()}


class Telemetry:
    """Reads this process's machine in the background until :meth:`stop`, or while its block runs.

    ``send`` is called on the thread with each point's second and metrics. Seconds count on from ``second``, for a run
    that an earlier process has begun. A second has one reading, of the ``host`` and of its GPU.
    """

    def __init__(
        self,
        send: Callable[[int, dict[str, float]], object],
        second: int = 0,
        *,
        period: float = PERIOD,
        host: "HostReader | None" = None,
        gpu: GpuMeter | None = None,
    ) -> None:
        self._send = send
        self._last = second
        self._period = period
        self._host = host or HostReader()
        self._gpu = gpu or GpuMeter()
        self._energy = Energy()
        self._points: list[tuple[float, dict[str, list[float]]]] = []
        """When each point's first reading was taken, and the sum and number of its readings."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="telemetry", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Send what has been read since the last point, and read no more."""
        self._ended.set()
        self._thread.join()

    def joules(self, since: float, until: float) -> float | None:
        """Energy of the GPU between two times of ``time.perf_counter``; None where it is not known."""
        return self._energy.between(since, until)

    def averages_since(self, since: float) -> dict[str, float]:
        """The mean of each metric after a time of ``time.perf_counter``, and the number of processors.

        Of whole points, until :meth:`stop`; empty when none began after that time.
        """
        readings: dict[str, list[float]] = {}
        for began, sums in self._points:
            if began >= since:
                for name, (total, count) in sums.items():
                    so_far = readings.setdefault(name, [0.0, 0.0])
                    readings[name] = [so_far[0] + total, so_far[1] + count]
        averages = {name: total / count for name, (total, count) in readings.items()}
        return averages | {"system/processors": float(psutil.cpu_count() or 1)} if averages else {}

    def _watch(self) -> None:
        began, first = time.perf_counter(), self._last
        due, sums, opened = began, dict[str, list[float]](), began
        while True:
            ended = self._ended.wait(max(0.0, due - time.perf_counter()))
            now = time.perf_counter()
            due = max(due + self._period, now)  # after a pause of the process, not once for every second of it
            second = first + round((now - began) / self._period)
            opened = opened if sums else now
            for name, value in self._read(now).items():
                sums.setdefault(name, []).append(value)
            if second - self._last >= sampling_interval(self._last, POINTS) or (ended and second > self._last):
                self._last = second
                self._energy.checkpoint()
                self._points.append((opened, {name: [sum(values), len(values)] for name, values in sums.items()}))
                self._send(second, {name: sum(values) / len(values) for name, values in sums.items()})
                sums.clear()
            if ended:
                self._energy.checkpoint()
                return

    def _read(self, now: float) -> dict[str, float]:
        values: dict[str, float] = {}
        try:
            values |= self._host.read(now)
        except Exception:  # noqa: BLE001 /proc may be hidden or a process may be out of files: the run continues
            values.clear()
        try:
            reading = self._gpu.read()
            if reading is not None:
                self._energy.add(now, reading)
                values |= gpu_metrics(reading)
        except Exception:  # noqa: BLE001 a GPU that has fallen off the bus raises where it did not before
            return values
        return values


class HostReader:
    """The processor time and memory of this process and of the machine."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._previous: tuple[float, float] | None = None

    def read(self, now: float) -> dict[str, float]:
        """Metrics at ``now``: memory, and the share of processor time since the last reading."""
        values = {
            "system/worker_memory_gb": self._process.memory_info().rss / GB,
            "system/machine_memory_percent": psutil.virtual_memory().percent,
        }
        times, machine = self._process.cpu_times(), psutil.cpu_percent()
        used = times.user + times.system
        if self._previous is not None and now > self._previous[0]:
            previous_time, then = self._previous
            values["system/worker_cpu_percent"] = 100 * (used - then) / (now - previous_time)  # of one core
            values["system/machine_cpu_percent"] = machine
        self._previous = now, used
        return values


def gpu_metrics(reading: GpuReading) -> dict[str, float]:
    """The metrics of one reading; the mean of those about throttling is a share of time, in percent."""
    metrics = {
        "system/gpu_utilization_percent": reading.utilization,
        "system/gpu_memory_gb": None if reading.memory is None else reading.memory / GB,
        "system/gpu_power_watts": reading.watts,
        "system/gpu_temperature_celsius": reading.celsius,
        "system/gpu_sm_clock_mhz": reading.sm_clock,
    }
    if reading.throttle_reasons is not None:
        for cause, bits in THROTTLED.items():
            metrics[f"system/gpu_throttled_by_{cause}_percent"] = 100.0 * bool(reading.throttle_reasons & bits)
    return {name: float(value) for name, value in metrics.items() if value is not None}


class Energy:
    """The energy of a GPU over time, by NVML's counter, which all boards since Volta have."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._joules: list[float] = []
        self._latest: tuple[float, float] | None = None

    def add(self, now: float, reading: GpuReading) -> None:
        """Take a reading; the first one is kept."""
        if reading.joules is not None:
            self._latest = now, reading.joules
            if not self._times:
                self.checkpoint()

    def checkpoint(self) -> None:
        """Keep the latest reading: as many as there are points are enough to interpolate between."""
        if self._latest is not None and self._latest[0] not in self._times[-1:]:
            self._times.append(self._latest[0])
            self._joules.append(self._latest[1])

    def between(self, since: float, until: float) -> float | None:
        """Joules between two times, which were not both before or both after the readings; None if that is so."""
        if len(self._times) < 2 or since >= until or until <= self._times[0] or since >= self._times[-1]:
            return None
        start, end = np.interp([since, until], self._times, self._joules)
        return float(end - start)
