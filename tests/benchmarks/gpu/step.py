"""One step of ``campaign.py``, in a process of its own: what it found, as JSON on the last line.

    python -P tests/benchmarks/gpu/step.py train --data data/tokens --settings '{"micro_batch": 60}'

In: the kind of step and its settings. It runs where there is neither Ray nor MLflow.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from infra.device.gpu import read_gpu
from infra.device.hardware import device_info
from infra.errors import first_line
from train.config import Cycle, TrainConfig
from train.data.sources import source_of
from train.estimate.memory import predict_peak
from train.loop.execution import autocast_context
from train.loop.trainer import Trainer
from train.model_config import parse_model
from train.profile.record import record
from train.profile.trace import attention_kernel
from train.resolved import resolve, resolve_local

Found = dict[str, Any]

SHAPES = {
    "qkv": (768, 2304),
    "attention projection": (768, 768),
    "feed-forward up": (768, 3072),
    "feed-forward down": (3072, 768),
    "head": (768, 50304),
}
"""(inner, columns) of GPT-2 124M's matrix products; rows are tokens."""


def main() -> None:
    """Do the step and print what it found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kind", choices=STEPS)
    parser.add_argument("--data", default="data/tokens")
    parser.add_argument("--settings", type=json.loads, default={})
    parser.add_argument("--model", default="gpt2-124m")
    parser.add_argument("--global-batch", type=int, default=480, help="sequences per step")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=3.0, help="for each ceiling")
    print(json.dumps(STEPS[parser.parse_args().kind](parser.parse_args())))


def versions(options: argparse.Namespace) -> Found:
    """Libraries, card and clocks, whether NVML's process ids are ours, and the kernel that ``sdpa`` runs."""
    device = _device()
    kind = next(iter(_matmul_kinds(device).values()))
    q = torch.randn(8, 12, 1024, 64, device=device, dtype=kind).requires_grad_()
    state = read_gpu()
    installed = {}
    for name in ("torch", "triton", "transformers", "torchao", "ray", "mlflow"):
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "device": _name(device), "versions": installed, "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(), "gpu": vars(state) if state else None, "pid": os.getpid(),
        "sdpa": _kernel(lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()),
    }  # fmt: skip


def ceilings(options: argparse.Namespace) -> Found:
    """FLOP/s by the median over some seconds, until the card's clocks are steady: large products, and GPT-2's own.

    The model multiplies by a weight of (outputs, inputs): transposed in the forward pass, as it is for the gradient of
    the inputs; for that of the weight it multiplies the transposed gradient by the inputs.
    """
    device = _device()
    kinds = _matmul_kinds(device)
    side, rows = (8192, 32 * 1024) if device.type == "cuda" else (256, 256)
    large: dict[str, float] = {}
    for name, kind in kinds.items():
        torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
        one, other = (torch.randn(side, side, device=device, dtype=kind) for _ in range(2))
        large[name] = _rate(2 * side**3, lambda one=one, other=other: one @ other, options.seconds)
    kind = next(iter(kinds.values()))
    model: dict[str, float] = {}
    for name, (inner, columns) in SHAPES.items():
        inputs = torch.randn(rows, inner, device=device, dtype=kind)
        weight = torch.randn(columns, inner, device=device, dtype=kind)
        gradient = torch.randn(rows, columns, device=device, dtype=kind)
        products: dict[str, Callable[[], object]] = {
            "forward": lambda inputs=inputs, weight=weight: inputs @ weight.T,
            "inputs": lambda gradient=gradient, weight=weight: gradient @ weight,
            "weight": lambda gradient=gradient, inputs=inputs: gradient.T @ inputs,
        }
        for product, work in products.items():
            model[f"{name}, {product}"] = _rate(2 * rows * inner * columns, work, options.seconds)
    state = read_gpu()
    return {"device": _name(device), "matmul": large, "model_matmul": model, "sm_clock": state and state.sm_clock}


def _matmul_kinds(device: torch.device) -> dict[str, torch.dtype]:
    """The kinds of matrix products that the device computes in hardware, the fastest first."""
    if device.type == "cpu":
        return {"fp32": torch.float32}
    if torch.cuda.get_device_capability(device) < (8, 0):
        return {"fp16": torch.float16, "fp32": torch.float32}
    return {"bf16": torch.bfloat16, "tf32": torch.float32, "fp32": torch.float32}


def _rate(flops: float, work: Callable[[], object], seconds: float) -> float:
    """FLOP/s of ``work`` by the median of its repetitions during so many seconds, after one to warm up."""
    device = _device()
    work()
    spent: list[float] = []
    until = time.perf_counter() + seconds
    while not spent or time.perf_counter() < until:
        if device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(8):  # so that the launch of the first one is shared by all
                work()
            end.record()
            end.synchronize()
            spent.append(start.elapsed_time(end) / 8000)
        else:
            began = time.perf_counter()
            work()
            spent.append(time.perf_counter() - began)
    return flops / statistics.median(spent)


def train(options: argparse.Namespace) -> Found:
    """A fresh trainer's speed, its memory in every way beside the prediction, and the attention kernel that ran."""
    config = resolve_local(config_of(options))
    data = source_of(config.dataset).open(config.model, config.batch, config.duration.cycle)
    trainer = Trainer(config, data)
    result = trainer.run()
    found: Found = {
        "outcome": result.outcome, "reason": result.reason, "device": result.device, "config": config.to_json(),
        "predicted": predict_peak(config.step).total, "predicted_allocated": predict_peak(config.step).allocated,
        **vars(result.memory), "first_step_seconds": result.first_step_seconds,
        "data_wait_fraction": result.data_wait_fraction, "train_loss": result.train_loss, "mfu": result.mfu,
        "flops_per_second": result.flops_per_second, "step_seconds": trainer.times.steps,
    }  # fmt: skip
    if result.throughput:
        found |= vars(result.throughput)
    state = read_gpu()
    if state:
        found |= {
            "sm_clock": state.sm_clock,
            "temperature": state.temperature,
            "throttle_reasons": state.throttle_reasons,
        }
    if result.outcome == "finished":
        inputs = torch.zeros(
            config.batch.micro_batch, config.model.context_length, dtype=torch.int64, device=trainer.device
        )

        def once() -> None:
            torch.compiler.cudagraph_mark_step_begin()
            with autocast_context(config.execution):
                trainer.forward(inputs, inputs).backward()

        try:
            found["attention"] = _kernel(once)
        except RuntimeError as failure:  # the speed is known all the same
            found["attention"] = first_line(failure)
    return found


def profile(options: argparse.Namespace) -> Found:
    """Where the time of a step goes, by the class of its kernels; without the trace, which is too large."""
    with tempfile.TemporaryDirectory() as folder:
        found, words = record(resolve_local(config_of(options)), Path(folder))
    kernels = [(kernel.name, kernel.kind, kernel.calls, kernel.milliseconds) for kernel in found.kernels[:30]]
    return {"profile": vars(found) | {"kernels": kernels, "findings": words}}


def config_of(options: argparse.Namespace) -> TrainConfig:
    """The run of ``options``, resolved for this machine."""
    size = options.settings.get("micro_batch", 32)
    config = TrainConfig.of(
        data=str(Path(options.data).resolve()), model=parse_model(options.model), global_batch=options.global_batch,
        micro_batch=size, steps=options.steps, cycle=Cycle(options.steps, 0), keep_checkpoints=0, compile="off",
        loss="plain",
    )  # fmt: skip
    return resolve(config.replace(**options.settings), device_info())


def _kernel(work: Callable[[], object]) -> str:
    """The attention kernel that ``work`` launches, by its name in a profile."""
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds[: 1 + torch.cuda.is_available()]) as recorder:
        work()
    return attention_kernel(event.key for event in recorder.key_averages())


def _device() -> torch.device:
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


STEPS = {"versions": versions, "ceilings": ceilings, "train": train, "profile": profile}

if __name__ == "__main__":
    main()
