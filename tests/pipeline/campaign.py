"""The long survival campaigns: ``pytest tests/pipeline/campaign.py`` (pytest does not collect this name by itself).

KILLS (default 20) is the number of random moments at which everything, the driver or a worker is killed, and
RECORD the file that tells of them.
"""

import contextlib
import os
import random
import re
import shutil
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

from infra.device import provenance
from infra.storage.directory import StorageDir
from infra.storage.files import write_json
from pipeline.books.sources import build_inventory
from pipeline.config import TokenizeConfig
from pipeline.encoding.tokenizer import gpt2
from pipeline.job.plan import make_partitions
from pipeline.job.task import run_partition
from pipeline.shards import TRACKING_FILE, read_manifest
from pipeline.tokenize import main

ROOT = Path(__file__).parent.parent.parent
KILLS = int(os.environ.get("KILLS", "20"))

pytestmark = pytest.mark.timeout(3600)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a data set, but for the name of the run that made it."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name not in (".command", TRACKING_FILE))
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_killed_at_random_moments_it_ends_with_the_same_bytes(
    tmp_path: Path, write_books: Callable[..., Path], store: str
) -> None:
    books = write_books(tmp_path / "books", 120, words=60_000)
    config = TokenizeConfig((str(books),), out=str(tmp_path / "whole"), shard_size=1_000_000, tracking_uri=store)
    main(config)
    whole, total = contents(tmp_path / "whole"), partitions(tmp_path / "whole")
    chance = random.Random(0)
    out = tmp_path / "killed"
    command = [
        sys.executable, "-m", "pipeline.tokenize", str(books), "--out", str(out), "--shard-size", "1MB",
        "--tracking-uri", store,
    ]  # fmt: skip
    kills: list[dict[str, object]] = []
    while len(kills) < KILLS:
        who = ("everything", "driver", "worker")[len(kills) % 3]
        before = partitions(out)
        awaited = chance.randint(before, total)  # the work is a second of the fifteen that the command takes
        ray = ["--workers", "2"] * (len(kills) // 3 % 2)
        process = subprocess.Popen([*command, *ray], cwd=ROOT, stdout=subprocess.DEVNULL)
        while process.poll() is None and not (
            partitions(out) >= awaited and (out / "partitions/settings.json").exists()
        ):
            time.sleep(0.002)
        time.sleep(chance.uniform(0, 0.1))
        kill: dict[str, object] = {
            "who": who,
            "on_ray": bool(ray),
            "partitions_before": before,
            "partitions_then": partitions(out),
        }
        if process.poll() is None and victims(process.pid, who):
            chosen = victims(process.pid, who)
            for victim in chosen if who == "everything" else chosen[:1]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    victim.kill()
            kills.append(kill)
        assert process.wait() == (-signal.SIGKILL if process.returncode else 0)
        kill |= {"exit_code": process.returncode, "partitions_after": partitions(out)}
        if process.returncode == 0:
            kill["equal"] = contents(out) == whole
            assert kill["equal"]
            shutil.rmtree(out)  # start over
    main(replace(config, out=out))
    assert contents(out) == whole
    if "RECORD" in os.environ:
        where = provenance.collect()
        del where["command"]  # it holds the path of pytest, which is of this machine; what to run stands above it
        found = {
            "command": "make campaign-pipeline", "where": where, "partitions": total, "files_equal_at_the_end": True,
            "kills": kills,
        }  # fmt: skip
        write_json(Path(os.environ["RECORD"]), found)


def partitions(out: Path) -> int:
    """Partitions that are done."""
    return len(list(out.glob("partitions/0*.json")))


def victims(driver: int, who: str) -> list[psutil.Process]:
    """The processes to kill: the driver, a worker at work, or the driver with all that it started."""
    try:
        process = psutil.Process(driver)
        if who == "driver":
            return [process]
        below = process.children(recursive=True)
        if who == "everything":
            return [process, *below]
        return [child for child in below if re.search(r"^ray::Map|pipeline\.job\.worker", " ".join(child.cmdline()))]
    except psutil.NoSuchProcess:
        return []


def test_a_lost_node_costs_nothing_but_time(tmp_path: Path, write_books: Callable[..., Path], store: str) -> None:
    books = write_books(tmp_path / "books", 80, words=12_000)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        node = cluster.add_node(num_cpus=1)
        config = TokenizeConfig(
            (str(books),),
            out=str(tmp_path / "lost"),
            shard_size=1_000_000,
            tracking_uri=store,
            address=str(cluster.address),
        )

        def lose() -> None:
            while not list((tmp_path / "lost").glob("partitions/0*.json")):
                time.sleep(0.005)
            cluster.remove_node(node, allow_graceful=False)

        loser = threading.Thread(target=lose)
        loser.start()
        main(config)
        loser.join()
        lost = read_manifest(tmp_path / "lost")
        main(replace(config, out=str(tmp_path / "one"), workers=1))
        assert read_manifest(tmp_path / "one") == lost
    finally:
        cluster.shutdown()


@settings(max_examples=100_000)
@given(st.text(st.characters()))
def test_ids_equal_tiktoken_on_all_of_unicode(text: str) -> None:
    data = text.encode("utf-8", "replace")  # lone surrogates cannot be written; a reader replaces them
    ids = gpt2().encode(data)
    assert ids.tolist() == gpt2().tiktoken.encode_ordinary(data.decode())
    assert gpt2().decode(ids) == data.decode()


def test_a_hundred_thousand_tiny_files(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    for number in range(100_000):
        line = "It was a quiet morning on the harbour road, and nobody said a word. "
        (folder / f"{number}.txt").write_text(f"Book {number}. {line * 4}")
    config = TokenizeConfig((str(folder),))
    summaries = [
        run_partition(partition, StorageDir.of(tmp_path / "out"), "tiny")
        for partition in make_partitions(build_inventory(config.sources), config)
    ]
    assert sum(summary["books"] for summary in summaries) == 100_000


def test_a_book_of_two_gigabytes_in_one_line(tmp_path: Path, prose: Callable[..., str]) -> None:
    line = prose(1, 100_000).replace("\n", " ").encode()
    with (tmp_path / "line.txt").open("wb") as file:
        while file.tell() < 2_000_000_000:
            file.write(line)
    config = TokenizeConfig((str(tmp_path / "line.txt"),), duplicates="keep")
    (partition,) = make_partitions(build_inventory(config.sources), config)
    assert run_partition(partition, StorageDir.of(tmp_path / "out"), "line")["books"] == 1
