"""Checks of whether this machine is ready to train, each with a fix for the problem that it detects.

The checks change nothing on the machine.
"""

import os
import platform
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from infra.cli.units import GB
from infra.device.gpu import GpuState, read_gpu
from infra.device.hardware import device_info
from infra.device.host import cpu_count
from infra.device.peaks import peak_flops
from infra.device.telemetry import THROTTLE_BITS

MIN_FREE_BYTES = 20 * 10**9
"""Minimum free disk space in bytes for checkpoints and traces."""


@dataclass(frozen=True)
class Check:
    """Result of one check. ``fix`` is empty if there is no problem; a ``fatal`` problem prevents training."""

    name: str
    value: str
    fix: str = ""
    fatal: bool = False

    @property
    def prevents_training(self) -> bool:
        """Whether the check found a fatal problem."""
        return bool(self.fix) and self.fatal


def run_checks(device: torch.device, out: Path) -> list[Check]:
    """Run all checks for ``device``; ``out`` is the folder of runs."""
    results = [*check_software(), *check_disk(out)]
    if device.type == "cuda":
        return [*results, *check_gpu(read_gpu(), torch.cuda.get_device_name(device)), *check_attention_kernels(device)]
    load = os.getloadavg()[0]
    return [*results, check_missing_gpu(read_gpu()), *check_cpu(cpu_count(), load), *check_attention_kernels(device)]


def check_missing_gpu(state: GpuState | None) -> Check:
    """Check a GPU that torch does not find: either the machine has none, or torch cannot use the one in NVML."""
    if state is None:
        return Check("GPU", "no GPU found, training runs on the CPU")
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    return Check(
        "GPU",
        f"torch cannot use {state.name}, training runs on the CPU",
        f"the build of torch is {build} and the driver is {state.driver}; install a CUDA build of torch that this "
        "driver supports, and check CUDA_VISIBLE_DEVICES",
    )


def check_software(find_version: Callable[[str], str] = version) -> list[Check]:
    """Check Python, the packages that determine the speed, and whether torch can compile."""
    results = [Check("Python", platform.python_version())]
    for package in ("torch", "ray", "mlflow"):
        try:
            results.append(Check(package, find_version(package)))
        except PackageNotFoundError:
            results.append(Check(package, "missing", f"run 'pip install {package}'", fatal=True))
    if torch.version.cuda:
        results.append(Check("torch CUDA", f"{torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"))
    blocker = device_info().compile_blocker
    return [*results, Check("torch.compile", "unavailable" if blocker else "available", blocker)]


def check_disk(out: Path) -> list[Check]:
    """Check free disk space in the folder of runs, and shared memory for Ray."""
    free = shutil.disk_usage(out).free
    results = [
        Check(f"disk of {out}", f"{free / 1e9:,.0f} GB free", "" if free > MIN_FREE_BYTES else "free disk space")
    ]
    shared = Path("/dev/shm")  # noqa: S108 the folder is only inspected, not written to
    if shared.exists():
        size = shutil.disk_usage(shared).free
        fix = "" if size > 10**9 else "start the container with --shm-size=8g, because Ray stores its objects there"
        results.append(Check("shared memory", f"{size / GB:,.1f} GB free", fix))
    return results


def check_cpu(cores: int, load: float) -> list[Check]:
    """Check the CPU's cores and the ``load`` of other work, in cores."""
    fix = (
        f"{load:.1f} of {cores} cores are busy with other work; stop it before measuring" if load > 0.5 * cores else ""
    )
    return [
        Check("CPU", f"{cores} cores, {torch.backends.cpu.get_cpu_capability()}"),
        Check("load", f"{load:.1f}", fix),
    ]


def check_gpu(state: GpuState | None, name: str) -> list[Check]:
    """Check the GPU with torch's ``name``, its state in NVML, and other processes that use it."""
    peak_fix = "no peak FLOP/s listed in infra/device/peaks.py, so MFU cannot be computed; add the GPU there"
    results = [Check("GPU", name, "" if peak_flops(name) else peak_fix)]
    if state is None:
        fix = "memory by process and clocks are unknown; check nvidia-smi"
        return [*results, Check("NVML", "does not respond", fix)]
    results += [Check("driver", state.driver), Check("GPU memory", f"{state.memory_total / GB:.1f} GB")]
    other_ids = ", ".join(map(str, state.other_processes))
    fix = f"stop them before measuring: kill {other_ids}" if other_ids else ""
    results.append(Check("other processes on the GPU", other_ids or "none", fix))
    if not other_ids and state.process_memory is None and state.memory_used > 2 * GB:
        used = f"{state.memory_used / GB:.1f} GB in use by processes that NVML does not show"
        results.append(Check("memory in use", used, "find them with nvidia-smi on the host"))
    if state.power_limit is not None:
        results.append(Check("power limit", f"{state.power_limit:.0f} W"))
    if state.sm_clock is not None:
        results.append(Check("SM clock", f"{state.sm_clock} MHz at {state.temperature} °C"))
    if state.ecc is not None:
        results.append(Check("ECC", "on" if state.ecc else "off"))
    reasons = [cause for cause, bits in THROTTLE_BITS.items() if (state.throttle_reasons or 0) & bits]
    fix = "improve cooling or raise the power limit (nvidia-smi -pl); a throttled GPU distorts all speeds"
    return [*results, Check("throttling", ", ".join(reasons) or "none", fix if reasons else "")]


def check_attention_kernels(device: torch.device) -> list[Check]:
    """Check which fused attention kernels of torch work on the device, forward and backward."""
    if device.type != "cuda":
        has_flash = _can_run([SDPBackend.FLASH_ATTENTION], device)
        return [Check("fused attention", "available" if has_flash else "unavailable; torch uses plain operations")]
    kernels = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "cuDNN": SDPBackend.CUDNN_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
    }
    available = {name: _can_run([kernel], device) for name, kernel in kernels.items()}
    text = ", ".join(f"{name} {'available' if is_available else 'fails'}" for name, is_available in available.items())
    fix = (
        ""
        if available["flash"] or available["cuDNN"]
        else "flash and cuDNN attention fail; install a torch built for this GPU"
    )
    return [Check("attention kernels", text, fix)]


def _can_run(kernels: list[SDPBackend], device: torch.device) -> bool:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q = torch.randn(1, 12, 256, 64, device=device, dtype=dtype, requires_grad=True)
    try:
        with sdpa_kernel(kernels):
            functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True
