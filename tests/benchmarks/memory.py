"""Does a training step take the memory that is predicted for it? And what do the ways to a loss cost?

    python -P tests/benchmarks/memory.py [--record FILE.json]

Each combination of model, compilation and loss, in fp32, trains for three steps in a fresh process. What is compared
is the growth of resident memory during the third step, from the weights and the optimizer's state alone to the step's
peak: all that the formula counts beside those two, while Python and its libraries cancel out. (The kernel's high-water
mark is reset after the second step. The first two compile: what is computed inside the fused loss is compiled once
more in the second.) The C library is told to return every freed block of 64 KB or more to the system at once, so that
resident memory is what tensors occupy.

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
from typing import TYPE_CHECKING, Any

from infra.storage.files import write_json

if TYPE_CHECKING:
    from train.config import ResolvedConfig

ENVIRONMENT = {
    "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_TOP_PAD_": "0", "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1",
}  # fmt: skip
"""What a process that is measured must be started with; of its own a folder for Inductor's cache."""
BATCHES = {
    "gpt2-355m,layers=2,vocab_size=8192,padded_vocab_size=8192": 2,
    "small,layers=2": 4,
    "tiny": 20,
}
"""Models and their micro-batches: layers weigh most in the first, logits in the last."""
COMBINATIONS = [
    {"model": model, "precision": "fp32", "compile": compile, "loss_chunks": chunks}
    for model in BATCHES
    for compile in ("off", "blocks", "whole")
    for chunks in (1, 8)
]
WORST = 10
"""Rows of the table that is printed and recorded: the combinations whose predictions are furthest off."""
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
        "command": " ".join(["python", *sys.orig_argv[1:]]),
        "versions": {name: version(name) for name in ("torch", "numpy")},
        "environment": ENVIRONMENT,
    }
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | ENVIRONMENT | {"TORCHINDUCTOR_CACHE_DIR": cache}
        losses = [{"loss": loss, "compile": compile} for compile in (False, True) for loss in LOSSES]
        points = [c | {"micro_batch": BATCHES[c["model"]]} for c in COMBINATIONS]
        for kind, wanted in (("points", points), ("losses", losses)):
            for point in wanted:
                if not any(point.items() <= row.items() for row in record[kind]):
                    command = [sys.executable, "-P", __file__, "--point", json.dumps(point)]
                    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
                    record[kind].append(point | json.loads(done.stdout.splitlines()[-1]))
                    print(record[kind][-1], flush=True)
                    if options.record:
                        write_json(options.record, record)
    record["points"] = [compared(row) for row in record["points"]]
    record["worst"] = sorted(record["points"], key=lambda row: -abs(row["error"]))[:WORST]
    print("{:58} compile chunks {:>12} {:>14} {:>8}".format("the worst: model", "measured", "predicted", "error"))
    for row in record["worst"]:
        print("{model:58} {compile:7} {loss_chunks:6} {measured:12,} {predicted:14,} {error:+8.1%}".format(**row))
    if options.record:
        write_json(options.record, record)


def compared(point: dict[str, Any]) -> dict[str, Any]:
    """``point`` with the growth of memory in its step as measured and as predicted, in bytes, and the moment of it."""
    from train.estimate.memory import predict_peak

    asked = ("model", "precision", "compile", "loss_chunks", "micro_batch")
    found = predict_peak(config(Path(), **{name: point[name] for name in asked}).step)
    predicted = found.allocated - found.weights - found.optimizer
    measured = point["peak"] - point["before"]
    error = round(predicted / measured - 1, 4)
    return point | {"measured": measured, "predicted": predicted, "error": error, "moment": found.moment}


def config(data: Path, *, model: str, micro_batch: int, **settings: Any) -> "ResolvedConfig":
    """Three steps of training on the CPU."""
    from train.config import Cycle, ResolvedConfig
    from train.model_config import parse_model

    return ResolvedConfig.of(
        data=str(data), model=parse_model(model), micro_batch=micro_batch, global_batch=micro_batch, device="cpu",
        steps=3, cycle=Cycle(3, 0), keep_checkpoints=0, **settings,
    )  # fmt: skip


def training(**settings: Any) -> dict[str, Any]:
    """Peak resident memory of a training's third step, and what was resident before it, in bytes."""
    import numpy as np
    import torch

    from pipeline.shards import Manifest, ShardRow, write_shard
    from train.data.sources import source_of
    from train.loop.trainer import Callbacks, Trainer

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        tokens = np.random.default_rng(0).integers(0, 256, 20_000).astype(np.uint16)
        row = ShardRow("book", "Book", None, "en", "made", "0" * 64, len(tokens), tokens)
        shard = write_shard(Path(folder), "train/000000-000.arrow", "train", [row])
        manifest = Manifest.of([shard], config={}, tokenizer_sha256="made", inputs={}, report={})
        manifest.write(Path(folder))
        before: list[int] = []

        def after_a_step() -> bool:
            before.append(forget_peak())
            return False

        training = config(Path(folder), **settings)
        data = source_of(training.dataset).open(training.model, training.batch, training.duration.cycle)
        trainer = Trainer(training, data, Callbacks(should_stop=after_a_step))
        result = trainer.run()
    assert result.outcome == "finished", result.reason
    return {"peak": resident("VmHWM"), "before": before[-1]}


def loss_alone(loss: str, compile: bool) -> dict[str, Any]:
    """Growth of the peak over what was resident, in bytes, and processor seconds, of a loss forward and backward."""
    import torch
    from torch.utils.checkpoint import checkpoint

    from train.models.loss import fused, plain

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
