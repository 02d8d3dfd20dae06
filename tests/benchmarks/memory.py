"""Does predicted peak memory grow with the micro-batch as the process's does? And what do the ways to a loss cost?

    python -P tests/benchmarks/memory.py [--record FILE.json]

Two micro-batches of each combination train for two steps, each in a fresh process, and the growth of the peak resident
memory between them is compared with the prediction's: what Python and its libraries take cancels out. The peak is that
of the second step (the kernel's high-water mark is set back behind the first, which compiles). The C library is told to
give every freed block of 64 KB or more back to the system at once, so that resident memory is what tensors occupy.

Then each loss is computed alone, forward and backward, and its peak and processor time are taken. Points that are in
the record already are not measured again; predictions are always made anew.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_TOP_PAD_": "0", "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1",
}  # fmt: skip
"""What a process that is measured must be started with; of its own a folder for Inductor's cache."""
BATCHES = {
    "tiny": (4, 20),
    "small,layers=2": (1, 4),
    "gpt2-355m,layers=2,vocabulary=8192,padded_vocabulary=8192": (1, 2),
}
"""Models and their two micro-batches: logits weigh most in the first, layers in the last."""
COMBINATIONS = [
    {"model": model, "precision": precision, "compile": compile, "loss_chunks": chunks}
    for model, precision in [*((model, "fp32") for model in BATCHES), ("tiny", "bf16")]
    for compile in ("off", "whole", "blocks")
    for chunks in (1, 8)
]
LOSSES = ("plain", "computed again", "fused")
TOKENS, WIDTH, VOCABULARY = 2048, 256, 50304


def main() -> None:
    """Measure what the record lacks, compare, print and record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--record", type=Path)
    parser.add_argument("--point", type=json.loads, help="measure this alone, in this process")
    options = parser.parse_args()
    if options.point is not None:
        print(json.dumps(loss_alone(**options.point) if "loss" in options.point else training(**options.point)))
        sys.stdout.flush()
        os._exit(0)  # nothing that ends a process belongs to what was measured
    record: dict[str, Any] = {"points": [], "losses": []}
    if options.record and options.record.exists():
        record = json.loads(options.record.read_text())
    record |= {
        "command": " ".join(["python", *sys.argv]),
        "versions": {name: version(name) for name in ("torch", "numpy")},
        "environment": ENVIRONMENT,
    }
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | ENVIRONMENT | {"TORCHINDUCTOR_CACHE_DIR": cache}
        losses = [{"loss": loss, "compile": compile} for compile in (False, True) for loss in LOSSES]
        points = [c | {"micro_batch": size} for c in COMBINATIONS for size in BATCHES[c["model"]]]
        for kind, wanted in (("points", points), ("losses", losses)):
            for point in wanted:
                if not any(point.items() <= row.items() for row in record[kind]):
                    command = [sys.executable, "-P", __file__, "--point", json.dumps(point)]
                    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
                    record[kind].append(point | json.loads(done.stdout.splitlines()[-1]))
                    print(record[kind][-1], flush=True)
                    if options.record:
                        options.record.write_text(json.dumps(record, indent=2) + "\n")
    record["growth"] = sorted((compared(c, record["points"]) for c in COMBINATIONS), key=lambda row: -abs(row["error"]))
    for row in record["growth"]:
        print(
            "{model:58} {precision:5} {compile:7} {loss_chunks} {measured:14,} {predicted:14,} {error:+8.1%}".format(
                **row
            )
        )
    if options.record:
        options.record.write_text(json.dumps(record, indent=2) + "\n")


def compared(combination: dict[str, Any], points: list[dict[str, Any]]) -> dict[str, Any]:
    """Measured and predicted growth of ``combination`` between its two micro-batches, in bytes."""
    from train.estimate.memory import predict_peak

    small, large = (row for row in points if combination.items() <= row.items())
    measured = large["peak"] - small["peak"]
    predicted = [
        predict_peak(config(Path(), **combination, micro_batch=row["micro_batch"])).total for row in (small, large)
    ]
    growth = predicted[1] - predicted[0]
    return combination | {"measured": measured, "predicted": growth, "error": round(growth / measured - 1, 4)}


def config(data: Path, *, model: str, micro_batch: int, **settings: Any) -> Any:
    """Two steps of training on the CPU."""
    from train.config import Cycle, TrainConfig
    from train.model_config import parse_model

    return TrainConfig(
        data=data, model=parse_model(model), micro_batch=micro_batch, global_batch=micro_batch, device="cpu", steps=2,
        cycle=Cycle(2, 0), keep_checkpoints=0, **settings,
    )  # fmt: skip


def training(**settings: Any) -> dict[str, Any]:
    """Peak resident memory of a training's second step, and what was resident before it, in bytes."""
    import numpy as np
    import torch

    from pipeline.shards import Manifest, ShardRow, write_shard
    from train.loop.trainer import Trainer

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        tokens = np.random.default_rng(0).integers(0, 256, 20_000).astype(np.uint16)
        row = ShardRow("book", "Book", None, "en", "made", "0" * 64, len(tokens), tokens)
        shard = write_shard(Path(folder), "train/00000.arrow", "train", [row])
        manifest = Manifest.of([shard], config={}, vocabulary_sha256="made", inputs={}, report={})
        manifest.write(Path(folder))
        before: list[int] = []

        def after_a_step() -> bool:
            before.append(forget_peak())
            return False

        trainer = Trainer(config(Path(folder), **settings), should_stop=lambda: not before and after_a_step())
        result = trainer.run()
    assert result.outcome == "finished", result.reason
    return {"peak": resident("VmHWM"), "before": before[0]}


def loss_alone(loss: str, compile: bool) -> dict[str, Any]:
    """Growth of the peak over what was resident, in bytes, and processor seconds, of a loss forward and backward."""
    import torch
    from torch.utils.checkpoint import checkpoint

    from train.model.loss import fused, plain

    torch.set_num_threads(1)
    torch.manual_seed(0)
    hidden = torch.randn(1, TOKENS, WIDTH, requires_grad=True)
    head = (torch.randn(VOCABULARY, WIDTH) * 0.02).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (1, TOKENS))

    def again() -> torch.Tensor:
        """Each piece's logits computed once more in the backward pass."""
        pieces = zip(hidden.chunk(8, 1), targets.chunk(8, 1), strict=True)
        return sum(checkpoint(plain, part, head, wanted, use_reentrant=False) for part, wanted in pieces) / 8  # type: ignore[return-value]

    losses: dict[str, Callable[[], torch.Tensor]] = {
        "plain": lambda: plain(hidden, head, targets),
        "computed again": again,
        "fused": lambda: fused(hidden, head, targets, 8),
    }
    function = torch.compile(losses[loss], dynamic=False) if compile else losses[loss]
    seconds: list[float] = []
    before = 0
    for repeat in range(4):
        hidden.grad = head.grad = None
        if repeat == 1:  # it has compiled
            before = forget_peak()
        start = time.process_time()
        function().backward()
        seconds.append(round(time.process_time() - start, 2))
    return {"growth": resident("VmHWM") - before, "cpu_seconds": seconds[1:]}


def resident(name: str) -> int:
    """VmRSS, the bytes of this process in memory, or VmHWM, the most there have been (proc_pid_status(5))."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def forget_peak() -> int:
    """Set the high-water mark back to what is resident now (proc_pid_clear_refs(5)), and return that."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


if __name__ == "__main__":
    main()
