"""What the command costs a run: the same training by the bare loop, in the command's process, and on Ray, itemized.

    python -P tests/benchmarks/overhead.py --data data/tokens --record FILE.json [--pairs 10] [--steps 100]

All run the same config in fresh processes, in the order bare, local, ray, ray, local, bare, ..., because machines
drift. Tokens/s is over all steps but those of the first cycle; a cost is the mean of the ratios to bare with Student's
interval. The CPU time that the other processes take is given as a share of the machine. Start-up is from the process's
first line to the beginning of the first step. Pairs that the record holds already are not repeated, so a long
benchmark can be done in parts.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import psutil

from infra.device.hardware import cpu_info
from infra.device.provenance import find_commit
from infra.storage.files import write_json
from train.config import Cycle, ResolvedConfig
from train.intervals import t_quantile
from train.launch.job import RunPlan
from train.model_config import parse_model
from train.run_files.run_folder import RunFolder

HERE = Path(__file__)

SIDES = ("bare", "local", "ray")


def main() -> None:
    """Measure the pairs that the record lacks and sum up. As a child: run one side and print what it found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--side", choices=SIDES)
    options = parser.parse_args()
    config = ResolvedConfig.of(
        data=str(options.data.resolve()), model=parse_model(options.model), steps=options.steps, cycle=Cycle(20, 1),
        global_batch=options.micro_batch, micro_batch=options.micro_batch, keep_checkpoints=0,
    )  # fmt: skip
    if options.side:
        print(json.dumps(bare(config) if options.side == "bare" else wrapped(config, on_ray=options.side == "ray")))
        return
    known = json.loads(options.record.read_text()) if options.record.exists() else {}
    pairs = known.get("runs", [])
    while len(pairs) < options.pairs:
        order = SIDES if len(pairs) % 2 == 0 else SIDES[::-1]
        load = os.getloadavg()[0]
        pairs.append({side: child(side) for side in order} | {"load_before": load})
        found = summary(pairs)
        found |= {"model": options.model, "commit": find_commit(), "runs": pairs}
        write_json(options.record, found)
        print(
            len(pairs), json.dumps({name: found[name] for name in ("cost", "start_up_seconds_beyond_bare")}), flush=True
        )
    print(json.dumps(summary(pairs), indent=2))


def child(side: str) -> dict[str, float]:
    """One side's figures, from a process of its own."""
    line = [sys.executable, "-P", str(HERE), *sys.argv[1:], "--side", side]
    done = subprocess.run(line, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def summary(pairs: list[dict]) -> dict[str, object]:
    """The cost with its interval, the share of CPU time, and the medians of every item."""
    logs = {
        side: [math.log(pair[side]["tokens_per_second"] / pair["bare"]["tokens_per_second"]) for pair in pairs]
        for side in SIDES[1:]
    }
    medians = {
        side: {name: round(statistics.median(pair[side][name] for pair in pairs), 3) for name in pairs[0][side]}
        for side in SIDES
    }
    return {
        "command": "make bench-overhead",
        "versions": {name: version(name) for name in ("torch", "ray", "mlflow")},
        "cores": os.cpu_count(),
        "pairs": len(pairs),
        "cost": {side: cost(found) for side, found in logs.items()},
        "start_up_seconds_beyond_bare": {
            side: round(medians[side]["start_up"] - medians["bare"]["start_up"], 3) for side in SIDES[1:]
        },
        "median_seconds": medians,
    }


def cost(logs: list[float]) -> dict[str, object]:
    """The share of its speed that a run loses, from logarithms of ratios with to without, with a 95% interval."""
    mean, reach = statistics.fmean(logs), math.inf
    if len(logs) > 1:
        reach = t_quantile(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    return {"cost": 1 - math.exp(mean), "cost_95_percent": [1 - math.exp(mean + reach), 1 - math.exp(mean - reach)]}


def bare(config: ResolvedConfig) -> dict[str, float]:
    """The loop alone."""
    began = time.perf_counter()
    from train.data.sources import source_of
    from train.loop.trainer import Trainer

    imported = time.perf_counter()
    data = source_of(config.dataset).open(config.model, config.batch, config.duration.cycle)
    trainer = Trainer(config, data)
    trainer.run()
    start_up = imported - began + (trainer.times.first_step or 0.0) - trainer.times.steps[0]
    counted = trainer.times.steps[config.duration.cycle.train_steps :]
    return {
        "imports": imported - began,
        "start_up": start_up,
        "tokens_per_second": len(counted) * config.step_tokens / sum(counted),
    }


def wrapped(config: ResolvedConfig, *, on_ray: bool) -> dict[str, float]:
    """The same by Ray Train, recorded in a fresh MLflow store, as the command does it: on Ray or in this process."""
    began = time.time()
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(max_workers=1) as background:
        os.chdir(name)
        from infra.ray.cluster import ray_session
        from train.run import import_and_open_store

        preparing = background.submit(import_and_open_store, None)
        cycles: list[dict] = []
        busy: list[tuple[float, float]] = []

        def on_cycle(cycle: dict) -> None:
            cycles.append(cycle)
            busy.append((time.time(), cpu_seconds_of_others()))

        folder = Path(name) / "run"
        with ray_session() if on_ray else nullcontext():
            connected_at = time.time()
            preparing.result()
            prepared = time.time()
            from infra.tracking.store import create_run
            from infra.tracking.tracker import Tracker
            from train.launch import driver

            key = create_run("train", "overhead")
            recorded = time.time()
            with Tracker(key) as tracker:
                run = replace(RunPlan.new(config, RunFolder(folder)), address="local" if on_ray else None)
                result, _ = driver.train_and_record(run.resolved(cpu_info()), tracker, on_cycle)
            returned = time.time()
        started, ended = ((folder / file).stat().st_mtime for file in ("lock", "cycles.jsonl"))
    first_step = ended - result.train_seconds
    (since, before), (until, after) = busy[0], busy[-1]
    seconds = sum(cycle["train_seconds"] for cycle in cycles[1:])
    tokens = sum(len(cycle["step_losses"]) for cycle in cycles[1:]) * config.step_tokens
    return {
        "ray_start": connected_at - began,
        "torch_mlflow_and_its_new_store_beyond_ray_start": prepared - connected_at,
        "ray_train_import_and_mlflow_run": recorded - prepared,
        "ray_train_worker_start": started - recorded,
        "worker_set_up": first_step - started,
        "start_up": first_step - began,
        "end_of_training_to_result": returned - ended,
        "ray_stop": time.time() - returned,
        **({"cpu_share_of_others": (after - before) / (until - since) / (os.cpu_count() or 1)} if on_ray else {}),
        "tokens_per_second": tokens / seconds,
    }


def cpu_seconds_of_others() -> float:
    """CPU time so far of this process and all below it but the training worker."""
    total = sum(psutil.Process().cpu_times()[:2])
    for process in psutil.Process().children(recursive=True):
        try:
            if "TrainWorker" not in " ".join(process.cmdline()[:1]):
                total += sum(process.cpu_times()[:2])
        except psutil.NoSuchProcess:
            continue
    return total


if __name__ == "__main__":
    main()
