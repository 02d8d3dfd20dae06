"""What bf16 activations cost in validation loss: pairs of runs in bf16 and in bf16-activations, by ``tune.ladder``.

    python -P tests/benchmarks/precision.py --data tokens --out runs --record FILE.json [--size deep]

Both runs of a pair have the same initial weights and the same batches, and validate on the same windows. A CPU rounds
to bf16 as a GPU does, and more often, because eager code stores what Inductor's kernels keep in fp32. The data need
512 token ids. A ladder in ``--out`` that was interrupted is resumed. The criterion for a default is an upper end of
the 95% interval below 0.005 nats/token, for every model. A size whose pairs do not decide gets more of them, and an
interval that is wider by Bonferroni's correction for each time that it was looked at.
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
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from scipy.special import stdtrit

from infra.device.provenance import find_commit
from infra.storage.files import write_json
from pipeline.shards import read_manifest
from train.intervals import CONFIDENCE

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
    rounds: tuple[int, ...]
    """Number of pairs of each round; after each, the interval was looked at."""


SIZES = {
    "wide": Size("edu-3m", sequences=4, steps=200, rounds=(5,)),
    "deep": Size("edu-3m,layers=12,width=128,heads=2,context_length=256", sequences=8, steps=300, rounds=(8, 8)),
}
"""Four blocks of width 256, and as many blocks as GPT-2 124M with heads as wide as its own. Steps of 2,048 tokens."""

VAL_BATCHES = 40

SUITE = """\
from tune.suite.suites import Rung, Suite

SUITE = Suite(
    "{name}", "bf16 activations against bf16",
    {{
        "seed": {seed},
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
        ladders = [climb(name, size, number, options) for number in range(len(size.rounds))]
        sizes[name] = result = compare(size, ladders) | describe(options.data)
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


def climb(name: str, size: Size, number: int, options: argparse.Namespace) -> Path:
    """Run the ladder of a round of a size, or what is left of it, and return its folder."""
    options.out.mkdir(parents=True, exist_ok=True)
    ladder = options.out / f"precision-{name}-{number}"
    if (ladder / "rungs.json").exists():
        return ladder
    suite = ladder.with_suffix(".py")
    # The short form of a suite on a CPU has an eighth of its batch.
    suite.write_text(SUITE.format(
        name=ladder.name, batch=8 * size.sequences, seeds=size.rounds[number], seed=sum(size.rounds[:number]),
    ))  # fmt: skip
    command = [sys.executable, "-P", "-m", "tune.ladder", "--out", str(options.out)]
    if (ladder / "ladder.json").exists():
        command += ["--resume", ladder.name]
    else:
        command += [
            "--suite", str(suite), "--name", ladder.name, "--model", size.model, "--data", str(options.data),
            "--device", "cpu", "--steps", str(size.steps), "--cycle", f"{size.steps}+{VAL_BATCHES}",
        ]  # fmt: skip
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    return ladder


def compare(size: Size, ladders: Sequence[Path]) -> dict:
    """The losses of all pairs, and the mean of their differences with Student's interval."""
    rungs = [json.loads((ladder / "rungs.json").read_text())["rows"][1] for ladder in ladders]
    losses = [pair for rung in rungs for pair in rung["held_out"]]
    changes = [loss - reference for reference, loss in losses]
    mean, looks = statistics.fmean(changes), len(ladders)
    quantile = float(stdtrit(len(changes) - 1, 1 - (1 - CONFIDENCE) / 2 / looks))
    reach = quantile * statistics.stdev(changes) / math.sqrt(len(changes))
    return {
        "model": size.model, "steps": size.steps, "tokens": size.steps * rungs[0]["step_tokens"], "looks": looks,
        "val_losses_bf16_and_activations": losses, "change": mean, "change_95_percent": [mean - reach, mean + reach],
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
