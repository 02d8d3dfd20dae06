"""GPUs as CUDA's driver reports them, which decides whether this process has one. Only this file calls the driver.

The documented functions used here create no context, which would take half a GB of the GPU in every process that asks.
The driver reads CUDA_VISIBLE_DEVICES once in a process, and knows indices, abbreviated UUIDs and UUIDs of MIG slices.
"""

import ctypes
import os
import uuid
from dataclasses import dataclass
from functools import cache

LIBRARY = "libcuda.so.1"
"""The driver's library, which CUDA's own runtime loads, too."""

_NAME_BYTES = 256
_NO_DEVICE, _STUB_LIBRARY = 100, 34
"""Results of CUDA without a device, and of the stub for building without a driver."""
_MAJOR, _MINOR, _INTEGRATED = 75, 76, 18
"""Numbers of CUDA's device attributes: compute capability, and whether the GPU shares the host's memory."""


@dataclass(frozen=True)
class CudaDevice:
    """A GPU that this process may use."""

    name: str
    uuid: str
    """UUID without the prefix GPU- or MIG-."""
    capability: tuple[int, int]
    """Compute capability, such as (8, 0) for an A100."""
    memory: int
    """Bytes of memory in total."""
    is_integrated: bool
    """Whether the GPU shares the host's memory."""

    @property
    def full_uuid(self) -> str:
        """UUID with the prefix of a GPU or a MIG slice, which NVML and CUDA_VISIBLE_DEVICES know."""
        return f"{'MIG' if ' MIG ' in self.name else 'GPU'}-{self.uuid}"

    @property
    def setting(self) -> str:
        """Environment variable that selects this GPU alone; CUDA only knows the whole UUID of a MIG slice."""
        uuid = self.full_uuid
        return f"CUDA_VISIBLE_DEVICES={uuid if uuid.startswith('MIG') else uuid[: len('GPU-00000000')]}"


@dataclass(frozen=True)
class CudaDriver:
    """State of CUDA in this process."""

    devices: tuple[CudaDevice, ...] = ()
    version: tuple[int, int] = (0, 0)
    """Newest version of CUDA that the driver supports; (0, 0) without a driver."""
    absence: str = ""
    """Reason why this process has no GPU; empty if it has one."""
    is_broken: bool = False
    """Whether the reason is an error rather than a machine without a GPU, or one whose GPUs were hidden on purpose."""


def read_driver() -> CudaDriver:
    """Read the GPUs that this process may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        value = visible.strip() or "no value"
        return CudaDriver(absence=f"CUDA_VISIBLE_DEVICES has {value}, which hides all GPUs")
    driver = _load()
    if driver is None:
        return CudaDriver(absence=f"there is no NVIDIA driver ({LIBRARY} is missing)")
    version = ctypes.c_int(0)
    driver.cuDriverGetVersion(ctypes.byref(version))
    supported = version.value // 1000, version.value % 1000 // 10
    if result := driver.cuInit(0):
        return _without_device(driver, result, visible, supported)
    count = ctypes.c_int(0)
    if (result := driver.cuDeviceGetCount(ctypes.byref(count))) or not count.value:
        return _without_device(driver, result or _NO_DEVICE, visible, supported)
    return CudaDriver(tuple(_read_device(driver, index) for index in range(count.value)), supported)


@cache
def _load() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError:
        return None


def _without_device(driver: ctypes.CDLL, result: int, visible: str | None, version: tuple[int, int]) -> CudaDriver:
    """Return the state of CUDA after ``result`` of its initialization."""
    if result == _STUB_LIBRARY:
        return CudaDriver((), version, f"{LIBRARY} is a stub without a driver")
    if result == _NO_DEVICE and visible is None:
        return CudaDriver((), version, "the NVIDIA driver finds no GPU")
    if result == _NO_DEVICE:
        return CudaDriver((), version, f"CUDA_VISIBLE_DEVICES={visible} names no GPU of this machine", is_broken=True)
    name = ctypes.c_char_p()
    driver.cuGetErrorName(result, ctypes.byref(name))
    text = (name.value or b"unknown error").decode(errors="replace")
    return CudaDriver((), version, f"CUDA does not start: {text} ({result})", is_broken=True)


def _read_device(driver: ctypes.CDLL, index: int) -> CudaDevice:
    device = ctypes.c_int(0)
    driver.cuDeviceGet(ctypes.byref(device), index)
    name, identifier, total = ctypes.create_string_buffer(_NAME_BYTES), (ctypes.c_ubyte * 16)(), ctypes.c_size_t(0)
    driver.cuDeviceGetName(name, _NAME_BYTES, device)
    driver.cuDeviceGetUuid_v2(identifier, device)
    driver.cuDeviceTotalMem_v2(ctypes.byref(total), device)

    def attribute(number: int) -> int:
        value = ctypes.c_int(0)
        driver.cuDeviceGetAttribute(ctypes.byref(value), number, device)
        return value.value

    return CudaDevice(
        name.value.decode(errors="replace"), str(uuid.UUID(bytes=bytes(identifier))),
        (attribute(_MAJOR), attribute(_MINOR)), total.value, bool(attribute(_INTEGRATED)),
    )  # fmt: skip
