"""What GPT-2's training step allocates and reserves on a GPU, against what is predicted, by setting of the allocator.

    tests/benchmarks/memory_cuda.py [--record FILE.json] [--again]    # in the environment of make test-cuda

Each row trains for four steps in a fresh process, on a GPU or where there is none on the pretended one of tests/cuda.
There torch's allocator, autograd and Inductor's lowering are the real ones, so that memory is what it would be, and
kernels are not compiled and do nothing. Rows that are in the record already are not measured again unless --again is
given; predictions are always made anew.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/cuda")]

from build import GPU, environment  # type: ignore[import-not-found]  # noqa: E402

if TYPE_CHECKING:
    from train.config import ResolvedConfig

ALLOCATORS = ("expandable", "default", "split")
COMPARED = 5
"""Rows of the grid that are measured with every allocator, as are those with holes; the others are with the first."""
GRID = [
    {"precision": precision, "compile": compile, "loss": loss, "micro_batch": size}
    for size, precision, compile, loss in (
        (32, "bf16", "off", "plain"),
        (64, "bf16-activations", "whole", "plain"),
        (64, "bf16", "whole", "plain"),
        (32, "bf16", "whole", "plain"),
        (64, "bf16-activations", "off", "fused"),
        (16, "bf16", "whole", "plain"),
        (32, "bf16", "off", "fused"),
        (32, "fp16", "off", "fused"),
        (32, "fp16", "whole", "plain"),
        (32, "bf16-activations", "off", "plain"),
        (64, "bf16", "whole", "fused"),
        (32, "bf16", "blocks", "plain"),
        (64, "bf16-activations", "blocks", "fused"),
        (4, "bf16", "whole", "plain"),
        (4, "bf16", "off", "plain"),
        (4, "bf16", "blocks", "plain"),
    )
]
"""GPT-2 124M with 1,024 tokens, in the order of what they tell."""
OTHERS = [
    {"precision": "bf16", "compile": "whole", "loss": "plain", "micro_batch": 4, "model": "gpt2-124m,tied=False"},
    {"precision": "bf16", "compile": "whole", "loss": "plain", "micro_batch": 64, "context": 512},
    {"precision": "bf16", "compile": "off", "loss": "plain", "micro_batch": 64, "context": 512},
    {"precision": "bf16", "compile": "whole", "loss": "plain", "micro_batch": 16, "accumulation": 2},
    {"precision": "bf16", "compile": "off", "loss": "fused", "micro_batch": 16, "accumulation": 2},
    {"precision": "bf16", "compile": "off", "loss": "plain", "micro_batch": 8, "model": "gpt2-355m"},
    {"precision": "bf16", "compile": "whole", "loss": "plain", "micro_batch": 16, "model": "gpt2-355m"},
    {"precision": "bf16", "compile": "whole", "loss": "plain", "micro_batch": 64, "model": "gpt2-355m", "gpu": "H100"},
]
"""A head of its own, another context length, accumulation, and a larger model on cards of 40 and 80 GB."""


def main() -> None:
    """Measure what the record lacks, compare, print and record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--record", type=Path)
    parser.add_argument("--again", action="store_true", help="measure all rows, also those in the record")
    parser.add_argument("--row", type=json.loads, help="measure this alone, in this process")
    options = parser.parse_args()
    if options.row is not None:
        print(json.dumps(measured(**options.row)))
        sys.stdout.flush()
        os._exit(0)
    record: dict[str, Any] = {"rows": []}
    if options.record and options.record.exists() and not options.again:
        record = json.loads(options.record.read_text())
    record |= {"command": " ".join(["python", *sys.orig_argv[1:]]), "versions": {"torch": version("torch")}}
    started = environment()
    record["device"] = "pretended" if GPU in started else "the GPU of this machine"
    plain = {"model": "gpt2-124m", "context": 1024, "accumulation": 1, "gpu": "A100"}
    wanted = [row | {"allocator": ALLOCATORS[0]} for row in sorted(GRID + OTHERS, key=lambda row: row["compile"])]
    holes = [row for row in GRID[COMPARED:] + OTHERS if (row["compile"], row["loss"]) == ("off", "plain")]
    wanted += [row | {"allocator": name} for row in GRID[:COMPARED] + holes for name in ALLOCATORS[1:]]
    with tempfile.TemporaryDirectory() as cache:
        started["TORCHINDUCTOR_CACHE_DIR"] = cache  # a graph is lowered once for all settings of the allocator
        for row in (plain | asked for asked in wanted):
            found = next((known for known in record["rows"] if row.items() <= known.items()), None)
            if found is None:
                command = [sys.executable, "-P", __file__, "--row", json.dumps(row)]
                chosen = started | ({GPU: row["gpu"]} if GPU in started else {})
                done = subprocess.run(command, env=chosen, stdout=subprocess.PIPE, text=True, check=True)
                found = row | json.loads(done.stdout.splitlines()[-1])
                record["rows"].append(found)
            found |= compared(found)
            print(line(found), flush=True)
            if options.record:
                options.record.write_text(json.dumps(record, indent=1) + "\n")


def config(data: Path, row: dict[str, Any]) -> "ResolvedConfig":
    """Four steps of training on the GPU, as ``row`` describes them."""
    from dataclasses import replace

    from train.config import Cycle, ResolvedConfig
    from train.model_config import parse_model

    return ResolvedConfig.of(
        data=str(data), model=replace(parse_model(row["model"]), context_length=row["context"]), device="cuda",
        micro_batch=row["micro_batch"], global_batch=row["micro_batch"] * row["accumulation"], attention="flash",
        precision=row["precision"], allocator=row["allocator"], compile=row["compile"], loss=row["loss"],
        steps=4, cycle=Cycle(4, 0), keep_checkpoints=0, max_loss_spike=0.0,
    )  # fmt: skip


def measured(**row: Any) -> dict[str, Any]:
    """Peak bytes allocated and reserved by four steps, how they ended, and the device allocations of the last two."""
    import numpy as np
    import torch

    from pipeline.shards import Manifest, ShardRow, write_shard
    from train.data.sources import source_of
    from train.loop.trainer import Callbacks, Trainer

    if GPU in os.environ:
        from compute import compile_nothing  # type: ignore[import-not-found]

        compile_nothing()
    allocations: list[int] = []

    def after_a_step() -> bool:
        allocations.append(torch.cuda.memory_stats()["num_device_alloc"])
        return False

    with tempfile.TemporaryDirectory() as folder:
        tokens = np.random.default_rng(0).integers(0, 50_000, 400_000).astype(np.uint16)
        shard = write_shard(
            Path(folder), "train/000000-000.arrow", "train",
            [ShardRow("book", "Book", None, "en", "made", "0" * 64, len(tokens), tokens)],
        )  # fmt: skip
        Manifest.of([shard], config={}, tokenizer_sha256="made", inputs={}, report={}).write(Path(folder))
        training = config(Path(folder), row)
        data = source_of(training.dataset).open(training.model, training.batch, training.duration.cycle)
        result = Trainer(training, data, Callbacks(should_stop=after_a_step)).run()
    memory = result.memory
    return {
        "outcome": result.outcome, "allocated": memory and memory.allocated, "reserved": memory and memory.reserved,
        "late_allocations": allocations[-1] - allocations[1] if allocations else None,
    }  # fmt: skip


def compared(row: dict[str, Any]) -> dict[str, Any]:
    """The prediction for ``row`` and its errors, as shares."""
    from train.estimate.memory import predict_peak

    peak = predict_peak(config(Path(), row).step)
    found: dict[str, Any] = {"predicted": peak.allocated, "predicted_reserved": peak.reserved, "moment": peak.moment}
    if row["outcome"] == "finished":
        found["error"] = round(peak.allocated / row["allocated"] - 1, 4)
        found["unused"] = round(row["reserved"] / row["allocated"] - 1, 4)
        found["reserved_error"] = round(peak.reserved / row["reserved"] - 1, 4)
    return found


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    name = "{model} {gpu} T{context} m{micro_batch}x{accumulation} {precision} {compile} {loss}".format(**row)
    if row["outcome"] != "finished":
        return f"{name:62} {row['allocator']:10} {row['outcome']}"
    return "{:62} {allocator:10} {:6.2f} {error:+7.1%} {:6.2f} {unused:+7.1%}".format(
        name, row["allocated"] / 1e9, row["reserved"] / 1e9, **row
    )


if __name__ == "__main__":
    main()
