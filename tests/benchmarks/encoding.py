"""How fast does each kind of tokenizer encode, compared with the library that it is written for?

    python -P tests/benchmarks/encoding.py BOOKS [--size 8MB] [--record FILE.json]

On one core, the first text files of the folder BOOKS up to the size: GPT-2's ranks and a trained tokenizer.json, in
turns, three times each, after a first time that fills the fast encoder's memory of words.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from infra.cli.progress import status
from infra.cli.units import parse_size
from infra.storage.files import write_json
from pipeline.encoding.tokenizer import Tokenizer, gpt2
from pipeline.vocabulary import VocabularyConfig, train

ROUNDS = 3


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("books", type=Path)
    parser.add_argument("--size", type=parse_size, default=8_000_000)
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    texts: list[bytes] = []
    for file in sorted(options.books.rglob("*.txt")):
        if sum(map(len, texts)) < options.size:
            texts.append(file.read_bytes().decode(errors="replace").encode())
    size = sum(map(len, texts))
    with status("training a tokenizer") as told:
        own = Tokenizer(train(VocabularyConfig(size=4096), told), "tokenizer.json")
    found: dict[str, list[float]] = {}
    for turn in range(ROUNDS + 1):
        for name, tokenizer in (("GPT-2's ranks", gpt2()), ("tokenizer.json of 4,096 ids", own)):
            for encoder, encode in ways(tokenizer).items():
                began = time.perf_counter()
                for text in texts:
                    encode(text)
                if turn:
                    rates = found.setdefault(f"{name}, {encoder}", [])
                    rates.append(round(size / 1e6 / (time.perf_counter() - began), 1))
    for name, rates in found.items():
        print(f"{name}: {statistics.median(rates)} MB/s")
    if options.record:
        record = {
            "command": "python -P tests/benchmarks/encoding.py BOOKS", "python": sys.version.split()[0],
            "versions": {name: version(name) for name in ("gigatoken", "tiktoken", "tokenizers")},
            "cores": os.cpu_count(), "load": os.getloadavg(), "MB": round(size / 1e6, 1), "MB_per_second": found,
        }  # fmt: skip
        write_json(options.record, record)


def ways(tokenizer: Tokenizer) -> dict[str, Callable[[bytes], object]]:
    """The fast encoder and the tokenizer's own library."""
    return {"gigatoken": tokenizer.encode, tokenizer.library: lambda text: tokenizer.encode(text, "tiktoken")}


if __name__ == "__main__":
    main()
