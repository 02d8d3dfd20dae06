"""The kernels of a training step as Inductor lowers it for a GPU: how many, and the bytes that they move.

    tests/cuda/kernels.py [--record FILE.json]    # in the environment of make test-cuda

The forward and backward pass of GPT-2 for one micro-batch, without the optimizer. Models of 2 and 4 layers are
lowered, and the whole one follows from the difference, because every block adds the same kernels. The fused loss is one
operator for Inductor: the kernels that it launches are counted by its calls. Nothing is compiled or run, so that a
change that costs a GPU a pass over the logits is seen without one. Inductor counts whole tensors; of the logits that
the loss looks up, one sector of each row is counted instead. The roofline is that of an A100 without the optimizer: of
nanoGPT's model too, which is lowered as it is written.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/cuda")]

STEPS: dict[str, dict[str, Any]] = {
    "bf16": {"precision": "bf16"},
    "bf16-activations, plain loss": {"precision": "bf16-activations", "loss": "plain"},
    "bf16-activations": {"precision": "bf16-activations"},
    "bf16-activations, no biases": {"precision": "bf16-activations", "bias": False},
    "bf16-activations, GPT-2 355M": {"precision": "bf16-activations", "model": "gpt2-355m"},
    "nanoGPT": {"peer": True, "loss": "plain"},
}
"""The steps of the record, by name; the loss is fused, as is the default on a GPU, unless a name says otherwise."""

SEQUENCES = 16
"""Inductor counts at most 10^9 elements for one access; the logits of 16 sequences of 1,024 tokens have 0.8 x 10^9."""
MODEL, LAYERS = "gpt2-124m", (2, 4)
LARGEST = 10
SECTOR = 32
"""Bytes that a GPU reads at the least."""

Kernel = dict[str, Any]


def main() -> None:
    """Lower every step, print and record what was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--record", type=Path)
    parser.add_argument("--lower", type=json.loads, help="lower this alone, in this process")
    options = parser.parse_args()
    if options.lower is not None:
        print(json.dumps(lowered(**options.lower)))
        sys.stdout.flush()
        os._exit(0)
    results = {name: step(settings) for name, settings in STEPS.items()}
    for name, row in results.items():
        speed = f"{row['roofline']:,.0f} tokens/s at most on an A100"
        print(f"{name:32} {row['kernels']:4} kernels, {row['gigabytes']:6.2f} GB for {SEQUENCES} sequences, {speed}")
    if options.record:
        command = " ".join(["python", *sys.orig_argv[1:]])
        record = {"command": command, "versions": {"torch": version("torch")}, "sequences": SEQUENCES, "steps": results}
        options.record.write_text(json.dumps(record, indent=1) + "\n")


def step(settings: dict[str, Any]) -> dict[str, Any]:
    """Kernels, bytes by kind of kernel, and the largest kernels of a step of the whole model."""
    from build import GPU, environment  # type: ignore[import-not-found]

    from train.model_config import PRESETS

    few, more = LAYERS
    added = PRESETS[settings.get("model", MODEL)].layers - few
    started = environment() | {GPU: "A100", "TORCH_LOGS": "inductor_metrics"}
    models: list[list[Kernel]] = []
    for layers in LAYERS:
        command = [sys.executable, "-P", __file__, "--lower", json.dumps(settings | {"layers": layers})]
        with tempfile.TemporaryDirectory() as cache:  # A graph in the cache, as the loss's, would not be lowered.
            own = started | {"TORCHINDUCTOR_CACHE_DIR": cache}
            done = subprocess.run(command, env=own, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr)
        models.append(json.loads(done.stdout.splitlines()[-1]))

    def whole(of: Any) -> float:
        """A sum over the kernels of the whole model."""
        small, large = map(of, models)
        return small + (large - small) * added / (more - few)

    def gigabytes(kind: str = "") -> float:
        return round(whole(lambda kernels: sum(k["bytes"] for k in kernels if kind in k["kind"])) / 1e9, 3)

    largest = sorted(models[0], key=lambda kernel: -kernel["bytes"])[:LARGEST]
    products, attention = gigabytes("mm"), gigabytes("attention")
    return {
        "kernels": round(whole(len)),
        "gigabytes": gigabytes(),
        "of matrix products": products,
        "of attention": attention,
        "of other kernels": (others := round(gigabytes() - products - attention, 3)),
        "roofline": round(roofline(PRESETS[settings.get("model", MODEL)], 1e9 * others)),
        "largest": largest,
    }


def roofline(model: Any, other_bytes: float) -> float:
    """Tokens/s of an A100 if products and attention are bound by arithmetic, and other kernels by their bytes."""
    from train.estimate.gpt2_speed import ATTENTION_EFFICIENCY
    from train.estimate.gpu_rates import load_gpu_rates

    card = load_gpu_rates("A100")
    tokens, rate = SEQUENCES * model.context_length, card.matmul_rate("bf16")
    assert rate
    products = 6 * model.matmul_parameters * tokens / rate
    attention = 6 * model.layers * model.context_length * model.width * tokens / (ATTENTION_EFFICIENCY * rate)
    return tokens / (products + attention + other_bytes / card.bandwidth)


def resources(settings: dict[str, Any], gpu: str) -> list[dict[str, Any]]:
    """What each of Triton's kernels takes of ``gpu``, in all the forms from which Inductor chooses by trying them.

    By cuobjdump, which comes with Triton, ``spilled`` bytes of a thread's registers; by Triton ``shared`` bytes.
    """
    from build import GPU, environment  # type: ignore[import-not-found]
    from triton import knobs  # type: ignore[import-not-found]

    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as cache:
        started = environment() | {"TORCHINDUCTOR_CACHE_DIR": cache, GPU: gpu}
        lower = json.dumps(settings | {"layers": LAYERS[0], "by_triton": True})
        command = [sys.executable, "-P", __file__, "--lower", lower]
        done = subprocess.run(command, env=started, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr)
        for binary in Path(cache).rglob("*.cubin"):
            command = [knobs.nvidia.cuobjdump.path, "-res-usage", str(binary)]
            usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            stack, local = (int(re.findall(rf"{name}:(\d+)", usage)[-1]) for name in ("STACK", "LOCAL"))
            by = json.loads(binary.with_suffix(".json").read_text())
            results.append({"name": by["name"], "arch": by["arch"], "shared": by["shared"], "spilled": stack + local})
    return results


def lowered(
    *, layers: int, model: str = MODEL, bias: bool = True, by_triton: bool = False, peer: bool = False, **settings: Any
) -> list[Kernel]:
    """The kernels of a step, those of the fused loss last; ``by_triton`` compiles those of Triton.

    Those of ``peer`` are of nanoGPT's model.
    """
    import torch
    from compute import compile_nothing, compile_only  # type: ignore[import-not-found]
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from infra.device.hardware import device_info
    from train.config import TrainConfig
    from train.gpu_test.nanogpt import NanoGPT
    from train.loop.execution import autocast_context, build_model, compile_model
    from train.model_config import PRESETS
    from train.resolved import resolve

    compile_only() if by_triton else compile_nothing()
    chosen: dict[str, Any] = {"loss": "fused", "attention": "flash", "compile": "whole", "device": "cuda"} | settings
    shape = replace(PRESETS[model], layers=layers, bias=bias)
    config = TrainConfig.of(model=shape, micro_batch=SEQUENCES, global_batch=SEQUENCES, **chosen)
    config = resolve(config, device_info())
    tokens, ids = SEQUENCES * shape.context_length, shape.padded_vocab_size
    device = torch.device("cuda", 0)
    torch.set_float32_matmul_precision("high")
    if peer:
        forward: Any = torch.compile(NanoGPT(shape).to(device), dynamic=False)
    else:
        module = build_model(shape, config.execution, config.optimization.optimizer, config.dataset.seed, device)
        forward = compile_model(module, config.execution)
    sample = torch.zeros(SEQUENCES, shape.context_length + 1, dtype=torch.int64, device=device)
    autocast = torch.autocast("cuda", torch.bfloat16) if peer else autocast_context(config.execution)
    with autocast, sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        loss = forward(sample[:, :-1], sample[:, 1:])
    loss.backward()
    from torch._inductor import metrics

    kernels = [kernel for node, _ in metrics.nodes_num_elem if (kernel := described(node))]
    if chosen["loss"] == "plain":
        gather = next(kernel for kernel in kernels if "gather" in kernel["operators"])
        gather["bytes"] -= tokens * (2 * ids - SECTOR)
        return kernels
    chunks, calls = loss_calls(tokens, ids, shape.width)
    of_chunk = [kernel for kernel in kernels if f"bfloat16[{tokens // chunks}, {ids}]" in kernel["makes"]]
    others = [kernel for kernel in kernels if kernel not in of_chunk and "fused_cross" not in kernel["kind"]]
    return [*others, *calls, *of_chunk * chunks]


def loss_calls(tokens: int, ids: int, width: int) -> tuple[int, list[Kernel]]:
    """The operators that the fused loss calls for ``tokens`` in bf16 and a head of (``ids``, ``width``), beside what it
    compiles for each chunk.

    Returns: (number of chunks, a kernel for each call).
    """
    import torch
    from step_time import FREE, moved  # type: ignore[import-not-found]
    from torch.utils._python_dispatch import TorchDispatchMode

    from train.models import loss

    operator = loss._fused._init_fn  # Called as an operator, it would hide its own calls.
    chunks = loss.chunk_count("fused", 1, tokens)
    hidden = torch.empty(tokens, width, dtype=torch.bfloat16, device="cuda")
    head, targets = torch.empty(ids, width, device="cuda"), torch.zeros(tokens, dtype=torch.int64, device="cuda")
    results: list[Kernel] = []

    class Calls(TorchDispatchMode):
        """Counts every operator that is called."""

        @classmethod
        def ignore_compile_internals(cls) -> bool:
            return True

        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = operator(*args, **(kwargs or {}))
            name = operator._schema.name.removeprefix("aten::")
            if operator.is_view or name in FREE or not isinstance(result, torch.Tensor) or not result.numel():
                return result
            size = moved([*args, result])
            if name in ("gather", "scatter_"):  # One sector of each row is read, and written by the latter.
                size = moved(args[2:]) + SECTOR * args[2].numel() * (1 + (name == "scatter_"))
            makes = [f"{str(result.dtype).partition('.')[2]}{[*result.shape]}"]
            results.append({"kind": f"loss, {name}", "bytes": size, "operators": [name], "makes": makes})
            return result

    with Calls():
        operator(hidden, head, targets, chunks, ids, True, True)
    return chunks, results


def described(node: Any) -> Kernel | None:
    """A kernel's kind, bytes, operators and outputs; None for what runs nothing."""
    from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode

    size, kind = int(node.get_read_write_buffers_sizes()), "triton"
    if isinstance(node, ExternKernelSchedulerNode):
        kind = str(getattr(node.node, "python_kernel_name", None) or getattr(node.node, "op_overload", "extern"))
    if isinstance(node, NopKernelSchedulerNode) or not size:  # such as one output of a kernel that has several
        return None
    parts = [part.node for part in node.get_nodes() if part.node is not None]
    origins = [origin.target for part in parts for origin in part.get_origins() if origin.op == "call_function"]
    operators = sorted({getattr(target, "__name__", str(target)).partition(".")[0] for target in origins})
    outputs = [(output.node.maybe_get_dtype(), output.node.maybe_get_size()) for output in node.get_outputs()]
    makes = [
        f"{str(dtype).partition('.')[2]}{[int(n) for n in shape]}" for dtype, shape in outputs if shape is not None
    ]
    return {"kind": kind, "bytes": size, "operators": operators, "makes": makes}


if __name__ == "__main__":
    main()
