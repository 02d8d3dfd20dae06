"""How fast are books made into tokens? Ours against the floor and the ways of others, in one run.

    python -P tests/benchmarks/tokenize.py BOOKS [--sizes 82MB 400MB 1200MB 4GB] [--systems ours pool]
        [--repeats 3] [--record FILE.json]

(-P, because the folder of a script comes first on the path, and this name is also one of Python's own.)

BOOKS is a folder of text files; a size larger than the folder repeats its books under new names. Every
system works with two processes (ours without Ray with one a core: use two cores) and is timed as a whole,
start-up included, in rounds that run each once: the floor reads, encodes with gigatoken and writes, in two
plain processes, and does nothing else. "Ours, on Ray" is the command with --workers 2, and "Ours, warm" the
second execution on a Ray that has started: cleaning, hashing, checksums and fsync included. Peak memory is
the proportional share (PSS) of the whole process tree of our command, in a run of its own, because watching
it costs a twentieth of the time.

All of it takes two hours. --sizes and --systems, by a part of their names, measure a part of it; the record
keeps the rows of other parts, each with the commit and the load that it was measured at.
"""

import argparse
import importlib.util
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from infra.cli.units import parse_size
from infra.device.provenance import find_commit
from infra.storage.files import write_json

ROOT = Path(__file__).resolve().parent.parent.parent
WORKERS = 2

_SETUP = """
import os, sys, time
from multiprocessing import get_context
from pathlib import Path
import numpy as np
files = sorted(str(p) for p in Path(sys.argv[1]).rglob("*.txt"))
out = Path(sys.argv[2])
out.mkdir(parents=True, exist_ok=True)
"""

_FLOOR = """
def work(part):
    from pipeline.encoding.tokenizer import gpt2
    with (out / f"{part}.bin").open("wb") as file:
        for name in files[part::2]:
            with open(name, "rb") as book:
                gpt2().encode(book.read()).tofile(file)

if __name__ == "__main__":
    processes = [get_context("fork").Process(target=work, args=(part,)) for part in range(2)]
    [p.start() for p in processes]
    [p.join() for p in processes]
    assert not any(p.exitcode for p in processes)
"""

_POOL = """
def load():
    from pipeline.encoding.tokenizer import gpt2
    gpt2().tiktoken

def encode(name):
    from pipeline.encoding.tokenizer import gpt2
    with open(name, encoding="utf-8", newline="") as book:
        return gpt2().tiktoken.encode_to_numpy(book.read(), disallowed_special=()).astype(np.uint16)

if __name__ == "__main__":
    with get_context("fork").Pool(2, load) as pool, (out / "tokens.bin").open("wb") as file:
        for ids in pool.imap(encode, files, chunksize=4):
            ids.tofile(file)
"""

_DATASETS = """
def encode(book):
    from pipeline.encoding.tokenizer import gpt2
    ids = gpt2().tiktoken.encode_ordinary(book["text"])
    return {"ids": ids, "len": len(ids)}

if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    from datasets import Dataset
    def books():
        for name in files:
            with open(name, encoding="utf-8", newline="") as book:
                yield {"text": book.read()}
    data = Dataset.from_generator(books, cache_dir=str(out / "cache"))
    data = data.map(encode, remove_columns=["text"], num_proc=2)
    stream = np.memmap(out / "tokens.bin", dtype=np.uint16, mode="w+", shape=(int(np.sum(data["len"])),))
    start = 0
    for shard in range(64):
        part = data.shard(num_shards=64, index=shard, contiguous=True).with_format("numpy")
        if len(part):
            ids = np.concatenate(part["ids"])
            stream[start : start + len(ids)] = ids
            start += len(ids)
    stream.flush()
"""

_LITDATA = """
def encode(name):
    from pipeline.encoding.tokenizer import gpt2
    import torch
    with open(name, encoding="utf-8", newline="") as book:
        yield torch.tensor(gpt2().tiktoken.encode_ordinary(book.read()), dtype=torch.uint16)

if __name__ == "__main__":
    from litdata import optimize, TokensLoader
    optimize(fn=encode, inputs=files, output_dir=str(out / "shards"), num_workers=2, chunk_bytes="64MB",
             item_loader=TokensLoader())
"""

_WARM = """
if __name__ == "__main__":
    from infra.ray.cluster import ray_session
    from infra.storage.directory import StorageDir
    from pipeline.config import TokenizeConfig
    from pipeline.job.plan import make_partitions
    from pipeline.books.sources import build_inventory
    from pipeline.job.ray_data import run_partitions
    config = TokenizeConfig(sources=(sys.argv[1],))
    plan = make_partitions(build_inventory(config.sources), config)
    with ray_session(cpus=2):
        list(run_partitions(plan, StorageDir.of(out), "warm-up", workers=2, is_own_ray=True))
        start = time.perf_counter()
        list(run_partitions(plan, StorageDir.of(out), "measured", workers=2, is_own_ray=True))
        print(f"SECONDS {time.perf_counter() - start}")
"""

PROGRAMS = {
    "floor: gigatoken, two processes": _FLOOR,
    "tiktoken in a pool": _POOL,
    "datasets.map + tiktoken": _DATASETS,
    "litdata + tiktoken": _LITDATA,
}
NEEDS = {"datasets.map + tiktoken": "datasets", "litdata + tiktoken": "litdata"}
OURS, ON_RAY, WARM = "ours, without Ray", "ours, on Ray", "ours, warm"

_COMMAND = """
import sys
from pipeline import tokenize
from pipeline.config import TokenizeConfig

books, out, store, workers = sys.argv[1:]
config = {"duplicates": "keep", "tracking_uri": store, "workers": int(workers) or None}
tokenize.main(TokenizeConfig((books,), out=out, **config))
"""


def main() -> None:
    """Measure, print a table, and record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("books", type=Path)
    parser.add_argument(
        "--sizes", nargs="+", type=parse_size, default=[82_000_000, 400_000_000, 1_200_000_000, 4_000_000_000]
    )
    parser.add_argument("--systems", nargs="+", default=[""], help="parts of their names")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="tokenize-benchmark-") as work:
        for size in options.sizes:
            corpus, actual = repeat_books(options.books, Path(work) / f"books-{size}", size)
            rows += measure(corpus, actual, Path(work), options.repeats, options.systems)
            shutil.rmtree(corpus)
    if options.record:
        rows = kept(options.record, rows)
        write_json(options.record, record(rows))
    show(rows)


def repeat_books(books: Path, folder: Path, size: int) -> tuple[Path, int]:
    """A folder of about ``size`` bytes: the text files of ``books``, again and again under new names."""
    folder.mkdir(parents=True)
    files = sorted(path for path in books.rglob("*.txt"))
    total = number = 0
    while total < size * 0.99:
        source = files[number % len(files)]
        shutil.copyfile(source, folder / f"{number:06d}.txt")
        total += source.stat().st_size
        number += 1
    return folder, total


def measure(corpus: Path, size: int, work: Path, repeats: int, parts: list[str]) -> list[dict]:
    """The systems that ``parts`` name, each ``repeats`` times, in rounds, so that a drift meets all of them."""
    systems: dict[str, Callable[[Path], float]] = {
        name: lambda out, program=program: run_program(program, corpus, out)[0]
        for name, program in PROGRAMS.items()
        if name not in NEEDS or importlib.util.find_spec(NEEDS[name])
    }
    systems[WARM] = lambda out: float(run_program(_WARM, corpus, out)[1].split("SECONDS ")[1].split()[0])
    systems[ON_RAY] = lambda out: run_ours(corpus, out, WORKERS)
    systems[OURS] = lambda out: run_ours(corpus, out, 0)
    systems = {name: system for name, system in systems.items() if any(file_range in name for file_range in parts)}
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    out = work / "out"
    for _ in range(repeats):
        for name, system in systems.items():
            seconds[name].append(round(system(out), 2))
            print(f"{name}, {size / 1e6:.0f} MB: {seconds[name][-1]} s", flush=True)
            shutil.rmtree(out, ignore_errors=True)
    rows = [
        {
            "system": name,
            "MB": round(size / 1e6, 1),
            "seconds": runs,
            "MB_per_second": round(size / 1e6 / statistics.median(runs), 1),
            "commit": find_commit(),
            "load": os.getloadavg(),
        }
        for name, runs in seconds.items()
    ]
    for row in rows:
        if row["system"] in (OURS, ON_RAY):
            peaks: list[int] = []
            look = lambda process, peaks=peaks: peaks.append(tree_memory(process))  # noqa: E731
            run_ours(corpus, out, WORKERS if row["system"] == ON_RAY else 0, look)
            shutil.rmtree(out)
            row["peak_MB"] = round(max(peaks) / 1e6)
    return rows


def kept(file: Path, rows: list[dict]) -> list[dict]:
    """``rows`` with those of other systems and sizes that a record holds already."""
    old = json.loads(file.read_text(encoding="utf-8"))["rows"] if file.exists() else []
    new = {(row["system"], row["MB"]) for row in rows}
    return sorted([row for row in old if (row["system"], row["MB"]) not in new] + rows, key=lambda row: row["MB"])


def run_program(program: str, corpus: Path, out: Path) -> tuple[float, str]:
    """Seconds and output of a Python program that is given the corpus and a folder."""
    script = out.parent / "program.py"
    script.write_text(textwrap.dedent(_SETUP + program), encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"}
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, str(script), str(corpus), str(out)], capture_output=True, text=True, env=environment
    )
    taken = time.perf_counter() - start
    if done.returncode:
        raise SystemExit(f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return taken, done.stdout


def run_ours(corpus: Path, out: Path, workers: int, look: Callable[[int], None] = lambda process: None) -> float:
    """Seconds of the command, on Ray with that many ``workers`` or, with 0, without it.

    ``look`` is called with its process number four times a second.
    """
    store = f"sqlite:///{out.parent}/mlflow.db"
    command = [sys.executable, "-c", _COMMAND, str(corpus), str(out / "tokens"), store, str(workers)]
    start = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    while True:
        try:
            code = process.wait(timeout=0.25)
            break
        except subprocess.TimeoutExpired:
            look(process.pid)
    taken = time.perf_counter() - start
    if code:
        raise SystemExit(f"the command failed with code {code}")
    return taken


def tree_memory(pid: int) -> int:
    """PSS in bytes of a process and all below it; those that end meanwhile count nothing."""
    total = 0
    try:
        processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    for process in processes:
        try:
            total += process.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return total


def show(rows: list[dict]) -> None:
    """The rows as a table, the fastest first."""
    table = Table("system", "MB", "seconds", "MB/s", "peak MB")
    for row in sorted(rows, key=lambda row: (row["MB"], -row["MB_per_second"])):
        runs = " ".join(f"{seconds:g}" for seconds in row["seconds"])
        peak = str(row.get("peak_MB", ""))
        table.add_row(row["system"], f"{row['MB']:g}", runs, f"{row['MB_per_second']:g}", peak)
    Console().print(table)


def record(rows: list[dict]) -> dict:
    """The rows with what they were measured on."""
    packages = ("ray", "gigatoken", "tiktoken", "pyarrow", "datasets", "litdata")
    return {
        "command": "python -P tests/benchmarks/tokenize.py BOOKS",
        "corpus": "books of Project Gutenberg, repeated under new names where the size is above 82 MB",
        "machine": {
            "cores": os.cpu_count(),
            "memory_GB": round(psutil.virtual_memory().total / 1e9),
        },
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in packages if importlib.util.find_spec(name)},
        "rows": rows,
    }


if __name__ == "__main__":
    main()
