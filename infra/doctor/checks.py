"""Is this machine ready to train? Checks, each with the fix for a problem that it finds.

Nothing is changed on the machine.
"""

import os
import platform
import shutil
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from infra.gpu import GpuState, read_gpu
from infra.hardware import device_facts, peak_flops
from infra.host import cpu_count
from infra.telemetry import THROTTLED
from infra.units import GB

SPARE = 20 * 10**9
"""Free disk space below which checkpoints and traces are in danger."""


@dataclass(frozen=True)
class Check:
    """The result of one check. ``fix`` is empty when there is no problem; ``fatal`` when training would not start."""

    name: str
    value: str
    fix: str = ""
    fatal: bool = False


def checks(device: torch.device, out: Path) -> list[Check]:
    """Every check for ``device``, with ``out`` as the folder that runs are written to."""
    found = [*software(), *disk(out)]
    if device.type == "cuda":
        return [*found, *gpu(read_gpu(), torch.cuda.get_device_name(device)), *attention_kernels(device)]
    return [*found, no_gpu(read_gpu()), *cpu(), *attention_kernels(device)]


def no_gpu(state: GpuState | None) -> Check:
    """torch has no GPU: because there is none, or although NVML has found one."""
    if state is None:
        return Check("GPU", "none: training runs on the CPU")
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU alone"
    return Check(
        "GPU",
        f"{state.name} exists but torch does not see it: training runs on the CPU",
        f"this torch is built for {build} and the driver is {state.driver}: install a CUDA build of torch that this "
        "driver can run, and check CUDA_VISIBLE_DEVICES",
    )


def software() -> list[Check]:
    """Python and the packages that decide speed."""
    found = [Check("Python", platform.python_version())]
    for package in ("torch", "ray", "mlflow"):
        try:
            found.append(Check(package, version(package)))
        except PackageNotFoundError:
            found.append(Check(package, "missing", f"pip install {package}", fatal=True))
    if torch.version.cuda:
        found.append(Check("CUDA of torch", f"{torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"))
    lacking = device_facts().uncompilable
    return [*found, Check("torch.compile", "cannot work" if lacking else "has what it needs", lacking)]


def disk(out: Path) -> list[Check]:
    """Disk space for checkpoints where runs are written, and shared memory for Ray."""
    free = shutil.disk_usage(out).free
    found = [Check(f"disk of {out}", f"{free / 1e9:,.0f} GB free", "" if free > SPARE else "make room there")]
    shared = Path("/dev/shm")  # noqa: S108 the folder is only inspected, not written to
    if shared.exists():
        size = shutil.disk_usage(shared).free
        fix = "" if size > 10**9 else "start the container with --shm-size=8g: Ray keeps its objects there"
        found.append(Check("shared memory", f"{size / GB:,.1f} GB free", fix))
    return found


def cpu() -> list[Check]:
    cores = cpu_count()
    load = os.getloadavg()[0]
    busy = f"other work keeps {load:.1f} of {cores} cores busy: stop it before measuring" if load > 0.5 * cores else ""
    return [
        Check("CPU", f"{cores} cores, {torch.backends.cpu.get_cpu_capability()}"),
        Check("load", f"{load:.1f}", busy),
    ]


def gpu(state: GpuState | None, name: str) -> list[Check]:
    """The GPU that torch calls ``name``, as NVML reports it, and other processes on it."""
    known = "" if peak_flops(name) else "its peak is not in infra/hardware.py, so there will be no MFU: add it there"
    found = [Check("GPU", name, known)]
    if state is None:
        return [*found, Check("NVML", "does not answer", "memory by process and clocks are unknown: check nvidia-smi")]
    found += [Check("driver", state.driver), Check("GPU memory", f"{state.memory_total / GB:.1f} GB")]
    others = ", ".join(map(str, state.other_processes))
    found.append(
        Check(
            "other processes on the card",
            others or "none",
            "stop them before measuring: kill " + others if others else "",
        )
    )
    if not others and state.process_memory is None and state.memory_used > 2 * GB:
        used = f"{state.memory_used / GB:.1f} GB in use by processes that NVML does not show"
        found.append(Check("memory in use", used, "find them with nvidia-smi on the host"))
    if state.power_limit is not None:
        found.append(Check("power limit", f"{state.power_limit:.0f} W"))
    if state.sm_clock is not None:
        found.append(Check("SM clock now", f"{state.sm_clock} MHz at {state.temperature} °C"))
    if state.ecc is not None:
        found.append(Check("ECC", "on" if state.ecc else "off"))
    reasons = [cause for cause, bits in THROTTLED.items() if (state.throttle_reasons or 0) & bits]
    fix = "improve cooling or raise the limit (nvidia-smi -pl): otherwise the speeds are those of a throttled card"
    return [*found, Check("throttling", ", ".join(reasons) or "none", fix if reasons else "")]


def attention_kernels(device: torch.device) -> list[Check]:
    """Which of torch's fused attention kernels run here, forward and backward."""
    if device.type != "cuda":
        return [
            Check("fused attention", "runs" if _runs([SDPBackend.FLASH_ATTENTION], device) else "falls back to math")
        ]
    kernels = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "cuDNN": SDPBackend.CUDNN_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
    }
    runs = {name: _runs([kernel], device) for name, kernel in kernels.items()}
    text = ", ".join(f"{name} {'runs' if able else 'does not run'}" for name, able in runs.items())
    fix = "" if runs["flash"] or runs["cuDNN"] else "neither flash nor cuDNN runs: install torch built for this GPU"
    return [Check("attention kernels", text, fix)]


def _runs(kernels: list[SDPBackend], device: torch.device) -> bool:
    kind = torch.bfloat16 if device.type == "cuda" else torch.float32
    q = torch.randn(1, 12, 256, 64, device=device, dtype=kind, requires_grad=True)
    try:
        with sdpa_kernel(kernels):
            functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True
