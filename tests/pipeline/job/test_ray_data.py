"""Ray Data while it does partitions: several to a task, and nothing of it runs when the caller has left."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.config import TokenizeConfig
from pipeline.job.plan import Partition
from pipeline.job.ray_data import group_partitions

PROGRAM = """
import json, sys, threading, uuid
from pathlib import Path
from infra.ray.cluster import ray_session
from infra.errors import UserError
from infra.storage.directory import StorageDir
from pipeline.config import TokenizeConfig
from pipeline.job.plan import make_partitions
from pipeline.books.sources import build_inventory
from pipeline.job.ray_data import run_partitions

run = uuid.uuid4().hex  # this machine may hold notes of a killed test
out, books = StorageDir.of(sys.argv[1]), Path(sys.argv[2])
config = TokenizeConfig(sources=(str(books),), shard_size=1_000_000)
plan = make_partitions(build_inventory(config.sources), config)
with ray_session(cpus=1):
    done = [summary["partition"] for summary in run_partitions(plan, out, run, workers=1, is_own_ray=True)]
    print(json.dumps([len(plan), done]))
    (books / "17.txt").unlink()
    threads = []
    for _ in range(4):
        try:
            list(run_partitions(plan, out, run, workers=1, is_own_ray=True))
        except UserError as gone:
            threads += [thread.name for thread in threading.enumerate()]
            sentence = str(gone)
    print(json.dumps([sentence, threads]))
"""


@pytest.mark.parametrize(
    ("partitions", "workers", "tasks", "largest"),
    [
        (1, 2, 1, 1), (40, 1, 14, 3), (40, None, 40, 1),  # a cluster of which no size is known
        (62_500, None, 3_125, 20), (100_000, None, 3_125, 32), (100_000, 2, 3_125, 32),
    ],
)  # fmt: skip
def test_many_partitions_are_few_tasks_and_few_partitions_a_task_each(
    partitions: int, workers: int | None, tasks: int, largest: int
) -> None:
    settings = TokenizeConfig()
    plan = [Partition(number, (), settings) for number in range(partitions)]
    groups = group_partitions(plan, workers)
    assert [partition for group in groups for partition in group] == plan
    assert (len(groups), max(map(len, groups))) == (tasks, largest)


@pytest.mark.slow
def test_every_piece_is_done_and_no_thread_outlives_its_caller(tmp_path: Path) -> None:
    books = tmp_path / "books"
    books.mkdir()
    for number in range(40):
        days = (f"It was day {day} of year {number}, and the rain had not ended.\n" for day in range(12_000))
        (books / f"{number}.txt").write_text("".join(days))  # two would be more than a shard
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "out"), str(books)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    asked, gone = done.stdout.splitlines()
    partitions, numbers = json.loads(asked)
    assert partitions == 40, "of which a task does three, so that one is left"
    assert sorted(numbers) == list(range(40))
    sentence, threads = json.loads(gone)
    assert "17.txt was deleted" in sentence
    executing = ("StreamingExecutor", "ray-data-metadata-prefetch", "iter_threaded")
    assert not [name for name in threads if name.startswith(executing)], "one that asks Ray after its end ends us"
