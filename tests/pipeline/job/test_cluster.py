"""Dying workers and unreliable storage: without Ray, on a real Ray, and with a real S3 server."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from infra.errors import UserError
from infra.storage.directory import StorageDir
from pipeline.books.readers import RawBook, read_books
from pipeline.books.sources import build_inventory
from pipeline.config import TokenizeConfig
from pipeline.job.plan import make_partitions
from pipeline.shards import read_manifest
from pipeline.tokenize import main

ROOT = Path(__file__).parent.parent.parent.parent


def command(source: Path | str, out: Path, store: str, *more: str) -> list[str]:
    return [
        sys.executable, "-m", "pipeline.tokenize", str(source), "--out", str(out), "--shard-size", "1MB",
        "--tracking-uri", store, *more,
    ]  # fmt: skip


@pytest.fixture
def deadly_encoder(tmp_path: Path) -> dict[str, str]:
    """An environment in which the encoder crashes its process on the word KILLER, as a bug in native code would."""
    folder = tmp_path / "path" / "gigatoken"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(
        textwrap.dedent(
            f"""
            import importlib.util, os, sys
            from importlib.machinery import PathFinder
            spec = PathFinder.find_spec("gigatoken", [p for p in sys.path if p != {str(folder.parent)!r}])
            module = importlib.util.module_from_spec(spec)
            sys.modules["gigatoken"] = module
            spec.loader.exec_module(module)
            encoder = module.Tokenizer.from_tiktoken

            class Deadly:
                def __init__(self, real):
                    self.real = real
                def encode(self, text):
                    if b"KILLER" in text:
                        os.kill(os.getpid(), {signal.SIGKILL})
                    return self.real.encode(text)

            class Tokenizer:
                @staticmethod
                def from_tiktoken(*arguments, **named):
                    return Deadly(encoder(*arguments, **named))

            module.Tokenizer = Tokenizer
            """
        )
    )
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(folder.parent), str(ROOT)])}


@pytest.fixture(params=["without Ray", "on Ray"])
def address(request: pytest.FixtureRequest) -> str | None:
    return request.getfixturevalue("joined") if request.param == "on Ray" else None


@pytest.mark.slow
def test_a_book_that_crashes_the_encoder_is_quarantined_and_the_rest_is_kept(
    tmp_path: Path, write_books: Callable[..., Path], deadly_encoder: dict[str, str], address: str | None, store: str
) -> None:
    books = write_books(tmp_path / "books", 30, words=12_000)
    with (books / "book 0004.txt").open("a") as file:
        file.write("KILLER\n")
    out = tmp_path / "tokens"
    more = ["--address", address] if address else []
    done = subprocess.run(
        command(books, out, store, *more), cwd=ROOT, env=deadly_encoder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert read_manifest(out).report["books_dropped"] == {"crashed the worker": 1}
    assert read_manifest(out).report["books_kept"] == 29


def workers() -> list[psutil.Process]:
    """Processes below this one that do partitions now, or that will as soon as they have started."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if re.search(r"ray::MapBatches\(_task\)|pipeline\.job\.worker", " ".join(process.cmdline())):
                found.append(process)
    return found


@pytest.mark.slow
def test_a_killed_worker_costs_nothing_but_time(
    tmp_path: Path, write_books: Callable[..., Path], address: str | None, store: str
) -> None:
    books = write_books(tmp_path / "books", 60, words=12_000)
    out = str(tmp_path / "whole")
    config = TokenizeConfig((str(books),), out=out, shard_size=1_000_000, tracking_uri=store, address=address)
    main(config)
    whole = read_manifest(config.out)
    killed: list[int] = []
    stop = threading.Event()

    def kill() -> None:
        while not stop.is_set() and len(killed) < 2:
            for process in workers():
                process.kill()
                killed.append(process.pid)
                break
            time.sleep(0.01)

    killer = threading.Thread(target=kill)
    killer.start()
    main(replace(config, out=str(tmp_path / "killed")))
    stop.set()
    killer.join()
    assert killed
    assert read_manifest(tmp_path / "killed") == whole


@pytest.mark.slow
def test_books_are_read_from_s3_that_fails_now_and_then(
    tmp_path: Path, write_books: Callable[..., Path], s3: tuple[str, Callable[[float], None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    query, set_rate = s3
    local = write_books(tmp_path / "books", 12, words=3000)
    for path in local.iterdir():
        StorageDir.of(f"s3://places/books{query}").write(path.name, path.read_bytes())
    set_rate(0.2)
    settings = TokenizeConfig()
    inventory = build_inventory([f"s3://places/books{query}"])
    assert all(abs(file.modified / 1e9 - time.time()) < 3600 for file in inventory.files)
    plan = make_partitions(inventory, settings)
    found = [book for partition in plan for file_range in partition.ranges for book in read_books(file_range, settings)]
    assert {b.id: b.data for b in found if isinstance(b, RawBook)} == {
        f"books/{path.name}": path.read_bytes() for path in local.iterdir()
    }
    counts = {"books/*1.txt": 2, "*": 12, "bo*": 12, "*/*1.txt": 2, "**/*1.txt": 2, "*1.txt": 0, "*/*/*1.txt": 0}
    for pattern, count in counts.items():
        if count:
            assert len(build_inventory([f"s3://places/{pattern}{query}"]).files) == count, pattern
        else:
            with pytest.raises(UserError, match="No books found"):
                build_inventory([f"s3://places/{pattern}{query}"])
    set_rate(1.0)
    with pytest.raises(UserError, match=r"(?i)cannot (be )?read"):
        list(read_books(plan[0].ranges[0], settings))
