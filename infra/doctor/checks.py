"""Checks of whether this machine is ready to train, each with a fix for the problem that it detects.

The checks change nothing on the machine.
"""

import os
import platform
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from infra.cli.units import GB
from infra.device.gpu import GpuState
from infra.device.gpu_models import is_variant, peak_flops
from infra.device.hardware import DeviceInfo
from infra.device.host import cpu_count
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


def run_checks(device: torch.device, out: Path, state: GpuState | None, info: DeviceInfo) -> list[Check]:
    """Run all checks for ``device``; ``out`` is the folder of runs, and ``state`` and ``info`` describe this machine's
    device."""
    results = [*check_software(info.compile_blocker), *check_disk(out)]
    if device.type == "cuda" and state:
        gpu = [*check_gpu(state), *check_gpu_support(info)]
        return [*results, *gpu, *check_attention_kernels(device, bf16=info.bf16)]
    cpu = check_cpu(cpu_count(), os.getloadavg()[0])
    return [*results, check_missing_gpu(info), *cpu, *check_attention_kernels(device)]


def check_missing_gpu(info: DeviceInfo) -> Check:
    """Check a machine without a usable GPU: either it has none, or the one of ``info`` cannot be used."""
    if not info.gpu_blocker:
        return Check("GPU", f"{info.gpu_absence}; training runs on the CPU")
    name = info.name if info.kind == "cuda" else "the GPU"
    return Check("GPU", f"{name} cannot be used", info.gpu_blocker, fatal=True)


def check_gpu_support(info: DeviceInfo) -> list[Check]:
    """Check what the GPU of ``info`` supports, each with what ``auto`` settings use instead."""
    results = [Check("compute capability", ".".join(map(str, info.capability)))]
    if not info.bf16:
        has_fp16 = info.capability >= (7, 0)
        instead = "--precision auto is fp16 with loss scaling" if has_fp16 else "--precision auto is fp32"
        results.append(Check("bf16", f"not supported; {instead}"))
    allocator = f"unavailable; --allocator auto is torch's default ({info.allocator_blocker})"
    results.append(Check("expandable segments", allocator if info.allocator_blocker else "available"))
    advice = "raise the limit on locked memory (ulimit -l), or in WSL2 the memory in .wslconfig; copies are slower"
    fix = advice if info.pinned_blocker else ""
    results.append(Check("pinned memory", info.pinned_blocker or "available", fix))
    if info.memory_cap_reason:
        results.append(Check("memory cap", f"{info.memory / GB:.1f} GB, because {info.memory_cap_reason}"))
    return results


def check_software(compile_blocker: str = "", find_version: Callable[[str], str] = version) -> list[Check]:
    """Check Python, the packages that determine the speed, and whether torch can compile."""
    results = [Check("Python", platform.python_version())]
    for package in ("torch", "ray", "mlflow"):
        try:
            results.append(Check(package, find_version(package)))
        except PackageNotFoundError:
            results.append(Check(package, "missing", f"run 'pip install {package}'", fatal=True))
    if torch.version.cuda:
        results.append(Check("torch CUDA", f"{torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"))
    return [*results, Check("torch.compile", "unavailable" if compile_blocker else "available", compile_blocker)]


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


def check_gpu(state: GpuState) -> list[Check]:
    """Check the ``state`` of the GPU, and other processes that use it."""
    peak_fix = "no peak FLOP/s listed in infra/device/gpu_models.py, so MFU cannot be computed; add the GPU there"
    has_known_peak = peak_flops(state.name) or is_variant(state.name)
    results = [Check("GPU", state.name, "" if has_known_peak else peak_fix)]
    results.append(Check("GPU memory", f"{state.memory_total / GB:.1f} GB"))
    if state.driver:
        results.append(Check("driver", state.driver))
    if state.nvml_failure:
        fix = "memory by process, clocks and power may be unknown; check nvidia-smi in the same container"
        results.append(Check("NVML", state.nvml_failure, fix))
    other_ids = ", ".join(map(str, state.other_processes))
    fix = f"stop them before measuring: kill {other_ids}" if other_ids else ""
    results.append(Check("other processes on the GPU", other_ids or "none", fix))
    if not other_ids and state.process_memory is None and (state.memory_used or 0) > 2 * GB:
        used = f"{(state.memory_used or 0) / GB:.1f} GB in use by processes that NVML does not show"
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


def check_attention_kernels(device: torch.device, *, bf16: bool = True) -> list[Check]:
    """Check which fused attention kernels of torch work on the device, forward and backward, in fp16 without
    ``bf16``."""
    if device.type != "cuda":
        has_flash = _can_run([SDPBackend.FLASH_ATTENTION], device, torch.float32)
        return [Check("fused attention", "available" if has_flash else "unavailable; torch uses plain operations")]
    kernels = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "cuDNN": SDPBackend.CUDNN_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
    }
    available = {
        name: _can_run([kernel], device, torch.bfloat16 if bf16 else torch.float16) for name, kernel in kernels.items()
    }
    text = ", ".join(f"{name} {'available' if is_available else 'fails'}" for name, is_available in available.items())
    fix = (
        ""
        if available["flash"] or available["cuDNN"] or (available["efficient"] and not bf16)
        else "flash and cuDNN attention fail; install a torch built for this GPU"
    )
    return [Check("attention kernels", text, fix)]


def _can_run(kernels: list[SDPBackend], device: torch.device, dtype: torch.dtype) -> bool:
    q = torch.randn(1, 12, 256, 64, device=device, dtype=dtype, requires_grad=True)
    try:
        with warnings.catch_warnings(), sdpa_kernel(kernels):
            warnings.simplefilter("ignore")  # torch warns of each kernel that it cannot use.
            functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True
