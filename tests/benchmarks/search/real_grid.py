"""An exhaustive grid, really run on this machine's CPU: what ``compare.py`` replays all searches on.

    python tests/benchmarks/search/real_grid.py [--repeats 2] [--most-minutes 9] --record FILE.json

Every candidate runs in a fresh process, ``repeats`` times; a repeat is the whole grid once, in an order of its
own, so that a drift of the machine falls on all alike. It continues where it was stopped: run it until it says
that the grid is complete.
"""

import argparse
import json
import multiprocessing
import os
import random
import resource
import socket
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from infra.device import provenance
from infra.device.hardware import cpu_info
from infra.schema import from_json, to_json
from infra.storage.files import write_json
from pipeline.shards import Manifest, ShardRow, write_shard
from train.config import Cycle, TrainConfig
from train.model_config import ModelConfig
from train.resolved import resolve
from tune.space import Candidate, make_space
from tune.trial.row import Proposal, flatten_row
from tune.trial.run import StopRule, TrialRequest, run

MODEL = ModelConfig(layers=2, heads=2, width=64, context_length=64, vocab_size=512, padded_vocab_size=512)
KNOBS = ("checkpointing=none,selective,full",)
STEPS = 12
THREADS = "1"
"""A neighbor on the second core then costs little."""


def main() -> int:
    """Run what is missing, within the time."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--repeats", type=int, default=2)
    options.add_argument("--most-minutes", type=float, default=9.0)
    options.add_argument("--record", type=Path, required=True)
    chosen = options.parse_args()
    os.environ["OMP_NUM_THREADS"] = THREADS
    base = TrainConfig.of(
        data="made", model=MODEL, global_batch=24, micro_batch=4, device="cpu", attention="sdpa",
        precision="fp32",
    )  # fmt: skip
    space = make_space(resolve(base, cpu_info()), KNOBS)
    kept = json.loads(chosen.record.read_text()) if chosen.record.exists() else {"rows": []}
    rows: list[dict[str, Any]] = kept["rows"]
    done = {(from_json(Candidate, row["candidate"], chosen.record), row["round"]) for row in rows}
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        idle = pool.submit(own_peak).result()
    every = space.candidates()
    order = [(c, n) for n in range(chosen.repeats) for c in random.Random(n).sample(every, k=len(every))]
    until = time.monotonic() + 60 * chosen.most_minutes
    for candidate, repeat in order:
        if (candidate, repeat) in done or time.monotonic() > until:
            continue
        with tempfile.TemporaryDirectory() as folder:
            write_data(Path(folder) / "made")
            request = TrialRequest(
                "m", len(rows) + 1, space.short_label(candidate), Proposal(candidate, "probe", repeat),
                space.config(candidate).replace(data=f"{folder}/made", steps=STEPS, cycle=Cycle(1, 0)),
                socket.gethostname(), 2**60, StopRule(600.0, 1e-9),
            )  # fmt: skip
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                row, _ = process.submit(run, request).result()
        rows.append(flatten_row(row) | {"candidate": to_json(candidate), "step_seconds": row.step_seconds})
        done.add((candidate, repeat))
        speed = f"{row.tokens_per_second:,.0f} tok/s"
        print(f"{len(rows)} of {len(order)}: {space.short_label(candidate)} {row.outcome} {speed}", flush=True)
        write_json(
            chosen.record,
            {
                "base": base.to_json(),
                "knobs": KNOBS,
                "idle_bytes": idle,
                "provenance": provenance.collect(),
                "rows": rows,
            },
        )
    print("the grid is complete" if len(rows) == len(order) else "not complete: run it again")
    return int(len(rows) < len(order))


def own_peak() -> int:
    """Peak resident bytes of this process: of one that has imported all and done nothing."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def write_data(folder: Path) -> None:
    """Token shards of one book of random ids of the model's vocabulary."""
    tokens = np.random.default_rng(0).integers(0, MODEL.vocab_size, 200_000).astype(np.uint16)
    rows = [ShardRow("book", "", None, "en", "made", "0" * 64, len(tokens), tokens)]
    shards = [write_shard(folder, f"{split}/000000-000.arrow", split, rows) for split in ("train", "val")]
    Manifest.of(shards, config={}, tokenizer_sha256="made", inputs={}, report={}).write(folder)


if __name__ == "__main__":
    sys.exit(main())
