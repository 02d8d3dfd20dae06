"""State of a GPU as reported by NVML: name, memory by process, clocks. Only this file imports pynvml.

On a machine without a GPU or a driver, the functions return None.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass

import pynvml


@dataclass(frozen=True)
class GpuState:
    """State of one GPU. Memory is in bytes, clocks in MHz, power in watts, and temperature in Celsius."""

    name: str
    driver: str
    memory_total: int
    memory_used: int
    process_memory: int | None
    """Bytes in use by this process; None where the driver does not report them, as in many containers."""
    other_processes: tuple[int, ...]
    """Ids of the other processes that use the GPU."""
    sm_clock: int | None
    power_limit: float | None
    temperature: int | None
    throttle_reasons: int | None
    """NVML's bit mask of reasons for lowered clocks; 0 means full clocks, and 1 means an idle GPU."""
    ecc: bool | None = None
    """Whether memory errors are corrected."""
    capability: tuple[int, int] | None = None
    """CUDA compute capability, such as (8, 0) for an A100."""


def read_gpu(index: int = 0) -> GpuState | None:
    """Read the state of GPU ``index`` of those visible to this process; return None if there is no such GPU."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        handle = _find_handle(index)
        if handle is None:
            return None
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        processes = _read_or_none(pynvml.nvmlDeviceGetComputeRunningProcesses, handle) or []
        own_memory = [p.usedGpuMemory for p in processes if p.pid == os.getpid()]
        return GpuState(
            name=_decode(pynvml.nvmlDeviceGetName(handle)),
            driver=_decode(pynvml.nvmlSystemGetDriverVersion()),
            memory_total=int(memory.total),
            memory_used=int(memory.used),
            process_memory=int(own_memory[0]) if own_memory and own_memory[0] else None,
            other_processes=tuple(p.pid for p in processes if p.pid != os.getpid()),
            sm_clock=_read_or_none(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_SM),
            power_limit=_from_thousandths(_read_or_none(pynvml.nvmlDeviceGetEnforcedPowerLimit, handle)),
            temperature=_read_or_none(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU),
            throttle_reasons=_read_or_none(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle),
            ecc=_parse_mode(_read_or_none(pynvml.nvmlDeviceGetEccMode, handle)),
            capability=_parse_capability(_read_or_none(pynvml.nvmlDeviceGetCudaComputeCapability, handle)),
        )
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


@dataclass(frozen=True)
class GpuReading:
    """One of many readings of a GPU; a value is None if the board, its driver or the container does not report it."""

    utilization: float | None
    """Percentage of the time since the last reading in which a kernel ran."""
    memory: int | None
    """Bytes in use by all processes."""
    watts: float | None
    celsius: int | None
    sm_clock: int | None
    """Clock of the streaming multiprocessors in MHz."""
    throttle_reasons: int | None
    """NVML's bit mask of reasons for lowered clocks, as in :class:`GpuState`."""
    joules: float | None
    """Energy in joules used since the driver was loaded."""


class GpuMeter:
    """Frequent readings of this machine's first visible GPU, with NVML kept open and only cheap values read."""

    def __init__(self) -> None:
        self._handle = None
        try:
            pynvml.nvmlInit()
            self._handle = _find_handle(0)
        except (pynvml.NVMLError, ValueError):  # The driver is missing, or CUDA_VISIBLE_DEVICES is invalid.
            return

    def read(self) -> GpuReading | None:
        """Read the GPU; return None if there is none."""
        handle = self._handle
        if handle is None:
            return None
        utilization = _read_or_none(pynvml.nvmlDeviceGetUtilizationRates, handle)
        memory = _read_or_none(pynvml.nvmlDeviceGetMemoryInfo, handle)
        return GpuReading(
            utilization=None if utilization is None else float(utilization.gpu),
            memory=None if memory is None else int(memory.used),
            watts=_from_thousandths(_read_or_none(pynvml.nvmlDeviceGetPowerUsage, handle)),
            celsius=_read_or_none(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU),
            sm_clock=_read_or_none(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_SM),
            throttle_reasons=_read_or_none(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle),
            joules=_from_thousandths(_read_or_none(pynvml.nvmlDeviceGetTotalEnergyConsumption, handle)),
        )


def _find_handle(index: int):
    name = find_visible_gpu(index, os.environ.get("CUDA_VISIBLE_DEVICES"), pynvml.nvmlDeviceGetCount())
    if name is None:
        return None
    return pynvml.nvmlDeviceGetHandleByIndex(name) if isinstance(name, int) else pynvml.nvmlDeviceGetHandleByUUID(name)


def find_visible_gpu(index: int, visible: str | None, count: int) -> int | str | None:
    """Return NVML's index or UUID of this process's device ``index``; None if there is no such device.

    NVML ignores CUDA_VISIBLE_DEVICES. ``visible`` is the value of that variable, None if it is not set; ``count`` is
    the number of GPUs in NVML.
    """
    if visible is None:
        return index if index < count else None
    names = [name.strip() for name in visible.split(",") if name.strip()]  # An empty variable hides every GPU.
    if index >= len(names):
        return None
    return int(names[index]) if names[index].isdigit() else names[index]


def _read_or_none(read, *arguments):
    """Read one value; return None if the board or container does not report it, so that the others are still read."""
    try:
        return read(*arguments)
    except pynvml.NVMLError:
        return None


def _parse_mode(modes: list[int] | None) -> bool | None:
    return None if modes is None else bool(modes[0])  # The first mode is the current one, the second the next boot's.


def _parse_capability(version: Sequence[int] | None) -> tuple[int, int] | None:
    return None if version is None else (int(version[0]), int(version[1]))


def _from_thousandths(thousandths: int | None) -> float | None:
    return None if thousandths is None else thousandths / 1000


def _decode(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
