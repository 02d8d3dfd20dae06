"""What bf16 activations cost in validation loss: pairs of runs in bf16 and in bf16-activations, by ``tune.ladder``.

    python -P tests/benchmarks/precision.py --data tokens --out runs --record FILE.json [--size deep]

Both runs of a pair have the same initial weights and the same batches, and validate on the same windows. A CPU rounds
to bf16 as a GPU does, and more often, because eager code stores what Inductor's kernels keep in fp32. The data need
512 token ids. A ladder in ``--out`` that was interrupted is resumed. The criterion for a default is an upper end of
the 95% interval below 0.005 nats/token, for every model.
"""

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from infra.device.provenance import find_commit
from infra.storage.files import write_json
from pipeline.shards import read_manifest
from train.intervals import t_quantile

MAX_LOSS_NATS = 0.005
"""The loss of learning that a default may cost, in nats/token."""


@dataclass(frozen=True)
class Size:
    """A model, and how it is trained."""

    model: str
    """Value of ``--model``."""
    sequences: int
    """Sequences per step."""
    steps: int
    """Steps per run."""
    seeds: int
    """Number of pairs."""


SIZES = {
    "wide": Size("edu-3m", sequences=4, steps=200, seeds=5),
    "deep": Size("edu-3m,layers=12,width=128,heads=2,context_length=256", sequences=8, steps=300, seeds=8),
}
"""Four blocks of width 256, and as many blocks as GPT-2 124M with heads as wide as its own. Steps of 2,048 tokens."""

VAL_BATCHES = 40

SUITE = """\
from tune.suite.suites import Rung, Suite

SUITE = Suite(
    "precision-{name}", "bf16 activations against bf16",
    {{
        "batch": {batch}, "precision": "bf16", "attention": "sdpa", "optimizer": "adamw-fused", "compile": "off",
        "checkpointing": "none", "loss": "plain", "loss_chunks": 1, "learning_rate": 2e-3, "schedule": "cosine",
    }},
    (Rung("bf16 activations", {{"precision": "bf16-activations"}}, changes_numerics=True),),
    seeds={seeds},
)
"""


def main() -> None:
    """Run a ladder for each size, print the differences, write the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder for the ladders")
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--size", choices=SIZES, help="measure this size alone, and keep the record of the other one")
    options = parser.parse_args()
    sizes = json.loads(options.record.read_text())["sizes"] if options.size else {}
    for name in [options.size] if options.size else SIZES:
        size = SIZES[name]
        climb(name, size, options)
        sizes[name] = result = compare(size, options.out / f"precision-{name}") | describe(options.data)
        low, high = result["change_95_percent"]
        print(f"{size.model}: {result['change']:+.4f} nats/token ({low:+.4f} to {high:+.4f})", flush=True)
    record = {
        "command": "make bench-precision",
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, one thread a run",
        "max_loss_nats": MAX_LOSS_NATS,
        "criterion_met": all(result["change_95_percent"][1] < MAX_LOSS_NATS for result in sizes.values()),
        "sizes": sizes,
    }
    write_json(options.record, record)
    print(f"below {MAX_LOSS_NATS} nats/token for every model: {record['criterion_met']}")


def climb(name: str, size: Size, options: argparse.Namespace) -> None:
    """Run the ladder of a size, or what is left of it."""
    options.out.mkdir(parents=True, exist_ok=True)
    suite = options.out / f"precision-{name}.py"
    # The short form of a suite on a CPU has an eighth of its batch.
    suite.write_text(SUITE.format(name=name, batch=8 * size.sequences, seeds=size.seeds))
    command = [sys.executable, "-P", "-m", "tune.ladder", "--out", str(options.out)]
    if (options.out / suite.stem / "ladder.json").exists():
        command += ["--resume", suite.stem]
    else:
        command += [
            "--suite", str(suite), "--name", suite.stem, "--model", size.model, "--data", str(options.data),
            "--device", "cpu", "--steps", str(size.steps), "--cycle", f"{size.steps}+{VAL_BATCHES}",
        ]  # fmt: skip
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


def compare(size: Size, ladder: Path) -> dict:
    """The losses of all pairs, and the mean of their differences with Student's interval."""
    rung = json.loads((ladder / "rungs.json").read_text())["rows"][1]
    changes = [loss - reference for reference, loss in rung["held_out"]]
    mean = statistics.fmean(changes)
    reach = t_quantile(len(changes) - 1) * statistics.stdev(changes) / math.sqrt(len(changes))
    return {
        "model": size.model, "steps": size.steps, "tokens": size.steps * rung["step_tokens"],
        "val_losses_bf16_and_activations": rung["held_out"], "change": mean,
        "change_95_percent": [mean - reach, mean + reach],
    }  # fmt: skip


def describe(data: Path) -> dict:
    """The date, the data and the versions of a measurement."""
    manifest = read_manifest(str(data))
    return {
        "date": time.strftime("%Y-%m-%d"),
        "data": {"fingerprint": manifest.fingerprint, "tokens": manifest.splits["train"]["tokens"]},
        "versions": {"python": platform.python_version(), "torch": version("torch"), "commit": find_commit()},
    }


if __name__ == "__main__":
    main()
