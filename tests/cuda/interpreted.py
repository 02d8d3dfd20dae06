"""A compiled step as a GPU would run it, computed on the CPU and compared with eager fp32.

    tests/cuda/interpreted.py [--record FILE.json] [STEP ...]    # in the environment of make test-cuda

Inductor compiles the forward and backward pass of GPT-2 for a pretended A100: two layers of 124M's width with its
vocabulary. Triton's interpreter computes the kernels that Inductor wrote, and :mod:`compute` the matrix products and
attention between them, over the pretended device's memory. The loss and every gradient are compared with the same model
in eager fp32 on the CPU, whose gradient is also cut off at 16 bits for a scale.

The interpreter computes block after block. What depends on the order of blocks, on a race, or on the rounding of the
hardware's own functions is not seen. What it lacks has a stand-in, see :data:`STAND_INS`.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from importlib.machinery import SourceFileLoader
from importlib.metadata import version
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/cuda")]

STEPS: dict[str, dict[str, Any]] = {
    "bf16": {"precision": "bf16", "loss": "plain"},
    "bf16, fused loss": {"precision": "bf16", "loss": "fused"},
    "bf16-activations": {"precision": "bf16-activations", "loss": "plain"},
    "bf16-activations, fused loss": {"precision": "bf16-activations", "loss": "fused"},
    "bf16-activations, fused loss, full recomputation": {
        "precision": "bf16-activations", "loss": "fused", "checkpointing": "full",
    },
    "bf16, budget of recomputation": {"precision": "bf16", "loss": "plain", "checkpointing": "budget"},
}  # fmt: skip
"""The steps of the record, by name."""

PLANTED = {
    "linear": ("train/models/linear.py", "sum(0).flatten()", "sum(0).neg().flatten()"),
    "loss": ("train/models/loss.py", "target_logarithms.expm1()", "-target_logarithms.expm1()"),
    "embedding": ("train/models/embedding.py", "embedding_gradient.to(sum_type)", "-embedding_gradient.to(sum_type)"),
}
"""(file, its code, the code with a wrong sign) of the forms that only code compiled for a GPU takes."""

STAND_INS = {
    "libdevice": "its functions, which are machine code of NVIDIA's, by numpy in the same type",
    "bf16": "casts from fp32 to the nearest, as a GPU does; the interpreter cuts them off",
}

LIBDEVICE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "exp": np.exp,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "tanh": np.tanh,
}

LAYERS, CONTEXT_LENGTH = 2, 64
"""The interpreter's time grows with both; GPT-2's vocabulary and width are not reduced."""


def main() -> None:
    """Compute the steps, each in a process of its own; print and record the errors."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("steps", nargs="*", metavar="STEP", default=list(STEPS))
    parser.add_argument("--record", type=Path)
    parser.add_argument("--compute", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.compute is not None:
        print(json.dumps(compare(**options.compute)))
        sys.stdout.flush()
        os._exit(0)
    rows = {name: step(STEPS[name]) for name in options.steps}
    for name, row in rows.items():
        kernels, error = sum(row["kernels"].values()), row["errors"][row["worst"]]
        losses = f"loss {row['loss']:.5f} for {row['reference']:.5f}"
        print(f"{name:50} {losses}, {kernels} kernels, worst gradient {error:.2%} off ({row['worst']})")
    if options.record:
        versions = {name: version(name) for name in ("torch", "triton")}
        command = " ".join(["python", *sys.orig_argv[1:]])
        shape = {"layers": LAYERS, "context_length": CONTEXT_LENGTH}
        record = {"command": command, "versions": versions, "shape": shape, "stand-ins": STAND_INS, "steps": rows}
        options.record.write_text(json.dumps(record, indent=1) + "\n")


def step(settings: dict[str, Any]) -> dict[str, Any]:
    """Return what :func:`compare` finds with ``settings``, in a process of its own."""
    from build import GPU, environment  # type: ignore[import-not-found]

    with tempfile.TemporaryDirectory() as cache:
        started = environment() | {"TORCHINDUCTOR_CACHE_DIR": cache, GPU: "A100", "TRITON_INTERPRET": "1"}
        command = [sys.executable, "-P", __file__, "--compute", json.dumps(settings)]
        done = subprocess.run(command, env=started, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr)
        return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def compare(*, planted: str | None = None, vocab_size: int | None = None, **settings: Any) -> dict[str, Any]:
    """Return the loss, the reference's, the errors of all gradients, and how often each kernel was computed.

    ``planted`` names an error that the product is given; ``vocab_size`` makes it quicker than with GPT-2's. An error is
    the norm of the difference, relative to the norm of the reference's gradient.
    """
    if planted:
        _plant(*PLANTED[planted])
    import torch
    from compute import OnCpu, misuses  # type: ignore[import-not-found]

    from infra.device.hardware import device_info
    from train.config import TrainConfig
    from train.loop.execution import autocast_context, build_model, compile_model
    from train.model_config import parse_model
    from train.resolved import resolve

    class WithCompiled(OnCpu):
        @classmethod
        def ignore_compile_internals(cls) -> bool:
            return True  # or torch would not run compiled code while a mode is entered

    computed = stand_in()
    shape = replace(parse_model("gpt2-124m"), layers=LAYERS, context_length=CONTEXT_LENGTH)
    if vocab_size:
        shape = replace(shape, vocab_size=vocab_size, padded_vocab_size=-(-vocab_size // 64) * 64)
    chosen: dict[str, Any] = {"attention": "flash", "compile": "whole", "device": "cuda"} | settings
    config = resolve(TrainConfig.of(model=shape, micro_batch=1, global_batch=1, **chosen), device_info())
    build = config.model, config.execution, config.optimization.optimizer, config.dataset.seed
    ids = torch.randint(shape.vocab_size, (1, CONTEXT_LENGTH + 1), generator=torch.Generator().manual_seed(0))
    torch.set_float32_matmul_precision("high")
    model = build_model(*build, torch.device("cuda", 0))
    weights = {name: weight.cpu() for name, weight in model.state_dict().items()}
    forward, on_device = compile_model(model, config.execution), ids.cuda()
    with WithCompiled():
        with autocast_context(config.execution):
            loss = forward(on_device[:, :-1], on_device[:, 1:])
        loss.backward()
        torch.cuda.synchronize()
    gradients = {name: weight.grad.cpu() for name, weight in model.named_parameters() if weight.grad is not None}

    eager = replace(config.execution, precision="fp32", loss="plain", checkpointing="none", attention="manual")
    reference = build_model(config.model, eager, *build[2:], torch.device("cpu"))
    reference.load_state_dict(weights)
    expected = reference(ids[:, :-1], ids[:, 1:])
    expected.backward()
    errors = {
        name: float((gradients[name].float() - weight.grad).norm() / weight.grad.norm())
        for name, weight in reference.named_parameters()
    }
    return {
        "loss": float(loss.detach().cpu()), "reference": float(expected.detach()), "errors": errors,
        "worst": max(errors, key=lambda name: errors[name]), "kernels": computed, "misuses": misuses(),
    }  # fmt: skip


class _Planted(SourceFileLoader):
    """Imports a module of the product with a piece of its code replaced."""

    def __init__(self, name: str, file: Path, code: str, wrong: str) -> None:
        super().__init__(name, str(file))
        self._code, self._wrong = code, wrong

    def get_code(self, fullname: str) -> CodeType:
        source = Path(self.path).read_text(encoding="utf-8")
        assert source.count(self._code) == 1, f"{self.path} has {self._code!r} {source.count(self._code)} times"
        return self.source_to_code(source.replace(self._code, self._wrong).encode(), self.path)


def _plant(file: str, code: str, wrong: str) -> None:
    """Import the module of ``file`` with ``wrong`` in place of its ``code``."""
    name = file.removesuffix(".py").replace("/", ".")
    spec = importlib.util.spec_from_loader(name, _Planted(name, ROOT / file, code, wrong))
    assert spec
    assert spec.loader
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def stand_in() -> Counter[str]:
    """Complete the interpreter, and return the number of times that each kernel is computed, as it grows."""
    import triton.language as tl  # type: ignore[import-not-found]
    from torch._inductor.runtime.triton_helpers import libdevice  # type: ignore[attr-defined]
    from triton.runtime import interpreter  # type: ignore[import-not-found]

    convert = interpreter._convert_float

    def to_the_nearest(values: np.ndarray, of: Any, to: Any, rounding: Any) -> np.ndarray:
        if (of, to) == (tl.bfloat16, tl.float32):
            return values.view(np.uint16).astype(np.uint32) << 16
        if (of, to) == (tl.float32, tl.bfloat16):
            bits = np.ascontiguousarray(values).view(np.uint32)
            return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
        return convert(values, of, to, rounding)

    interpreter._convert_float = to_the_nearest
    for name, function in LIBDEVICE.items():
        setattr(libdevice, name, _by_numpy(function))

    computed: Counter[str] = Counter()
    run = interpreter.InterpretedFunction.run

    def counted(self: Any, *inputs: Any, **launch: Any) -> Any:
        computed[self.__name__] += 1
        return run(self, *inputs, **launch)

    interpreter.InterpretedFunction.run = counted
    return computed


def _by_numpy(function: Callable[[np.ndarray], np.ndarray]) -> Callable[..., Any]:
    import triton.language as tl  # type: ignore[import-not-found]
    from triton.runtime import interpreter  # type: ignore[import-not-found]

    def compute(x: Any, _semantic: Any = None) -> Any:
        values = x.handle.data
        return tl.core.tensor(interpreter.TensorHandle(function(values).astype(values.dtype), x.type.scalar), x.type)

    return compute


if __name__ == "__main__":
    main()
