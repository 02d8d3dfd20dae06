"""How fast are batches read? Ours against NumPy memmap random crops, litdata and mosaicml-streaming, in one run.

    python -P tests/benchmarks/loader.py [--tokens 20000000] [--seconds 2] [--record FILE.json]

Every loader gives (16, 1024) int64 inputs and targets from the same tokens, on one core, from a warm page
cache, in a random order. Only ours and the two published ones visit every window once per epoch; random
crops, nanoGPT's way, repeat some and leave out others. A loader that is not installed is left out, with a message.
"""

import argparse
import importlib.util
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch

from infra.storage.files import write_json
from pipeline.shards import Manifest, ShardRow, TokenShards, write_shard
from train.config import Batch
from train.data.loader import BatchLoader, WorkerShare
from train.data.windows import Windows

BATCH, LENGTH = 16, 1024
Next = Callable[[], tuple[torch.Tensor, torch.Tensor]]


def main() -> None:
    """Measure, print a table, and record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=20_000_000)
    parser.add_argument("--seconds", type=float, default=2.0, help="of measuring a loader, three times over")
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    loaders = dict(LOADERS)
    for name, module in {"litdata": "litdata", "mosaicml-streaming": "streaming"}.items():
        if not importlib.util.find_spec(module):
            del loaders[name]
            print(f"{name} is not installed and is left out")
    rows = []
    rates: dict[str, list[float]] = {name: [] for name in loaders}
    # Interleaved, because machines drift, and each in a process of its own, because some read ahead in threads.
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as alone:
        for _ in range(3):
            for name in loaders:
                rates[name].append(alone.submit(measured, name, options.tokens, options.seconds).result())
    for name, values in rates.items():
        rows.append({"loader": name, "million_tokens_per_second": round(statistics.median(values) / 1e6, 1),
                     "runs": [round(value / 1e6, 1) for value in values]})  # fmt: skip
        print(f"{name:28} {rows[-1]['million_tokens_per_second']:10,.1f} million tokens/s  {rows[-1]['runs']}")
    if options.record:
        packages = ["torch", "numpy", "pyarrow", *(n for n in ("litdata", "mosaicml-streaming") if n in rates)]
        about = {"command": " ".join(["python", *sys.argv]), "versions": {name: version(name) for name in packages}}
        write_json(options.record, about | {"tokens": options.tokens, "rows": rows})


def measured(name: str, count: int, seconds: float) -> float:
    """Tokens per second that the loader ``name`` gives on one core, of ``count`` tokens that it has written itself."""
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    tokens = np.random.default_rng(0).integers(0, 50257, count).astype(np.uint16)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        return rate(LOADERS[name](tokens, Path(folder)), seconds)


def rate(next_batch: Next, seconds: float) -> float:
    """Tokens that ``next_batch`` gives per second of one core's time; neighbors on a shared machine do not count."""
    next_batch()
    count = 0
    began, worked = time.perf_counter(), time.process_time()
    while time.perf_counter() - began < seconds:
        inputs, targets = next_batch()
        assert inputs.shape == targets.shape == (BATCH, LENGTH)
        count += inputs.numel()
    return count / (time.process_time() - worked)


def ours(tokens: np.ndarray, folder: Path) -> Next:
    """Shards as the pipeline writes them, read by the training's loader."""
    shards = []
    for number, part in enumerate(np.array_split(tokens, 4)):
        row = ShardRow(f"b{number}", None, None, None, "made", "0" * 64, len(part), part)
        shards.append(write_shard(folder, f"train/{number:06d}-000.arrow", "train", [row]))
    Manifest.of(shards, config={}, tokenizer_sha256="made", inputs={}, report={}).write(folder)
    windows = Windows(TokenShards(folder).streams("train"), LENGTH, 0)
    loader = BatchLoader(windows, WorkerShare(Batch(BATCH, BATCH)), torch.device("cpu"))
    return loader.next


def random_crops(tokens: np.ndarray, folder: Path) -> Next:
    """Crops at random places of one flat file, as nanoGPT reads its data."""
    tokens.tofile(folder / "train.bin")
    data = np.memmap(folder / "train.bin", dtype=np.uint16, mode="r")

    def next_batch() -> tuple[torch.Tensor, torch.Tensor]:
        places = torch.randint(len(data) - LENGTH, (BATCH,)).tolist()
        inputs = torch.stack([torch.from_numpy(data[p : p + LENGTH].astype(np.int64)) for p in places])
        targets = torch.stack([torch.from_numpy(data[p + 1 : p + 1 + LENGTH].astype(np.int64)) for p in places])
        return inputs, targets

    return next_batch


def litdata(tokens: np.ndarray, folder: Path) -> Next:
    """litdata's StreamingDataset over blocks of LENGTH + 1 tokens, shuffled."""
    from litdata import StreamingDataLoader, StreamingDataset, TokensLoader  # type: ignore[import-not-found]
    from litdata.streaming.writer import BinaryWriter  # type: ignore[import-not-found]

    writer = BinaryWriter(str(folder), chunk_bytes="64MB", item_loader=TokensLoader(block_size=LENGTH + 1))
    pieces = np.array_split(tokens.astype(np.int32), 16)
    for number, part in enumerate(pieces):
        writer.add_item(number, torch.from_numpy(part))
    writer.done()
    writer.merge()
    data = StreamingDataset(str(folder), item_loader=TokensLoader(block_size=LENGTH + 1), shuffle=True, drop_last=True)
    return _endless(StreamingDataLoader(data, batch_size=BATCH, num_workers=0, drop_last=True))


def mosaic(tokens: np.ndarray, folder: Path) -> Next:
    """mosaicml-streaming's StreamingDataset over MDS samples of LENGTH + 1 tokens, shuffled."""
    from streaming import MDSWriter, StreamingDataset  # type: ignore[import-not-found]

    width = LENGTH + 1
    with MDSWriter(out=str(folder), columns={"tokens": f"ndarray:uint16:{width}"}) as writer:
        for start in range(0, len(tokens) - width, LENGTH):
            writer.write({"tokens": tokens[start : start + width]})
    data = StreamingDataset(local=str(folder), shuffle=True, batch_size=BATCH)
    collate = lambda samples: torch.from_numpy(np.stack([s["tokens"] for s in samples]).astype(np.int64))  # noqa: E731
    return _endless(torch.utils.data.DataLoader(data, batch_size=BATCH, collate_fn=collate, drop_last=True))


def _endless(loader: torch.utils.data.DataLoader) -> Next:
    def batches():
        while True:
            yield from loader

    stream = batches()

    def next_batch() -> tuple[torch.Tensor, torch.Tensor]:
        batch = next(stream).long()
        return batch[:, :-1], batch[:, 1:]

    return next_batch


LOADERS: dict[str, Callable[[np.ndarray, Path], Next]] = {
    "throughline": ours,
    "numpy memmap, random crops": random_crops,
    "litdata": litdata,
    "mosaicml-streaming": mosaic,
}


if __name__ == "__main__":
    main()
