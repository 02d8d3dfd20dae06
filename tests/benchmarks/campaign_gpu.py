"""Everything that only a GPU can show, by one command that is run until it says it is done.

    make campaign-gpu [NANOGPT=../nanoGPT] [BUILD_NANOGPT=../build-nanogpt]

In: a CUDA machine. Out: ``campaign/`` with every run, and one record of all of it under
``tests/benchmarks/records/``, with a verdict on each goal. The steps are the product's own commands, in
order; each is finished once its last file exists. A call works for ``--minutes`` and then interrupts the
step it is in, which the next call continues, so that it fits machines that are lent for minutes.
"""

import argparse
import csv
import json
import math
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from infra import provenance
from infra.storage import write_json
from train.config import config_from_json
from train.estimate.memory import correct, predict_peak

PEERS = Path(__file__).with_name("peers.py")
GRACE_SECONDS = 60
"""For an interrupted step to save what it has."""


@dataclass(frozen=True)
class Step:
    """A command and the file, under the campaign's folder, that it leaves when it is finished."""

    name: str
    command: tuple[str, ...]
    result: str
    run: str | None = None
    """Name of the run, search or ladder that ``--resume`` continues."""
    kept: str = "*.json"
    """Without a file of this pattern in its run's folder there is nothing to continue, and it begins anew."""


def main() -> None:
    """Go on with the campaign; exit 0 when it is finished, 1 when another call is needed or a step failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("campaign"))
    parser.add_argument("--records", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=8.5)
    parser.add_argument("--nanogpt", type=Path)
    parser.add_argument("--build-nanogpt", type=Path)
    parser.add_argument("--rehearsal", action="store_true", help="the tiny model and a few steps, for a CPU")
    options = parser.parse_args()
    options.folder.mkdir(exist_ok=True)
    deadline = time.monotonic() + 60 * options.minutes
    for step in steps(options):
        if is_finished(step, options.folder):
            continue
        left = deadline - time.monotonic()
        if left < 0 or not finish(step, options.folder, left):
            sys.exit(f"{step.name} is not finished: run the same command again to continue.")
    found = collect(options.folder)
    device = "".join(c if c.isalnum() else "-" for c in found["device"].lower())
    record = options.records / f"campaign-{device}.json"
    write_json(record, found)
    for goal, (reached, wanted, holds) in found["verdict"].items():
        print(
            f"{'reached' if holds else 'MISSED ' if holds is False else 'unknown'}  {goal}: {reached} (goal {wanted})"
        )
    print(f"record: {record}")


def steps(options: argparse.Namespace) -> list[Step]:
    """What the campaign does, in order."""
    small = options.rehearsal
    batch = "4" if small else "480"
    model = ("--model", "tiny" if small else "gpt2-124m")
    limit = ("--memory-limit", "40GB")
    # Without validation, which a compiled rung would compile anew.
    short = ("--steps", "8", "--cycle", "4+1")
    if not small:
        short = ("--time-budget", "15s", "--within", "0.005", "--cycle", "20+0")
    rungs = ("--rungs", "tensor cores", "no synchronisation") if small else ()
    trial = ("--trial-steps", "8", "--trial-time", "5s") if small else ("--trial-steps", "12", "--trial-time", "20s")
    knobs = ("attention",) if small else ("compile", "attention", "precision", "loss_chunks", "optimizer")
    space = (*model, "--global-batch", batch, "--data", "tokens")
    peers = ["--data", "tokens", *model, "--global-batch", batch, *limit, "--config", "runs/search/best.json"]
    peers += ["--micro-batch", "2", "--steps", "4", "--rounds", "1", "--compile", "off"] if small else []
    for flag, path in (("--nanogpt", options.nanogpt), ("--build-nanogpt", options.build_nanogpt)):
        peers += [flag, str(path.resolve())] if path else []
    module = (sys.executable, "-m")
    return [
        Step("tokens", (*module, "pipeline.tokenize", "--out", "tokens"), "tokens/manifest.json"),
        Step("ceilings", (*module, "infra.doctor"), "runs/doctor.json"),
        Step(
            "search",
            (*module, "tune.search", *space, *limit, "--knobs", *knobs, *trial, "--name", "search"),
            "runs/search/summary.md", "search",
        ),
        Step(
            "peers", (sys.executable, "-P", str(PEERS), *peers, "--record", "peers.json"), "peers.json",
        ),
        Step(
            "ladder",
            (*module, "train.ladder", "--suite", "a100", "--data", "tokens", *short, *rungs, "--name", "a100",
             "--best", "runs/search/best.json"),
            "runs/a100/summary.md", "a100",
        ),
        Step(
            "best run",
            (*module, "train.run", "--config", "runs/search/best.json", "--data", "tokens", "--name", "best",
             "--steps", "8" if small else "60", "--cycle", "4+1" if small else "20+1"),
            "runs/best/result.json", "best", "checkpoints/step-*",
        ),
        Step(
            "profile",
            (*module, "train.profile", "--config", "runs/search/best.json", "--data", "tokens", "--name", "profile"),
            "runs/profile/profile.json", "profile", "profile.json",
        ),
        Step(
            "grid",
            (*module, "tune.search", "--config", "runs/search/best.json", *space, *limit, "--searcher", "grid", *trial,
             "--confirm", "0", "--name", "grid"),
            "runs/grid/summary.md", "grid",
        ),
        *(
            Step(
                suite,
                (*module, "train.ladder", "--suite", suite, "--data", "tokens", *short, "--name", suite,
                 *(("--rungs", picked) if small else ())),
                f"runs/{suite}/summary.md", suite,
            )
            for suite, picked in (("memory", "chunked loss"), ("sizes", "batch 8"))
        ),
    ]  # fmt: skip


def is_finished(step: Step, folder: Path) -> bool:
    """Whether ``step`` has left its result, which an interrupted run leaves as well."""
    result = folder / step.result
    if not result.exists():
        return False
    return result.name != "result.json" or json.loads(result.read_text())["outcome"] == "finished"


def finish(step: Step, folder: Path, seconds: float) -> bool:
    """Run or continue a step for at most ``seconds``; whether it finished."""
    command = list(step.command)
    if step.run:
        home = folder / "runs" / step.run
        if any(home.glob(step.kept)):
            command = [*step.command[:3], "--resume", step.run]
        else:
            shutil.rmtree(home, ignore_errors=True)
    print(f"{step.name}: {' '.join(['python', *command[1:]])}", flush=True)
    with (folder / f"{step.name.replace(' ', '-')}.log").open("a") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT)
        try:
            process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(timeout=GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
            return False
    if process.returncode:
        print(f"{step.name} ended with exit code {process.returncode}; see {log.name}")
    return process.returncode == 0


def collect(folder: Path) -> dict[str, Any]:
    """One record of what the steps left, and what it says of each goal: (reached, wanted, whether it holds)."""

    def read(name: str) -> Any:
        return json.loads((folder / name).read_text(encoding="utf-8"))

    doctor, peers, best = read("runs/doctor.json"), read("peers.json"), read("runs/best/result.json")
    trials = {name: rows(folder / "runs" / name / "trials.csv") for name in ("search", "grid")}
    ladders = {name: read(f"runs/{name}/standings.json") for name in ("a100", "memory", "sizes")}
    speed = best["throughput"] and best["throughput"]["tokens_per_second"]
    ceiling = max(doctor.get("matmul", {}).values(), default=math.nan)
    chosen_config = read("runs/search/best.json")["config"]
    errors = memory_errors(chosen_config, trials["grid"])
    climbed = [row["speed"] for row in ladders["a100"]["rows"] if row["speed"]]
    on_grid = {row["micro_batch"]: float(row["tokens_per_second"]) for row in trials["grid"] if row["outcome"] == "ok"}
    chosen = on_grid.get(str(chosen_config["micro_batch"]))
    over = peers["ours_over"]
    goals: dict[str, tuple[float | None, float, bool]] = {
        "times nanoGPT's step": (over.get("nanogpt"), 1.35, True),
        "times Hugging Face's step": (over.get("huggingface"), 1.3, True),
        "tokens/s": (speed, 185_000 if "A100" in doctor["device"] else 550_000, True),
        "model FLOP/s over the measured matmul ceiling": (best["flops_per_second"] / ceiling, 0.6, True),
        "last rung over the first": (climbed[-1] / climbed[0], 12, True),
        "data wait, of a step": (best["data_wait_fraction"], 0.001, False),
        f"largest error of predicted memory over {len(errors)} cells": (
            max(errors.values(), default=None),
            0.03,
            False,
        ),
        "regret of the search on the grid": (chosen and 1 - chosen / max(on_grid.values()), 0.01, False),
    }
    verdict = {
        goal: (reached, wanted, None if reached is None or math.isnan(reached) else (reached >= wanted) is more)
        for goal, (reached, wanted, more) in goals.items()
    }
    return {
        "command": " ".join(["python", "-P", *sys.argv]), "where": provenance.collect(), "device": doctor["device"],
        "verdict": verdict, "memory_errors": errors,
        "doctor": doctor, "best": best, "peers": peers, "trials": trials, "ladders": ladders,
        "profile": read("runs/profile/profile.json"),
    }  # fmt: skip


def memory_errors(config: dict[str, Any], grid: list[dict[str, str]]) -> dict[str, float]:
    """How far predicted memory was off, by micro-batch: the smallest and the largest that ran are the two probes."""
    base = config_from_json(config, "best.json")
    measured = {int(row["micro_batch"]): float(row["memory"]) for row in grid if row["outcome"] == "ok"}
    prior = {size: predict_peak(replace(base, micro_batch=size)).total for size in measured}
    probes = [(prior[size], measured[size]) for size in {min(measured), max(measured)}]
    held_out = sorted(set(measured) - {min(measured), max(measured)})
    return {str(size): abs(correct(prior[size], probes) / measured[size] - 1) for size in held_out}


def rows(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


if __name__ == "__main__":
    main()
