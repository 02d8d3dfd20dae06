"""What Ray and MLflow cost a run: the same training by the bare loop and by the command's wrapper, itemised.

    python -P tests/benchmarks/overhead.py --data data/tokens [--steps 200] [--rounds 3] [--record FILE.json]

Both run the same config in fresh processes with the same number of threads, taking turns, because machines
drift. Tokens/s is over all training steps but the first; start-up is from the process's first line to the
end of its first step, and what of it is whose is taken from timestamps on the way.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from train.config import Cycle, TrainConfig, parse_model

HERE = Path(__file__)


def main() -> None:
    """Measure in turns, print a table, and record. As a child: run one side and print what it found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--record", type=Path)
    parser.add_argument("--side", choices=["bare", "wrapped"])
    options = parser.parse_args()
    config = TrainConfig(
        data=options.data.resolve(), model=parse_model(options.model), steps=options.steps, cycle=Cycle(20, 1),
        global_batch=options.micro_batch, micro_batch=options.micro_batch, keep_checkpoints=0,
    )  # fmt: skip
    if options.side:
        print(json.dumps(bare(config) if options.side == "bare" else wrapped(config)))
        return
    found: dict[str, list[dict[str, float]]] = {"bare": [], "wrapped": []}
    for _ in range(options.rounds):
        for side, rows in found.items():
            environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(os.cpu_count()))}
            child = [sys.executable, "-P", str(HERE), *sys.argv[1:], "--side", side]
            done = subprocess.run(child, capture_output=True, text=True, check=True, env=environment)
            rows.append(json.loads(done.stdout.strip().splitlines()[-1]))
    medians = {
        side: {name: statistics.median(r[name] for r in rows) for name in rows[0]} for side, rows in found.items()
    }
    cost = 1 - medians["wrapped"]["tokens_per_second"] / medians["bare"]["tokens_per_second"]
    for side, values in medians.items():
        print(side)
        for name, value in values.items():
            print(f"  {name:34} {value:12,.2f}")
    print(f"Ray and MLflow cost {cost:.2%} of tokens/s")
    if options.record:
        versions = {name: version(name) for name in ("torch", "ray", "mlflow")}
        about = {"command": " ".join(["python", *sys.argv]), "versions": versions, "cost": cost}
        options.record.write_text(json.dumps(about | {"medians": medians, "runs": found}, indent=2) + "\n")


def bare(config: TrainConfig) -> dict[str, float]:
    """The loop alone."""
    began = time.perf_counter()
    from train.loop import Trainer

    imported = time.perf_counter()
    trainer = Trainer(config)
    trainer.run()
    return {
        "import_seconds": imported - began,
        "first_step_seconds": trainer.first_step_seconds or 0.0,
        "start_up_seconds": imported - began + (trainer.first_step_seconds or 0.0),
        "tokens_per_second": speed(config, trainer.step_seconds),
    }


def wrapped(config: TrainConfig) -> dict[str, float]:
    """The same by Ray Train, recorded in a fresh MLflow store, as the command does it."""
    began = time.perf_counter()
    folder = Path(tempfile.mkdtemp())
    os.chdir(folder)
    from infra.cluster import connected
    from infra.tracking import create_run
    from train import worker

    imported = time.perf_counter()
    key = create_run("train", "overhead", tracking_uri="sqlite:///mlflow.db")
    stored = time.perf_counter()
    cycles: list[dict] = []
    with connected():
        connected_at = time.perf_counter()
        result = worker.run(config, folder / "run", key=key, on_cycle=cycles.append)
        ended = time.perf_counter()
    shutil.rmtree(folder)
    inside = result.seconds + (result.first_step_seconds or 0.0)
    ray_train = ended - connected_at - inside
    seconds = sum(cycle["train_seconds"] for cycle in cycles[1:])
    tokens = sum(len(cycle["step_losses"]) for cycle in cycles[1:]) * config.step_tokens
    return {
        "import_seconds": imported - began,
        "mlflow_new_store_seconds": stored - imported,
        "ray_init_seconds": connected_at - stored,
        "ray_train_start_and_end_seconds": ray_train,
        "first_step_seconds": result.first_step_seconds or 0.0,
        "start_up_seconds": ended - began - result.seconds,
        "tokens_per_second": tokens / seconds,
    }


def speed(config: TrainConfig, step_seconds: list[float]) -> float:
    """Tokens a second over all cycles but the first."""
    counted = step_seconds[config.cycle.train :]
    return len(counted) * config.step_tokens / sum(counted)


if __name__ == "__main__":
    main()
