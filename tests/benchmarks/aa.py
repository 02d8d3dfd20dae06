"""A/A: how often the ladder's verdict calls two runs of the same thing different. At most 5% is right.

    python -P tests/benchmarks/aa.py --pairs 100 --out tests/benchmarks/records

Runs of the small model stand in a row as on a ladder: control, rung, control, rung, ..., control, where
rung and control are the same config, each in a fresh process. Ten rungs make a ladder, with its own
scatter, as in a real one. The record keeps the raw speeds.
"""

import argparse
import json
import multiprocessing
import os
import platform
import tempfile
import time
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import torch

from infra.storage import write_json
from train.compare import Ladder
from train.config import Cycle, ModelConfig, TrainConfig
from train.loop import Trainer

RUNGS = 10


def speed(config: TrainConfig) -> float:
    """Tokens/s of one run; called in a process of its own."""
    torch.set_num_threads(1)
    measured = Trainer(config).run().throughput
    assert measured is not None
    return measured.tokens_per_second


def shards(folder: Path) -> Path:
    """The tests' small shards."""
    path = Path(__file__).parents[1] / "conftest.py"
    spec = spec_from_file_location("small_shards", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.write_small_shards(folder)


def called_different(verdicts: list[dict[str, float | bool]]) -> int:
    """Pairs of equal runs that the verdict told apart: its false alarms."""
    return sum(bool(verdict["different"]) for verdict in verdicts)


def main() -> None:
    """Run the pairs, print the rate, write the record."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--pairs", type=int, default=100)
    options.add_argument("--steps", type=int, default=150)
    options.add_argument("--out", type=Path, default=Path("tests/benchmarks/records"))
    asked = options.parse_args()
    began = time.time()
    load = os.getloadavg()[0]
    verdicts: list[dict[str, float | bool]] = []
    speeds: list[list[float]] = []
    with tempfile.TemporaryDirectory() as folder:
        config = TrainConfig(
            data=shards(Path(folder)), model=ModelConfig(2, 2, 32, 32, 257, 320), micro_batch=8, global_batch=8,
            device="cpu", precision="fp32", steps=asked.steps, cycle=Cycle(50, 0), keep_checkpoints=0,
        )  # fmt: skip
        with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as fresh:
            while len(verdicts) < asked.pairs:
                rungs = min(RUNGS, asked.pairs - len(verdicts))
                row = [fresh.apply(speed, (config,)) for _ in range(2 * rungs + 1)]
                speeds.append(row)
                ladder = Ladder(row[::2], row[1::2])
                for number in range(rungs):
                    found = ladder.over_control(number)
                    assert found is not None
                    verdicts.append(
                        {"ratio": found.ratio, "low": found.low, "high": found.high, "different": found.different}
                    )
                print(f"{len(verdicts)} pairs, {called_different(verdicts)} called different", flush=True)
    half_widths = sorted(float(v["high"]) / float(v["ratio"]) - 1 for v in verdicts)
    record = {
        "pairs": len(verdicts),
        "called_different": called_different(verdicts),
        "false_alarm_rate": called_different(verdicts) / len(verdicts),
        "median_half_width": half_widths[len(half_widths) // 2],
        "seconds": round(time.time() - began),
        "load_before": load,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}",
        "command": f"python -P tests/benchmarks/aa.py --pairs {asked.pairs} --steps {asked.steps}",
        "config": config.to_json() | {"data": "the tests' small shards"},
        "speeds_by_ladder": speeds,
    }
    write_json(asked.out / "aa.json", record)
    print(json.dumps({name: record[name] for name in ("pairs", "called_different", "median_half_width", "seconds")}))


if __name__ == "__main__":
    main()
