"""A/A: how often does the ladder's verdict call two runs of the same config different? At most 5% is expected.

    python -P tests/benchmarks/aa.py --pairs 100 --out tests/benchmarks/records
    python -P tests/benchmarks/aa.py --pairs 100 --busy 3 --out tests/benchmarks/records

Runs of the small model stand in a row as on a ladder: control, rung, control, rung, ..., control, where
rung and control are the same config, each in a fresh process. Ten rungs make a ladder, with its own
scatter, as in a real one. ``--busy N`` keeps the machine busy meanwhile with N processes that only compute.
The record keeps the raw speeds with their intervals.
"""

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import torch

from infra.device import provenance
from infra.storage.files import write_json
from train.config import Cycle, ResolvedConfig
from train.data.sources import source_of
from train.intervals import Difference, Estimate, t_quantile
from train.loop.trainer import Trainer
from train.model_config import ModelConfig
from tune.trial.compare import InterleavedRuns

RUNGS = 10


def speed(config: ResolvedConfig) -> Estimate:
    """Tokens/s of one run; called in a process of its own."""
    torch.set_num_threads(1)
    data = source_of(config.dataset).open(config.model, config.batch, config.duration.cycle)
    measured = Trainer(config, data).run().throughput
    assert measured is not None
    return measured.estimate


def compute() -> None:
    """Keep a core busy until killed, in a session of its own: Linux shares its cores between sessions first."""
    os.setsid()
    while True:
        pass


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """``processes`` busy loops while the block runs."""
    loops = [multiprocessing.get_context("fork").Process(target=compute, daemon=True) for _ in range(processes)]
    try:
        for loop in loops:
            loop.start()
        yield
    finally:
        for loop in loops:
            loop.kill()


def shards(folder: Path) -> Path:
    """The tests' small shards."""
    path = Path(__file__).parents[1] / "conftest.py"
    spec = spec_from_file_location("small_shards", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.write_small_shards(folder)


def judge(speeds: Sequence[Estimate]) -> list[Difference]:
    """The verdicts on a ladder's rungs; ``speeds`` are of its runs, from the first control to the last."""
    ladder = InterleavedRuns(speeds[::2], speeds[1::2])
    verdicts = (ladder.over_control(rung) for rung in range(len(ladder.rungs)))
    return [verdict for verdict in verdicts if verdict]


def main() -> None:
    """Run the pairs, print the rate, write the record."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--pairs", type=int, default=100)
    options.add_argument("--steps", type=int, default=150)
    options.add_argument("--busy", type=int, default=0, help="busy loops beside the runs")
    options.add_argument("--out", type=Path, default=Path("tests/benchmarks/records"))
    asked = options.parse_args()
    began = time.time()
    load, commit = os.getloadavg()[0], provenance.find_commit()
    verdicts: list[Difference] = []
    speeds: list[list[Estimate]] = []
    torch.optim.AdamW([torch.zeros(1)])  # imports here once, as the next line, what takes longer than a run
    t_quantile(1)
    with tempfile.TemporaryDirectory() as folder, busy(asked.busy):
        config = ResolvedConfig.of(
            data=str(shards(Path(folder))), model=ModelConfig(2, 2, 32, 32, 257, 320), micro_batch=8, global_batch=8,
            device="cpu", precision="fp32", steps=asked.steps, cycle=Cycle(50, 0), keep_checkpoints=0,
        )  # fmt: skip
        with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as fresh:
            while len(verdicts) < asked.pairs:
                rungs = min(RUNGS, asked.pairs - len(verdicts))
                row = [fresh.apply(speed, (config,)) for _ in range(2 * rungs + 1)]
                speeds.append(row)
                verdicts += judge(row)
                different = sum(verdict.is_significant for verdict in verdicts)
                print(f"{len(verdicts)} pairs, {different} called different", flush=True)
    different = sum(verdict.is_significant for verdict in verdicts)
    record = {
        "pairs": len(verdicts),
        "called_different": different,
        "false_alarm_rate": different / len(verdicts),
        "median_half_width": statistics.median(verdict.high / verdict.ratio - 1 for verdict in verdicts),
        "seconds": round(time.time() - began),
        "load_before": load,
        "load_after": os.getloadavg()[0],
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "commit": commit},
        "command": f"python -P tests/benchmarks/aa.py --pairs {asked.pairs} --steps {asked.steps} --busy {asked.busy}",
        "config": config.to_json() | {"data": "the tests' small shards"},
        "speeds_by_ladder": speeds,
        "verdicts": [asdict(verdict) for verdict in verdicts],
    }
    write_json(asked.out / ("aa-busy.json" if asked.busy else "aa.json"), record)
    shown = ("pairs", "called_different", "median_half_width", "seconds")
    print(json.dumps({name: record[name] for name in shown}))


if __name__ == "__main__":
    main()
