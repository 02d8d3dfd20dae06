"""State of a GPU by CUDA and, for memory by process, clocks and power, by NVML. Only this file imports pynvml.

NVML is refused in some containers, and does not support every GPU: each value that it does not report is None. It
counts GPUs in another order than CUDA and ignores CUDA_VISIBLE_DEVICES, so a GPU is looked up by its UUID.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pynvml

from infra.cli.units import GB
from infra.device.cuda import CudaDevice, CudaDriver, read_driver


@dataclass(frozen=True)
class GpuState:
    """State of one GPU. Memory is in bytes, clocks in MHz, power in watts, and temperature in Celsius."""

    name: str
    driver: str | None
    memory_total: int
    memory_used: int | None
    """Bytes in use by all processes."""
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
    is_integrated: bool = False
    """Whether the GPU shares the host's memory."""
    nvml_failure: str = ""
    """Reason why NVML does not report the memory in use; empty if it does."""


def read_gpu(index: int = 0, read_driver: Callable[[], CudaDriver] = read_driver) -> GpuState | None:
    """Read the state of CUDA's device ``index`` in this process; return None if there is no such GPU."""
    devices = read_driver().devices
    return gpu_state(devices[index]) if index < len(devices) else None


def gpu_state(device: CudaDevice) -> GpuState:
    """Read what NVML adds to the properties of ``device``."""
    values: dict[str, Any] = dict.fromkeys(("driver", "memory_used", "process_memory", *_OPTIONAL_VALUES))
    values["other_processes"] = ()
    failure = ""
    try:
        pynvml.nvmlInit()
        try:
            handle = _find_handle(device)
            values |= _read_values(handle)
            values["memory_used"] = int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        failure = str(error)
    return GpuState(
        name=device.name, memory_total=device.memory, capability=device.capability, is_integrated=device.is_integrated,
        nvml_failure=failure, **values,
    )  # fmt: skip


_OPTIONAL_VALUES: dict[str, Callable[[Any], Any]] = {
    "driver": lambda handle: _decode(pynvml.nvmlSystemGetDriverVersion()),
    "sm_clock": lambda handle: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
    "power_limit": lambda handle: pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000,
    "temperature": lambda handle: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
    "throttle_reasons": lambda handle: pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
    "ecc": lambda handle: bool(pynvml.nvmlDeviceGetEccMode(handle)[0]),  # The second mode is the next boot's.
}
"""Readers of the values that a GPU, its driver or a container may not report."""


def _read_values(handle: Any) -> dict[str, Any]:
    values = {name: _read_or_none(read, handle) for name, read in _OPTIONAL_VALUES.items()}
    processes = _read_or_none(pynvml.nvmlDeviceGetComputeRunningProcesses, handle) or []
    own_memory = [process.usedGpuMemory for process in processes if process.pid == os.getpid()]
    values["process_memory"] = int(own_memory[0]) if own_memory and own_memory[0] else None
    values["other_processes"] = tuple(process.pid for process in processes if process.pid != os.getpid())
    return values


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
        devices = read_driver().devices
        if not devices:
            return
        try:
            pynvml.nvmlInit()
            self._handle = _find_handle(devices[0])
        except pynvml.NVMLError:
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


def list_gpus() -> list[str]:
    """Return the name and memory of all GPUs that NVML reports, also of those that are hidden from this process."""
    try:
        pynvml.nvmlInit()
        try:
            handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
            names = [_decode(pynvml.nvmlDeviceGetName(handle)) for handle in handles]
            totals = [_read_or_none(pynvml.nvmlDeviceGetMemoryInfo, handle) for handle in handles]
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return []
    sizes = [f" {int(memory.total) / GB:.0f} GB" if memory else "" for memory in totals]
    return [name + size for name, size in zip(names, sizes, strict=True)]


def _find_handle(device: CudaDevice) -> Any:
    """Return NVML's handle of ``device``."""
    return pynvml.nvmlDeviceGetHandleByUUID(device.full_uuid)


def _read_or_none(read, *arguments):
    """Read one value; return None if the board or container does not report it, so that the others are still read."""
    try:
        return read(*arguments)
    except pynvml.NVMLError:
        return None


def _from_thousandths(thousandths: int | None) -> float | None:
    return None if thousandths is None else thousandths / 1000


def _decode(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
