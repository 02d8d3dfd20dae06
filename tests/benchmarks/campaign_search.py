"""Does a search that is killed at random moments find the same trials as one that is not disturbed?

    python -P tests/benchmarks/campaign_search.py [--ways trial,worker,driver,ray] [--seed 0] --record FILE.json

Each way is ten SIGKILLs in as many searches of ten trials as that takes, at most one in a trial: of the trial's
process, of another Ray worker, of the driver (with the Ray that it started), or of the raylet and the control
service in turn. Where the driver ended it is resumed. In the end every leaderboard must hold what an undisturbed
search's does, and MLflow one finished child per trial. ``best`` trains with a best.json and compares the speed.
Ways already in the record stay.
"""

import argparse
import contextlib
import csv
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from mlflow.tracking import MlflowClient

from infra.device.provenance import find_commit
from infra.storage.files import write_json
from pipeline.shards import Manifest, ShardRow, write_shard

MODEL = "tiny,layers=2,heads=2,width=32,context_length=32,vocab_size=257,padded_vocab_size=320"
SEARCH = ["--model", MODEL, "--device", "cpu", "--memory-limit", "8GB"]
TEN = ["--global-batch", "48", "--searcher", "grid", "--confirm-rounds", "0", "--trial-steps", "8"]
KILLS, SEARCHES = 10, 15
"""Kills of each way, and the most searches to place them in."""
PATIENCE = 90.0
"""Seconds that anything may take before it counts as hung."""


def main() -> int:
    """Kill, continue, compare, record; 1 when anything differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ways", default="trial,worker,driver,ray,best")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path, required=True)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    folder = Path(tempfile.mkdtemp(prefix="campaign-"))
    write_books(folder / "shards")
    record: dict[str, Any] = json.loads(options.record.read_text()) if options.record.exists() else {}
    record |= {
        "command": "make campaign-search",
        "versions": {name: version(name) for name in ("torch", "ray", "mlflow")},
    }
    ways = options.ways.split(",")
    for way in (way for way in ways if way not in record):
        chance = random.Random(f"{way} {options.seed}")
        if way == "best":
            record[way] = train_with_the_best(folder)
        else:
            if "undisturbed" not in record:
                finish(start(folder, ["--name", "undisturbed", *TEN]))
                record["undisturbed"] = membership(folder, "undisturbed")
            record[way] = campaign(folder, way, chance, record["undisturbed"])
        record[way]["commit"] = find_commit()
        write_json(options.record, record)
        print(way, {k: v for k, v in record[way].items() if k != "events"}, flush=True)
    return int(not all(record[way]["passed"] for way in ways))


def write_books(folder: Path) -> None:
    """Token shards over 257 ids."""
    draw = np.random.default_rng(0)
    books = [np.append(draw.integers(0, 256, 20_000), 256).astype(np.uint16) for _ in range(3)]
    rows = [ShardRow(f"book-{n}", "", None, "en", "made", "0" * 64, len(b), b) for n, b in enumerate(books)]
    shards = [
        write_shard(folder, "train/000000-000.arrow", "train", rows[:2]),
        write_shard(folder, "val/000000-000.arrow", "val", rows[2:]),
    ]
    Manifest.of(shards, config={}, tokenizer_sha256="small", inputs={}, report={}).write(folder)


def start(folder: Path, flags: list[str]) -> subprocess.Popen[str]:
    """The command, in ``folder`` and a session of its own."""
    data = [] if "--resume" in flags else ["--data", str(folder / "shards"), *SEARCH]
    with (folder / "printed.log").open("a") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "tune.search", *data, *flags], cwd=folder, text=True, start_new_session=True,
            stdout=log, stderr=log,
        )  # fmt: skip


def finish(driver: subprocess.Popen[str]) -> int:
    """The exit code of a driver that is not disturbed."""
    return driver.wait(timeout=10 * PATIENCE)


def campaign(folder: Path, way: str, chance: random.Random, undisturbed: list[list[str]]) -> dict[str, Any]:
    """Searches with kills in their trials, resumed as often as it takes."""
    events: list[dict[str, Any]] = []
    checks: dict[str, bool] = {}
    searches = 0
    while len(events) < KILLS and searches < SEARCHES:
        searches += 1
        held = search_with_kills(folder, f"killed-{way}-{searches}", way, chance, undisturbed, events)
        checks = {check: checks.get(check, True) and passed for check, passed in held.items()}
    passed = all(checks.values()) and len(events) == KILLS
    return {"kills": len(events), "searches": searches, "passed": passed, **checks, "events": events}


def search_with_kills(
    folder: Path, name: str, way: str, chance: random.Random, undisturbed: list[list[str]], events: list[dict[str, Any]]
) -> dict[str, bool]:
    """One search with a kill in each of its trials, recorded in ``events``; returns the checks of its result."""
    parts = itertools.cycle(("raylet", "gcs_server"))
    trials = folder / "runs" / name / "trials"
    driver = start(folder, ["--name", name, *TEN])
    met: set[int] = set()  # a trial that is killed three times counts as failed: one kill for each number of rows
    while len(events) < KILLS:
        running = wait_for_trial(driver, trials, met)
        if running is None:
            break
        time.sleep(chance.uniform(0, 2.0))
        rows = len(rows_in(trials))
        part = next(parts)
        target = victim(driver, way, part, running)
        if rows in met or target is None or driver.poll() is not None or not target.is_running():
            continue
        met.add(rows)
        asked = time.monotonic()
        event: dict[str, Any] = {"killed": part if way == "ray" else way, "rows_before": rows}
        if way == "driver":
            os.killpg(driver.pid, signal.SIGKILL)
        else:
            target.kill()
        if way in ("driver", "ray"):
            event["exit"] = driver.wait(timeout=PATIENCE)
            event["seconds_to_end"] = round(time.monotonic() - asked, 1)
            driver = start(folder, ["--resume", name])
        events.append(event)
        print(event, flush=True)
    code = finish(driver)
    return {
        "exit_0": code == 0,
        "same_leaderboard": membership(folder, name) == undisturbed,
        "no_driver_hung": all(event.get("exit") in (None, 0, 1, -signal.SIGKILL) for event in events),
        **in_mlflow(folder, name),
    }


def workers(driver: subprocess.Popen[str], *, idle: bool) -> list[psutil.Process]:
    """Ray's worker processes under the driver: those that wait for work, or those that have some."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(driver.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                title = " ".join(child.cmdline()[:1])
                worker = title.startswith("ray::") and "Agent" not in title  # agents are the raylet's own
                if worker and title.startswith("ray::IDLE") == idle:
                    found.append(child)
    return found


def rows_in(trials: Path) -> list[Path]:
    """The rows that are on disk."""
    return list(trials.glob("m*.json"))


def wait_for_trial(driver: subprocess.Popen[str], trials: Path, met: set[int]) -> psutil.Process | None:
    """The process of a trial that none of our kills met yet; None when the search ended."""
    until = time.monotonic() + PATIENCE
    while driver.poll() is None and time.monotonic() < until:
        busy = workers(driver, idle=False)
        if busy and len(rows_in(trials)) not in met:
            return busy[0]
        time.sleep(0.05)
    return None


def victim(driver: subprocess.Popen[str], way: str, part: str, running: psutil.Process) -> psutil.Process | None:
    """The process to kill; None when there is none."""
    with contextlib.suppress(psutil.NoSuchProcess):
        match way:
            case "trial":
                return running
            case "worker":
                return next(iter(workers(driver, idle=True)), None)
            case "driver":
                return psutil.Process(driver.pid)
        return next((child for child in psutil.Process(driver.pid).children() if child.name() == part), None)
    return None


def membership(folder: Path, name: str) -> list[list[str]]:
    """Every trial of the finished search: its place in the space, and its outcome."""
    rows = csv.DictReader((folder / "runs" / name / "trials.csv").open())
    return sorted([row["micro_batch"], row["stage"], row["round"], row["outcome"]] for row in rows)


def in_mlflow(folder: Path, name: str) -> dict[str, bool]:
    """What must hold of the search's runs."""
    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    experiment = client.get_experiment_by_name("tune")
    assert experiment is not None
    found = client.search_runs([experiment.experiment_id])
    (parent,) = [run for run in found if run.info.run_name == name]
    children = [run for run in found if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    rows = len(rows_in(folder / "runs" / name / "trials"))
    return {
        "parent_finished": parent.info.status == "FINISHED",
        "no_child_left_running": {run.info.status for run in children} == {"FINISHED"},
        "one_child_a_trial": len(children) == len({run.data.tags["trial"] for run in children}) == rows,
    }


def train_with_the_best(folder: Path) -> dict[str, Any]:
    """A search of longer trials, and a run of its best.json through ``train.run``: the same speed?"""
    finish(
        start(
            folder, ["--name", "for-best", "--global-batch", "8", "--trial-steps", "60", "--speed-tolerance", "0.001"]
        )
    )
    best = folder / "runs" / "for-best" / "best.json"
    flags = ["--config", str(best), "--name", "best", "--steps", "400", "--cycle", "400+1"]
    subprocess.run([sys.executable, "-m", "train.run", *flags], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    promised = json.loads(best.read_text())["measured"]
    got = json.loads((folder / "runs" / "best" / "result.json").read_text())["throughput"]
    return {
        "search": {name: promised[name] for name in ("tokens_per_second", "speed_low", "speed_high", "runs")},
        "train_run": {name: got[name] for name in ("tokens_per_second", "low", "high")},
        "inside_the_interval": promised["speed_low"] <= got["tokens_per_second"] <= promised["speed_high"],
        "passed": got["low"] <= promised["speed_high"] and promised["speed_low"] <= got["high"],
    }


if __name__ == "__main__":
    sys.exit(main())
