"""The long survival campaigns: ``pytest tests/pipeline/campaign.py`` (pytest does not collect this name by itself).

KILLS (default 20) is the number of random moments at which everything is killed.
"""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.cluster_utils import Cluster

from pipeline.config import TokenizeConfig
from pipeline.encoding import decode, encode, reference
from pipeline.piece import do_piece
from pipeline.plan import make_plan
from pipeline.shards import read_manifest
from pipeline.sources import find
from pipeline.tokenize import main

ROOT = Path(__file__).parent.parent.parent
KILLS = int(os.environ.get("KILLS", "20"))

pytestmark = pytest.mark.timeout(3600)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a data set."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_killed_at_random_moments_it_ends_with_the_same_bytes(
    tmp_path: Path, write_books: Callable[..., Path], store: str
) -> None:
    books = write_books(tmp_path / "books", 120, words=60_000)
    config = TokenizeConfig((str(books),), tmp_path / "whole", shard_size=1_000_000, tracking_uri=store)
    start = time.monotonic()
    main(config)
    whole, length = contents(config.out), time.monotonic() - start
    chance = random.Random(0)
    command = [
        sys.executable, "-m", "pipeline.tokenize", str(books), "--out", str(tmp_path / "killed"),
        "--shard-size", "1MB", "--tracking-uri", store,
    ]  # fmt: skip
    for _ in range(KILLS):
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
        try:
            process.wait(timeout=chance.uniform(0, length))
        except subprocess.TimeoutExpired:
            for victim in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
                victim.send_signal(signal.SIGKILL) if victim.is_running() else None
            process.wait()
    main(replace(config, out=tmp_path / "killed"))
    assert contents(tmp_path / "killed") == whole


def test_a_lost_node_costs_nothing_but_time(tmp_path: Path, write_books: Callable[..., Path], store: str) -> None:
    books = write_books(tmp_path / "books", 80, words=12_000)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        node = cluster.add_node(num_cpus=1)
        config = TokenizeConfig(
            (str(books),), tmp_path / "lost", shard_size=1_000_000, tracking_uri=store, address=str(cluster.address)
        )

        def lose() -> None:
            while not list(config.out.glob("pieces/0*.json")):
                time.sleep(0.005)
            cluster.remove_node(node, allow_graceful=False)

        loser = threading.Thread(target=lose)
        loser.start()
        main(config)
        loser.join()
        lost = read_manifest(config.out)
        main(replace(config, out=tmp_path / "one", workers=1))
        assert read_manifest(tmp_path / "one") == lost
    finally:
        cluster.shutdown()


@settings(max_examples=100_000, deadline=None)
@given(st.text(st.characters()))
def test_ids_equal_tiktoken_on_all_of_unicode(text: str) -> None:
    data = text.encode("utf-8", "replace")  # lone surrogates cannot be written; a reader replaces them
    ids = encode(data)
    assert ids.tolist() == reference().encode_ordinary(data.decode())
    assert decode(ids) == data.decode()


def test_a_hundred_thousand_tiny_files(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    for number in range(100_000):
        line = "It was a quiet morning on the harbour road, and nobody said a word. "
        (folder / f"{number}.txt").write_text(f"Book {number}. {line * 4}")
    config = TokenizeConfig((str(folder),))
    summaries = [do_piece(piece, tmp_path / "out", "tiny") for piece in make_plan(find(config.sources), config)]
    assert sum(summary["books"] for summary in summaries) == 100_000


def test_a_book_of_two_gigabytes_in_one_line(tmp_path: Path, prose: Callable[..., str]) -> None:
    line = prose(1, 100_000).replace("\n", " ").encode()
    with (tmp_path / "line.txt").open("wb") as file:
        while file.tell() < 2_000_000_000:
            file.write(line)
    config = TokenizeConfig((str(tmp_path / "line.txt"),), duplicates="keep")
    (piece,) = make_plan(find(config.sources), config)
    assert do_piece(piece, tmp_path / "out", "line")["books"] == 1
