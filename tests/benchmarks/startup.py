"""How long do the shortest commands take, from their first import to their end, in two versions of the program?

    python -P tests/benchmarks/startup.py OLD NEW [--pairs 3] [--books FOLDER] [--record FILE.json] [--note TEXT]

OLD and NEW are source trees. Each command runs once per tree and pair, the trees in turn, in a folder of its own; the
MLflow store is there already. What is measured is almost only starting and ending: Python's imports, Ray, its workers.
With --books two longer ones follow, whose time beyond that is work: tokenizing the folder, and 200 training steps.
Wall time depends on what else the machine does; processor time, of the command and of every process below it as last
seen, hardly does. Processes that live less than a fifth of a second may be missed.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from infra.storage.files import write_json

MODEL = ["--model", "tiny", "--global-batch", "1", "--micro-batch", "1", "--device", "cpu"]
COMMANDS = {
    "doctor": ["infra.doctor", "--quick"],
    "plan": ["train.plan", "--global-batch", "96", "--micro-batch", "4", "--device", "cpu"],
    "tokenize": ["pipeline.tokenize", "--out", "tokens"],
    "run": ["train.run", *MODEL, "--steps", "2", "--data", "../data", "--name", "one"],
    "search": [
        "tune.search", *MODEL, "--data", "../data", "--name", "one", "--memory-limit", "8GB", "--searcher", "grid",
        "--trial-steps", "8", "--trial-time", "5s", "--confirm-rounds", "0",
    ],
}  # fmt: skip
LONGER = {
    "books": ["pipeline.tokenize", "{books}", "--out", "tokens"],
    "training": ["train.run", *MODEL, "--steps", "200", "--cycle", "50+1", "--data", "../data", "--name", "one"],
}


MEASURES = ("seconds", "seconds_to_first_line", "processor_seconds", "processes")


def main() -> None:
    """Run the pairs, print each row as it is known, and record them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--record", type=Path)
    parser.add_argument("--note", default="", help="what else the machine did, for the record")
    parser.add_argument("--books", type=Path, help="a folder of texts to tokenize")
    options = parser.parse_args()
    commands = COMMANDS | (LONGER if options.books else {})
    trees = {"old": options.old.resolve(), "new": options.new.resolve()}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{folder}/mlflow.db"
        run(trees["new"], folder, ["pipeline.tokenize", "--out", "data"])  # and creates the store
        for pair in range(options.pairs):
            for command, words in commands.items():
                words = [str(options.books.resolve()) if word == "{books}" else word for word in words]
                for tree in ("old", "new") if pair % 2 == 0 else ("new", "old"):
                    work = folder / "work"
                    work.mkdir()
                    row = {"pair": pair, "command": command, "tree": tree} | run(trees[tree], work, words)
                    shutil.rmtree(work)
                    rows.append(row)
                    print(json.dumps(row), flush=True)
    medians = {
        measure: {
            command: {
                tree: median(row[measure] for row in rows if (row["command"], row["tree"]) == (command, tree))
                for tree in trees
            }
            for command in commands
        }
        for measure in MEASURES
    }
    record = {
        "command": "python -P tests/benchmarks/startup.py OLD NEW",
        "commits": {name: commit(tree) for name, tree in trees.items()},
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("ray", "mlflow", "torch")},
        "machine": {"cores": os.cpu_count(), "load_at_the_end": os.getloadavg()},
        "note": options.note,
        "commands": {name: " ".join(["python -m", *words]) for name, words in commands.items()},
        "medians": medians,
        "rows": rows,
    }  # fmt: skip
    print(json.dumps(medians, indent=1))
    if options.record:
        write_json(options.record, record)


def run(tree: Path, folder: Path, words: list[str]) -> dict[str, float]:
    """What one command of ``tree`` takes in ``folder``: the :data:`MEASURES`, and the load before it."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    load = os.getloadavg()[0]
    began = time.perf_counter()
    first: list[float] = []
    spent: dict[int, float] = {}
    command = psutil.Popen(
        [sys.executable, "-m", *words], cwd=folder, env=environment | {"PYTHONPATH": str(tree)}, stdout=subprocess.PIPE
    )

    def read() -> None:
        for _ in command.stdout:
            first.append(time.perf_counter() - began)

    reader = threading.Thread(target=read)
    reader.start()
    while command.poll() is None:
        with suppress(psutil.NoSuchProcess):
            for process in (command, *command.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    spent[process.pid] = sum(process.cpu_times()[:2])
        time.sleep(0.2)
    seconds = time.perf_counter() - began
    reader.join()
    if command.returncode:
        raise SystemExit(f"{words} of {tree} ended with {command.returncode}")
    found = (seconds, first[0] if first else seconds, sum(spent.values()), len(spent))
    return {name: round(value, 2) for name, value in zip(MEASURES, found, strict=True)} | {
        "load_before": round(load, 2)
    }


def commit(tree: Path) -> str:
    """The commit that ``tree`` has checked out."""
    asked = ["git", "-C", str(tree), "rev-parse", "--short", "HEAD"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
