"""Analysis of a profile: time by class of kernel, forward and backward pass, idle gaps and their causes.

Times are of kernels on a GPU, and of operators on a CPU.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from train.data.loader import NEXT_BATCH

FORWARD = "throughline: forward"
"""Name of the forward passes in a profile."""

CLASSES = {
    "copies": ("memcpy", "memset", "copy_", "_to_copy", "aten::clone"),
    "attention": ("flash", "fmha", "attention", "sdpa", "softmax"),
    "matmul": ("gemm", "addmm", "aten::mm", "_mm_", "bmm", "cutlass", "nvjet", "xmma", "cublas", "linear"),
    "optimizer": ("adam", "optimizer", "multi_tensor", "foreach"),
    "norms and loss": ("layer_norm", "gammabeta", "nll", "log_softmax", "cross_entropy"),
}
"""Parts of a kernel's or operator's name by its class, in the order of precedence; all others are element-wise."""
ATTENTION_KERNELS = {
    "cuDNN": ("cudnn_generated", "cudnn_attention", "sdpa_sm90"),
    "flash": ("flash",),
    "efficient": ("fmha", "efficient_attention"),
    "flex": ("flex_attention",),
}
"""Parts of a kernel's name by the implementation of attention."""
MIN_GAP_MICROSECONDS = 20.0
"""Minimum length of an idle gap on a GPU; shorter ones are the normal spacing of launches."""
WAITS = ("cudastreamsynchronize", "cudadevicesynchronize", "cudaeventsynchronize", "aten::item")
"""Names of host calls that wait for the device."""


@dataclass(frozen=True)
class Kernel:
    """A kernel on a GPU or an operator on a CPU."""

    name: str
    """Name of the kernel in the trace."""
    kind: str
    """Class of the kernel, such as matmul."""
    calls: int
    """Number of calls of the kernel in all profiled steps."""
    milliseconds: float
    """Time of the kernel in all profiled steps, in milliseconds."""


@dataclass(frozen=True)
class Profile:
    """The measurements of a profile. Times are in milliseconds per step."""

    steps: int
    """Number of profiled steps."""
    step: float
    """Duration of a step in milliseconds."""
    kernels: list[Kernel]
    """Kernels of all profiled steps, the slowest first."""
    by_class: dict[str, float]
    """Milliseconds per step by class of kernel."""
    idle: float
    """Milliseconds per step in which the GPU is idle."""
    gaps: dict[str, float]
    """Idle milliseconds per step by cause: synchronization, copying, the loader, launching."""
    forward: float
    """Milliseconds per step in the forward pass."""
    backward: float
    """Milliseconds per step in the backward pass."""
    loader: float
    """Milliseconds per step in which the loop waits for batches."""
    waits: float
    """Milliseconds per step of the host in calls that wait for the device."""
    wait_calls: float
    """Number of host calls per step that wait for the device."""
    attention: str
    """Implementation of attention that was used."""


def classify_kernel(name: str) -> str:
    """Determine the class of a kernel or operator by its name."""
    lower_name = name.lower()
    if "log_softmax" in lower_name or "logsoftmax" in lower_name:
        return "norms and loss"
    classes = [kind for kind, words in CLASSES.items() if any(word in lower_name for word in words)]
    is_fused = lower_name.startswith("triton_") or "cpp_fused_" in lower_name
    if is_fused:
        # The name lists all fused operations, including casts, which do not copy in a fused kernel.
        classes = [kind for kind in classes if kind != "copies"]
        if not lower_name.startswith("triton_tem_"):  # The kernel only adds a bias. The product is another kernel.
            classes = [kind for kind in classes if kind != "matmul"]
    return next(iter(classes), "element-wise")


def analyze(events: Iterable[Any], steps: int, seconds: float, *, cuda: bool) -> Profile:
    """Compute the profile from the events of ``steps`` steps that took ``seconds``."""
    events = list(events)
    work = [e for e in events if e.device_type.name == ("CUDA" if cuda else "CPU")]
    # Named ranges, such as an optimizer's step, would count the work inside them twice.
    work = [e for e in work if not (e.is_user_annotation or e.name.startswith(("autograd::engine", "cuda")))]
    work = [e for e in work if not is_python_frame(e.name)]
    sums: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for event in work:
        microseconds = event.time_range.elapsed_us() if cuda else event.self_cpu_time_total
        sums[event.name][0] += 1
        sums[event.name][1] += microseconds / 1000
    kernels = [Kernel(name, classify_kernel(name), int(calls), total) for name, (calls, total) in sums.items()]
    kernels.sort(key=lambda kernel: -kernel.milliseconds)
    by_class: dict[str, float] = defaultdict(float)
    for kernel in kernels:
        by_class[kernel.kind] += kernel.milliseconds / steps
    host = [e for e in events if e.device_type.name == "CPU"]
    gaps = idle_gaps(work, host) if cuda else {}
    waits = [e for e in host if e.name.lower() in WAITS]

    def time_within(prefix: str) -> float:
        ranges = [e for e in host if e.name.startswith(prefix)]
        return sum(e.device_time_total if cuda else e.cpu_time_total for e in ranges) / 1000 / steps

    return Profile(
        steps=steps,
        step=seconds * 1000 / steps,
        kernels=kernels,
        by_class=dict(sorted(by_class.items(), key=lambda item: -item[1])),
        idle=sum(gaps.values()) / steps,
        gaps={cause: total / steps for cause, total in gaps.items()},
        forward=time_within(FORWARD),
        backward=time_within("autograd::engine::evaluate_function"),
        loader=sum(e.cpu_time_total for e in host if e.name == NEXT_BATCH) / 1000 / steps,
        waits=sum(e.self_cpu_time_total for e in waits) / 1000 / steps,
        wait_calls=len([e for e in waits if e.name == "aten::item" or cuda]) / steps,
        attention=attention_kernel(kernel.name for kernel in kernels),
    )


def is_python_frame(name: str) -> bool:
    """Return whether a name in the trace belongs to a Python function rather than an operator."""
    return "): " in name or name.startswith(("<built-in", "nn.Module: ", "ProfilerStep"))


def attention_kernel(names: Iterable[str]) -> str:
    """Find the implementation of attention by the ``names`` of kernels."""
    names = [name.lower() for name in names]
    for kernel, words in ATTENTION_KERNELS.items():
        if any(word in name for name in names for word in words):
            return kernel
    return "not fused"


def idle_gaps(kernels: list[Any], host: list[Any]) -> dict[str, float]:
    """Compute the milliseconds in which the GPU was idle, by the activity of the host."""
    gaps: dict[str, float] = defaultdict(float)
    causes = [(cause, e) for e in host if (cause := _cause(e.name))]
    spans = sorted((e.time_range.start, e.time_range.end) for e in kernels)
    busy_until = spans[0][1] if spans else 0.0
    for start, end in spans[1:]:
        if start - busy_until > MIN_GAP_MICROSECONDS:
            covering = [c for c, e in causes if e.time_range.start < start and e.time_range.end > busy_until]
            gaps[covering[0] if covering else "launching"] += (start - busy_until) / 1000
        busy_until = max(busy_until, end)
    return dict(gaps)


def _cause(name: str) -> str | None:
    lower_name = name.lower()
    if name == NEXT_BATCH:
        return "loader"
    if lower_name in WAITS:
        return "synchronization"
    return "copying" if lower_name.startswith("cudamemcpy") else None


def findings(profile: Profile, *, optimizer: str, compiled: bool, cuda: bool, attention: bool = True) -> list[str]:
    """Write sentences about conspicuous values of a profile; empty if there are none."""
    total = sum(profile.by_class.values()) or 1.0
    fractions = {kind: milliseconds / total for kind, milliseconds in profile.by_class.items()}
    device = "GPU" if cuda else "CPU"
    sentences = []
    for kind, fraction in list(fractions.items())[:1]:
        sentences.append(
            f"Kernels of the class {kind} take {fraction:.0%} of the {device}'s time: {profile.by_class[kind]:.2f} ms "
            "per step."
        )
    waits = profile.gaps.get("synchronization", 0.0) if cuda else profile.waits
    if profile.wait_calls >= 1 and waits > 0.001 * profile.step:
        sentences.append(
            f"The loop waits for the device {profile.wait_calls:.0f} times per step (`.item()` and similar calls): "
            f"{waits:.2f} ms per step."
        )
    loader = profile.gaps.get("loader", 0.0) if cuda else profile.loader
    if loader > 0.01 * profile.step:
        sentences.append(f"The {device} waits {loader:.2f} ms per step for batches ({loader / profile.step:.1%}).")
    if cuda and profile.idle > 0.02 * profile.step:
        cause = max(profile.gaps, key=lambda name: profile.gaps[name])
        sentences.append(f"The GPU is idle {profile.idle:.2f} ms per step. The main cause is {cause}.")
    if not compiled and fractions.get("element-wise", 0) > 0.2:
        percent = f"{fractions['element-wise']:.0%}"
        sentences.append(f"Element-wise operations take {percent} of the time. Use --compile whole to fuse them.")
    if optimizer == "adamw" and fractions.get("optimizer", 0) + fractions.get("element-wise", 0) > 0.1:
        sentences.append("The optimizer launches many small kernels. Use --optimizer adamw-fused, which has one.")
    if attention and profile.attention == "not fused":
        sentences.append("Attention is not fused, so the T x T matrix is written to memory. Use --attention auto.")
    if profile.forward and profile.backward:
        sentences.append(f"The backward pass takes {profile.backward / profile.forward:.1f} times the forward pass.")
    return sentences
