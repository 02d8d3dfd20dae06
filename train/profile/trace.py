"""What a profiled run did: time by class of kernel, forward and backward, idle gaps and their causes.

On a GPU the times are of kernels on the device, on a CPU of operators on the host.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from train.data.loader import NEXT_BATCH

FORWARD = "throughline: forward"

CLASSES = {
    "copies": ("memcpy", "memset", "copy_", "_to_copy", "aten::clone"),
    "attention": ("flash", "fmha", "attention", "sdpa", "softmax"),
    "matmul": ("gemm", "addmm", "aten::mm", "_mm_", "bmm", "cutlass", "nvjet", "xmma", "cublas", "linear"),
    "optimizer": ("adam", "optimizer", "multi_tensor", "foreach"),
    "norms and loss": ("layer_norm", "gammabeta", "nll", "log_softmax", "cross_entropy"),
}
"""Words in a kernel's or operator's name, looked for in this order; all else is element-wise."""
ATTENTION_KERNELS = {
    "cuDNN": ("cudnn_generated", "cudnn_attention", "sdpa_sm90"),
    "flash": ("flash",),
    "efficient": ("fmha", "efficient_attention"),
    "flex": ("flex_attention",),
}
GAP = 20.0
"""Microseconds from which the cause of an idle gap on a GPU is looked for; shorter ones are launch spacing."""
WAITS = ("cudastreamsynchronize", "cudadevicesynchronize", "cudaeventsynchronize", "aten::item")


@dataclass(frozen=True)
class Kernel:
    """A kernel (GPU) or operator (CPU) with its calls and milliseconds over the profiled steps."""

    name: str
    kind: str
    calls: int
    milliseconds: float


@dataclass(frozen=True)
class Profile:
    """The numbers of a profile, per step unless stated otherwise. Times in milliseconds."""

    steps: int
    step: float
    kernels: list[Kernel]
    """Over all steps, the most expensive first."""
    by_class: dict[str, float]
    idle: float
    gaps: dict[str, float]
    """Idle time by cause: a synchronisation, a copy, the loader, launching."""
    forward: float
    backward: float
    loader: float
    waits: float
    """Host time in calls that wait for the device."""
    wait_calls: float
    attention: str
    """The kernel that computed attention."""


def kind_of(name: str) -> str:
    low = name.lower()
    if "log_softmax" in low or "logsoftmax" in low:
        return "norms and loss"
    kinds = [kind for kind, words in CLASSES.items() if any(word in low for word in words)]
    fused = low.startswith("triton_") or "cpp_fused_" in low
    if fused:  # and named after all that it contains, including casts, which are not copies there
        kinds = [kind for kind in kinds if kind != "copies"]
        if not low.startswith("triton_tem_"):  # only a product's bias: the product is a template or the library's
            kinds = [kind for kind in kinds if kind != "matmul"]
    return next(iter(kinds), "element-wise")


def analyse(events: Iterable[Any], steps: int, seconds: float, *, cuda: bool) -> Profile:
    """Read the events of a profile over ``steps`` steps that took ``seconds``."""
    events = list(events)
    work = [e for e in events if e.device_type.name == ("CUDA" if cuda else "CPU")]
    # Named ranges, such as an optimizer's step, are listed in addition to the work inside them.
    work = [e for e in work if not (e.is_user_annotation or e.name.startswith(("autograd::engine", "cuda")))]
    work = [e for e in work if not python(e.name)]
    sums: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for event in work:
        spent = event.time_range.elapsed_us() if cuda else event.self_cpu_time_total
        sums[event.name][0] += 1
        sums[event.name][1] += spent / 1000
    kernels = [Kernel(name, kind_of(name), int(calls), spent) for name, (calls, spent) in sums.items()]
    kernels.sort(key=lambda kernel: -kernel.milliseconds)
    by_class: dict[str, float] = defaultdict(float)
    for kernel in kernels:
        by_class[kernel.kind] += kernel.milliseconds / steps
    host = [e for e in events if e.device_type.name == "CPU"]
    gaps = idle_gaps(work, host) if cuda else {}
    waits = [e for e in host if e.name.lower() in WAITS]

    def within(starts: str) -> float:
        chosen = [e for e in host if e.name.startswith(starts)]
        return sum(e.device_time_total if cuda else e.cpu_time_total for e in chosen) / 1000 / steps

    return Profile(
        steps=steps,
        step=seconds * 1000 / steps,
        kernels=kernels,
        by_class=dict(sorted(by_class.items(), key=lambda item: -item[1])),
        idle=sum(gaps.values()) / steps,
        gaps={cause: spent / steps for cause, spent in gaps.items()},
        forward=within(FORWARD),
        backward=within("autograd::engine::evaluate_function"),
        loader=sum(e.cpu_time_total for e in host if e.name == NEXT_BATCH) / 1000 / steps,
        waits=sum(e.self_cpu_time_total for e in waits) / 1000 / steps,
        wait_calls=len([e for e in waits if e.name == "aten::item" or cuda]) / steps,
        attention=attention_kernel(kernel.name for kernel in kernels),
    )


def python(name: str) -> bool:
    """Whether a name in the trace is of a Python function rather than an operator."""
    return "): " in name or name.startswith(("<built-in", "nn.Module: ", "ProfilerStep"))


def attention_kernel(names: Iterable[str]) -> str:
    """Which of torch's attention kernels is among ``names``."""
    names = [name.lower() for name in names]
    for kernel, words in ATTENTION_KERNELS.items():
        if any(word in name for name in names for word in words):
            return kernel
    return "none fused"


def idle_gaps(kernels: list[Any], host: list[Any]) -> dict[str, float]:
    """Milliseconds in which the GPU had nothing to do, by what the host was doing then."""
    found: dict[str, float] = defaultdict(float)
    causes = [(cause, e) for e in host if (cause := _cause(e.name))]
    spans = sorted((e.time_range.start, e.time_range.end) for e in kernels)
    reached = spans[0][1] if spans else 0.0
    for start, end in spans[1:]:
        if start - reached > GAP:
            covering = [c for c, e in causes if e.time_range.start < start and e.time_range.end > reached]
            found[covering[0] if covering else "launching"] += (start - reached) / 1000
        reached = max(reached, end)
    return dict(found)


def _cause(name: str) -> str | None:
    low = name.lower()
    if name == NEXT_BATCH:
        return "the loader"
    if low in WAITS:
        return "a synchronisation"
    return "a copy" if low.startswith("cudamemcpy") else None


def findings(profile: Profile, *, optimizer: str, compiled: bool, cuda: bool, attention: bool = True) -> list[str]:
    """What stands out in the numbers, each in a sentence; empty when nothing does."""
    total = sum(profile.by_class.values()) or 1.0
    shares = {kind: spent / total for kind, spent in profile.by_class.items()}
    where = "device" if cuda else "CPU"
    found = []
    for kind, share in list(shares.items())[:1]:
        found.append(f"{kind} takes {share:.0%} of the {where}'s time, {profile.by_class[kind]:.2f} ms per step.")
    lost = profile.gaps.get("a synchronisation", 0.0) if cuda else profile.waits
    if profile.wait_calls >= 1 and lost > 0.001 * profile.step:
        found.append(
            f"`.item()` and other waits in the loop: {profile.wait_calls:.0f} per step, {lost:.2f} ms per step."
        )
    waited = profile.gaps.get("the loader", 0.0) if cuda else profile.loader
    if waited > 0.01 * profile.step:
        found.append(f"the {where} waits {waited:.2f} ms per step for batches ({waited / profile.step:.1%}).")
    if cuda and profile.idle > 0.02 * profile.step:
        cause = max(profile.gaps, key=lambda name: profile.gaps[name])
        found.append(f"the GPU is idle {profile.idle:.2f} ms per step, most of it because of {cause}.")
    if not compiled and shares.get("element-wise", 0) > 0.2:
        found.append(f"element-wise work is {shares['element-wise']:.0%}: --compile whole fuses it.")
    if optimizer == "adamw" and shares.get("optimizer", 0) + shares.get("element-wise", 0) > 0.1:
        found.append("the optimizer launches many small kernels: --optimizer adamw-fused is one.")
    if attention and profile.attention == "none fused":
        found.append("attention is not fused: the T x T matrix goes through memory; try --attention auto.")
    if profile.forward and profile.backward:
        found.append(f"the backward pass takes {profile.backward / profile.forward:.1f} times the forward pass.")
    return found
