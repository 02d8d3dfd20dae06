"""Capabilities of devices, from which ``auto`` settings are resolved."""

import importlib
import os
import shutil
import sys
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Literal

from infra.cli.units import GB
from infra.device import host
from infra.device.cuda import CudaDevice, CudaDriver, read_driver
from infra.device.gpu import GpuState, gpu_state
from infra.device.gpu_models import GPU_MODELS
from infra.device.torch_support import TorchSupport, torch_support
from infra.errors import first_line


@dataclass(frozen=True)
class DeviceInfo:
    """Properties of a device, from which ``auto`` settings are resolved."""

    kind: Literal["cuda", "cpu"]
    name: str
    capability: tuple[int, int] = (0, 0)
    """CUDA compute capability; (0, 0) for a CPU."""
    bf16: bool = False
    """Whether the device multiplies bf16 matrices in hardware."""
    memory: int = field(default=sys.maxsize, compare=False)
    """Bytes of the device's memory that this process can use; ``sys.maxsize`` if unknown."""
    compile_blocker: str = field(default="", compare=False)
    """Reason why torch.compile cannot work on the device, and the package to install; empty if it works."""
    allocator_blocker: str = field(default="", compare=False)
    """Reason why torch's allocator cannot use expandable segments on the GPU; empty if it can."""
    pinned_blocker: str = field(default="", compare=False)
    """Reason why host memory cannot be pinned for copies to the GPU; empty if it can."""
    gpu_blocker: str = field(default="", compare=False)
    """Reason why the GPU of this machine cannot be used, and the fix, without the last period; empty if it can."""
    gpu_absence: str = field(default="", compare=False)
    """Reason why there is no GPU, for a CPU; empty for a GPU."""
    memory_cap_reason: str = field(default="", compare=False)
    """Reason why torch's allocator is capped to the free memory even without a limit; empty if it is not."""
    nvml_failure: str = field(default="", compare=False)
    """Reason why NVML does not report the GPU's memory in use; empty if it does."""
    gpu_note: str = field(default="", compare=False)
    """Note about other GPUs, which have more memory; empty if there are none."""

    def with_memory_limit(self, limit: int | None) -> "DeviceInfo":
        """Return the device for a process that may use ``limit`` bytes; None means all available memory."""
        return self if limit is None else replace(self, memory=min(self.memory, limit))


KNOWN_GPUS = {
    model.plan_name: DeviceInfo(
        "cuda", model.cuda_name, model.capability, bf16=model.capability >= (8, 0), memory=model.memory
    )
    for model in GPU_MODELS
    if model.mebibytes
}
"""GPUs by name that a run can be planned for on a machine without them."""

_BLOCKERS = ("compile_blocker", "allocator_blocker", "pinned_blocker", "memory_cap_reason", "nvml_failure")
"""Fields of :class:`DeviceInfo` that hold for several GPUs if they hold for one of them."""

SIMILAR_MEMORY_RATIO = 1.1
"""Ratio of two GPUs' memory up to which they count as equal; other processes may use some of it."""

A100 = KNOWN_GPUS["A100"]
"""The A100 with 40 GB, for plans on a machine without a GPU."""


def device_info() -> DeviceInfo:
    """Describe this machine's first visible GPU, or its CPU, without a context of CUDA in this process."""
    return examine_device()[1]


def examine_device(
    driver: CudaDriver | None = None, try_torch: Callable[..., TorchSupport] = torch_support
) -> tuple[GpuState | None, DeviceInfo]:
    """Return the state of this machine's first visible GPU and its properties, or None and those of the CPU.

    By default the machine's ``driver`` is read, and ``try_torch`` tries the installed torch on the GPU.
    """
    driver = driver or read_driver()
    if driver.devices:
        first, *others = driver.devices
        state, is_wsl = gpu_state(first), host.is_wsl()
        info = gpu_info(state, try_torch(first, driver.version, is_wsl=is_wsl), is_wsl=is_wsl)
        if info.gpu_blocker:
            usable = (d for d in others if not try_torch(d, driver.version, is_wsl=is_wsl, is_first=False).blocker)
            advice = "".join(f", or use {device.name} with {device.setting}" for device in islice(usable, 1))
            return state, replace(info, gpu_blocker=info.gpu_blocker + advice)
        largest = max(others, key=lambda device: device.memory, default=first)
        if largest.memory > SIMILAR_MEMORY_RATIO * first.memory:
            note = f"{_describe(first)} is used; {largest.setting} selects {_describe(largest)}"
            return state, replace(info, gpu_note=note)
        return state, info
    absence, is_broken = driver.absence, driver.is_broken
    advice = f"{absence}. Check it with nvidia-smi" if is_broken else ""
    return None, replace(cpu_info(), gpu_blocker=advice, gpu_absence=absence)


def worker_gpus_info(
    workers: int, driver: CudaDriver | None = None, try_torch: Callable[..., TorchSupport] = torch_support
) -> DeviceInfo:
    """Describe the first ``workers`` visible GPUs of this machine, on each of which a worker trains, as one device."""
    driver, is_wsl = driver or read_driver(), host.is_wsl()
    infos: list[DeviceInfo] = []
    for index, device in enumerate(driver.devices[:workers]):
        support = try_torch(device, driver.version, is_wsl=is_wsl, is_first=not index)
        infos.append(gpu_info(gpu_state(device), support, is_wsl=is_wsl))
    return combine_gpus(infos) if infos else examine_device(driver, try_torch)[1]


def combine_gpus(infos: Sequence[DeviceInfo]) -> DeviceInfo:
    """Return the properties that all these GPUs have: those of the one with the least memory, without what another one
    does not support. If torch cannot use one of them, it is returned."""
    for info in infos:
        if info.gpu_blocker:
            advice = f"{info.gpu_blocker}, or select other GPUs with CUDA_VISIBLE_DEVICES" if len(infos) > 1 else ""
            return replace(info, gpu_blocker=advice or info.gpu_blocker)
    smallest, largest = (choose(infos, key=lambda info: info.memory) for choose in (min, max))
    blockers = {name: next(filter(None, (getattr(info, name) for info in infos)), "") for name in _BLOCKERS}
    note = ""
    if largest.memory > SIMILAR_MEMORY_RATIO * smallest.memory:
        size = f"{smallest.memory / GB:.1f} GB"
        note = f"{smallest.name} with {size} limits the micro-batch; it has the least memory of {len(infos)} GPUs"
    capability, bf16 = min(info.capability for info in infos), all(info.bf16 for info in infos)
    return replace(smallest, capability=capability, bf16=bf16, gpu_note=note, **blockers)


def _describe(device: CudaDevice) -> str:
    return f"{device.name} with {device.memory / GB:.1f} GB"


def gpu_info(state: GpuState, support: TorchSupport | None = None, *, is_wsl: bool = False) -> DeviceInfo:
    """Describe a GPU in ``state``, for which torch has ``support``."""
    support = support or TorchSupport()
    capability = state.capability or (0, 0)
    if state.is_integrated:  # CUDA counts the page cache as used.
        memory = min(state.memory_total, host.available_memory())
    elif state.memory_used is None:
        memory = state.memory_total if support.free_memory is None else support.free_memory
    else:
        memory = state.memory_total - (state.memory_used - (state.process_memory or 0))
    cap_reason = "the GPU shares the host's memory" if state.is_integrated else ""
    if is_wsl:
        cap_reason = "WSL2 would take more from the host, which is far slower, instead of running out"
    return DeviceInfo(
        "cuda", state.name, capability, bf16=capability >= (8, 0), memory=memory,
        compile_blocker=find_compile_blocker(capability), allocator_blocker=support.allocator_blocker,
        pinned_blocker=support.pinned_blocker, gpu_blocker=support.blocker, memory_cap_reason=cap_reason,
        nvml_failure=state.nvml_failure,
    )  # fmt: skip


def cpu_info(cpuinfo: Path = Path("/proc/cpuinfo")) -> DeviceInfo:
    """Describe this machine's CPU. If the file ``cpuinfo`` is missing, bf16 counts as emulated."""
    try:
        flags = set(cpuinfo.read_text(encoding="utf-8").split())
    except OSError:
        flags = set[str]()
    compiler = os.environ.get("CXX") or any(map(shutil.which, ("g++", "clang++", "c++")))
    return DeviceInfo(
        "cpu", "cpu", bf16=bool(flags & {"avx512_bf16", "amx_tile"}), memory=host.available_memory(),
        compile_blocker="" if compiler else "the C++ compiler is missing; install g++",
    )  # fmt: skip


def find_compile_blocker(capability: tuple[int, int], headers: Path | None = None) -> str:
    """Return the reason why torch.compile cannot work on a GPU, and the package to install; empty if it works.

    torch.compile generates kernels for Triton, which compiles their launchers from C with Python's ``headers``.
    """
    if capability < (7, 0):
        return "Triton needs a GPU of compute capability 7.0 or later"
    try:
        importlib.import_module("triton")
    except ModuleNotFoundError as missing:
        if missing.name == "triton":
            return "Triton is not installed; run 'pip install triton'"
        return f"Triton cannot be imported ({missing}); run 'pip install --force-reinstall triton'"
    except Exception as error:  # noqa: BLE001 a broken installation may raise any exception
        return f"Triton cannot be imported ({first_line(error)}); run 'pip install --force-reinstall triton'"
    if not (os.environ.get("CC") or any(map(shutil.which, ("gcc", "clang")))):
        return "the C compiler is missing; install gcc"
    if not ((headers or Path(sysconfig.get_path("include"))) / "Python.h").exists():
        return "the Python headers are missing; install python3-dev"
    return ""
