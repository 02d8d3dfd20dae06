"""How many partitions can one driver hand out, and what memory does it need for terabytes of them?

python -P tests/benchmarks/scale.py [--partitions 1000 4000 20000] [--books 10000 200000] [--record FILE.json]

The real command on a real cluster of this machine's cores. First without the work: every partition is a file of one
megabyte of spaces, which is read, found empty and left out, and one book is kept. All files are links to the same
bytes. Then with many short books, which the driver remembers by id and hash. Measured is the driver's process: its
processor time and peak memory, from which follow the partitions per second that it could hand out if nothing else
limited it, and the memory that more partitions and books would need.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from infra.device.provenance import find_commit
from infra.storage.files import write_json

HEAD = """
import os, sys
os.environ["RAY_prestart_worker_first_driver"] = "0"
import ray
ray.init(address="local", include_dashboard=False, log_to_driver=False)
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""
MEGABYTE = 10**6


def main() -> None:
    """Measure each number of partitions, print the rows, and record them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--partitions", type=int, nargs="+", default=[1000, 4000, 20000])
    parser.add_argument("--books", type=int, nargs="+", default=[10000, 200000])
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    os.environ["RAY_AUTH_MODE"] = "token"  # as this Ray asks for
    with (
        tempfile.TemporaryDirectory() as place,
        subprocess.Popen([sys.executable, "-c", HEAD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as ray,
    ):
        assert ray.stdout is not None
        address = ray.stdout.readline().strip()
        folder = Path(place)
        run("partitions", write_partitions(folder, 1), folder, address)  # creates the MLflow store
        for kind, write in (("partitions", write_partitions), ("books", write_books)):
            for number in getattr(options, kind):
                row = {kind: number} | run(kind, write(folder, number), folder, address)
                rows.append(row)
                print(json.dumps(row), flush=True)
    record = {
        "command": " ".join(["python", "-P", *sys.argv]),
        "commit": find_commit(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("ray", "mlflow")},
        "machine": {"cores": os.cpu_count(), "load_at_the_end": os.getloadavg()},
        "rows": rows,
    }
    if options.record:
        write_json(options.record, record)


def write_partitions(folder: Path, number: int) -> Path:
    """A folder of ``number`` files that are a partition each and hold nothing, and one book."""
    books = folder / f"partitions-{number}"
    books.mkdir()
    chapters = (f"Chapter {n}. It was a day like any other, said the {n}th man.\n" for n in range(400))
    (books / "kept.txt").write_text("".join(chapters), encoding="utf-8")
    spaces = folder / "spaces"
    spaces.write_bytes(b" " * MEGABYTE)
    for partition in range(number):
        (books / f"{partition:07d}.txt").hardlink_to(spaces)
    return books


def write_books(folder: Path, number: int) -> Path:
    """A file of ``number`` books of about 1,200 characters."""
    books = folder / f"books-{number}.jsonl"
    with books.open("w", encoding="utf-8") as file:
        for book in range(number):
            text = "".join(f"On day {n} of {book} it rained, said the {n * book}th man.\n" for n in range(30))
            file.write(json.dumps({"id": f"book-{book:08d}", "text": text}) + "\n")
    return books


def run(kind: str, books: Path, folder: Path, address: str) -> dict[str, Any]:
    """The driver's seconds, processor seconds and peak memory for tokenizing ``books``."""
    out = folder / f"tokens-{books.name}"
    size = "1MB" if kind == "partitions" else "16MB"
    words = ["pipeline.tokenize", str(books), "--out", str(out), "--shard-size", size]
    began = time.perf_counter()
    driver = subprocess.Popen(
        [sys.executable, "-m", *words], cwd=folder, stdout=subprocess.DEVNULL,
        env=os.environ | {"RAY_ADDRESS": address, "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db"},
    )  # fmt: skip
    _, status, usage = os.wait4(driver.pid, 0)
    seconds = time.perf_counter() - began
    if os.waitstatus_to_exitcode(status):
        raise SystemExit(f"{' '.join(words)} ended with {os.waitstatus_to_exitcode(status)}")
    counts = json.loads((out / "manifest.json").read_text(encoding="utf-8"))["report"]
    return {
        "books_read": counts["books_read"],
        "books_kept": counts["books_kept"],
        "seconds": round(seconds, 2),
        "processor_seconds": round(usage.ru_utime + usage.ru_stime, 2),
        "peak_bytes": usage.ru_maxrss * 1024,
    }


if __name__ == "__main__":
    main()
