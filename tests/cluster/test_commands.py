"""Every command with its driver on a head without cores and its workers on other machines, which share a store alone.

In one file, so that one process runs them: two clusters at once would be too much for a small machine.
"""

import json
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

BOOKS = """
import random
from pathlib import Path
from infra.storage.directory import StorageDir
chance = random.Random(0)
words = ["".join(chance.choices("aeioulnrst", k=chance.randint(2, 7))) for _ in range(3000)]
for number in range(6):
    text = ". ".join(f"Number {number} " + " ".join(chance.choices(words, k=100)) for _ in range(1500))
    for books in ("s3://lab/books", Path.home() / "books"):
        StorageDir.of(books).write(f"book {number}.txt", text.encode())
"""
ON_ONE_MACHINE = """
from pipeline.config import TokenizeConfig
from pipeline.job import output
from pipeline.job.plan import Job
from pipeline.job.task import run_partition
job = Job(TokenizeConfig(("s3://lab/books",), out="alone", shard_size=1_000_000))
output.mark_unfinished(job, ())
for partition in job.partitions:
    run_partition(partition, job.out_dir, "alone")
output.finish(job)
"""
CONTENTS = """
import json, sys
from infra.storage.directory import StorageDir
directory = StorageDir.of(sys.argv[1])
made = [name for name in directory.list_files() if not name.endswith((".command", "tracking.json"))]
print(json.dumps({name: directory.checksum(name) for name in made}))
"""
LOSE = """
from infra.storage.directory import StorageDir
StorageDir.of("s3://lab/tokens").remove(["train/000001-000.arrow"])
"""

MODEL = "tiny,layers=2,heads=2,width=32,context_length=32,vocab_size=257,padded_vocab_size=320"
FLAGS = (
    f"--data s3://lab/small --out s3://lab/runs --accelerator A100 --model {MODEL} --global-batch 8 --micro-batch 4 "
    "--cycle 10+1 --checkpoint-every 15 --schedule constant"
)
READ = """
import json
from infra.storage.directory import StorageDir
from infra.tracking.run_ref import RunRef
from mlflow.tracking import MlflowClient
directory = StorageDir.of("s3://lab/runs/one")
key = json.loads(directory.read("tracking.json"))
client = MlflowClient(key["store"])
steps = [point.step for point in client.get_metric_history(key["run_id"], "loss/step")]
run = client.get_run(key["run_id"])
print(json.dumps({"files": sorted(directory.list_files()), "steps": steps, "tags": run.data.tags,
                  "status": run.info.status, "result": json.loads(directory.read("result.json"))}))
"""

SEARCH = (
    f"--model {MODEL} --device cpu "
    "--data s3://lab/small --out s3://lab/searches --global-batch 2 --micro-batch 1 --trial-steps 8 --searcher grid "
    "--confirm-rounds 0 --memory-limit 8GB"
)

LEARN = (
    f"--objective loss --train-time 20s --knobs learning_rate=1e-3 --model {MODEL} --device cpu --global-batch 4 "
    "--learning-rate 1e-4 --data s3://lab/small --out s3://lab/searches --trial-steps 8 --memory-limit 8GB"
)

COPY = """
import sys
from pathlib import Path
from infra.storage.directory import StorageDir
there = StorageDir.of("s3://lab/small")
for name in StorageDir.of(sys.argv[1]).list_files():
    there.upload(Path(sys.argv[1]) / name, name)
"""


BEST = """
import sys
from infra.storage.directory import StorageDir
print(StorageDir.of(sys.argv[1]).read("best.json").decode())
"""


RESULT = """
import sys
from infra.storage.directory import StorageDir
print(StorageDir.of(sys.argv[1]).read("result.json").decode())
"""

MINE = """
import torch.nn.functional as F
from torch import nn


class Bigram(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.rows = nn.Embedding(vocab_size, vocab_size)

    def forward(self, inputs, targets=None):
        logits = self.rows(inputs)
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
"""


STORED = """
import json, sys
from infra.storage.directory import StorageDir
directory = StorageDir.of(sys.argv[1])
print(json.dumps({n: directory.read(n).decode() for n in directory.list_files() if n.endswith(("json", "csv"))}))
"""


@pytest.fixture(scope="module")
def data(lab: Any, small_shards: Path) -> None:
    """The small shards in the lab's storage."""
    packed = subprocess.run(["tar", "-C", small_shards, "-cf", "-", "."], capture_output=True, check=True).stdout
    lab.receive("mkdir ~/small && tar -C ~/small -xf -", packed)
    lab.execute(COPY, "~/small")


@pytest.fixture(scope="module")
def alone(lab: Any) -> dict[str, str]:
    """Checksums of what one machine makes of the books that this puts into the lab's storage and on ``head``."""
    lab.execute(BOOKS)
    lab.execute(ON_ONE_MACHINE)
    made = contents(lab, "alone")
    assert sum(name.endswith(".arrow") for name in made) == 6
    return made


def contents(lab: Any, where: str) -> dict[str, str]:
    """The checksum of every file there."""
    return json.loads(lab.execute(CONTENTS, where))


def test_shards_are_written_where_they_are_made_and_are_those_of_one_machine(lab: Any, alone: dict[str, str]) -> None:
    command = "pipeline.tokenize s3://lab/books --shard-size 1MB --out"
    lab.run("head", f"{command} s3://lab/tokens")
    assert contents(lab, "s3://lab/tokens") == alone
    assert "is up to date; nothing to do" in lab.run("head", f"{command} s3://lab/tokens")
    lab.execute(LOSE)
    assert "finished: 5 partitions; remaining: 1 with missing" in lab.run("head", f"{command} s3://lab/tokens")
    assert contents(lab, "s3://lab/tokens") == alone
    said = lab.run("head", f"{command} tokens", code=2)
    assert re.search("on this machine's disk, which w[12]\\S* .*cannot read. Use object storage", said)
    lab.run("head", "pipeline.tokenize ~/books --shard-size 1MB --out s3://lab/carried")  # which only the head has
    shards = {name: there for name, there in alone.items() if name.endswith(".arrow")}
    assert shards.items() <= contents(lab, "s3://lab/carried").items()


def interrupted(process: subprocess.Popen[str], after: str) -> tuple[str, float]:
    """The output of a command that gets SIGTERM at its first line that holds ``after``, and how long it took to end."""
    assert process.stdout
    lines = []
    for line in process.stdout:
        lines.append(line)
        if after in line:
            break
    asked = time.monotonic()
    process.send_signal(signal.SIGTERM)
    rest, _ = process.communicate(timeout=60)
    return "".join([*lines, rest]), time.monotonic() - asked


@pytest.mark.usefixtures("data")
def test_a_run_is_interrupted_and_continued_where_machines_share_a_store_alone(lab: Any) -> None:
    assert "is on this machine's disk" in lab.run("head", f"train.run {FLAGS} --out runs --steps 5", code=2)
    running = lab.start("head", f"train.run {FLAGS} --name one --steps 100000")
    printed, seconds = interrupted(running, "tok/sec")
    assert running.returncode == 130, printed
    assert seconds < 30
    assert "w2: downloading s3://lab/small, 0 of 3 shards" in printed
    assert re.search(r"with: +python -m train\.run --resume s3://lab/runs/one\n", printed)
    checkpoint = json.loads(lab.execute(READ))["result"]["checkpoint"]
    assert checkpoint.startswith("s3://lab/runs/one/checkpoints/step-")
    end = int(checkpoint.rpartition("-")[2]) + 12

    printed = lab.run("head", f"train.run --resume s3://lab/runs/one --steps {end}")
    assert "downloading" not in printed, "the worker's machine has the data"
    found = json.loads(lab.execute(READ))
    assert found["steps"] == list(range(1, end + 1)), "every step once"
    assert found["status"] == "FINISHED"
    assert found["tags"]["worker"] == "w2"
    assert found["result"]["checkpoint"] == f"s3://lab/runs/one/checkpoints/step-{end:08d}"
    assert f"checkpoints/step-{end:08d}/progress.json" in found["files"]
    assert {"config.json", "cycles.jsonl", "result.json", "tracking.json"} <= set(found["files"])


def stored(lab: Any, name: str) -> dict[str, str]:
    """The JSON and CSV files of the search ``name`` in the storage."""
    return json.loads(lab.execute(STORED, f"s3://lab/searches/{name}"))


@pytest.mark.usefixtures("data")
def test_a_search_that_was_stopped_continues_on_two_machines(lab: Any) -> None:
    """Ctrl-C after the first trial, then the printed command, with each machine's own control."""
    search = lab.start("head", f"tune.search {SEARCH} --name one")
    assert search.stdout
    line = next(line for line in search.stdout if re.match(r" +1 probe", line))
    assert "on w1 | ok" in line
    search.send_signal(signal.SIGINT)
    asked = time.monotonic()
    said = search.stdout.read()
    assert search.wait(60) == 130, said
    assert time.monotonic() - asked < 30
    (again,) = re.findall(r"resume with: python -m (tune\.search .*)", said)
    assert again == "tune.search --resume one --out s3://lab/searches"
    kept = stored(lab, "one")
    said = lab.run("head", f"{again} --max-concurrent-trials 2")
    found = stored(lab, "one")
    rows = {name: json.loads(text) for name, text in found.items() if name.startswith("trials/")}
    assert {name: text for name, text in kept.items() if name.startswith("trials/")}.items() <= found.items()
    assert sorted((row["stage"], row["outcome"], row["candidate"]["micro_batch"]) for row in rows.values()) == [
        ("control", "ok", 1), ("probe", "ok", 1), ("probe", "ok", 2)
    ]  # fmt: skip
    assert {row["node"] for row in rows.values() if row["stage"] == "control"} == {"w2"}
    assert json.loads(found["best.json"])["measured"]["tokens_per_second"] > 0
    assert re.search(r"Next +about .*: python -m train.run --config s3://lab/searches/one/best.json", said)


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("data")
def test_a_search_for_the_lowest_loss_runs_on_two_machines(lab: Any) -> None:
    """Two candidates learn at a time; what one machine has learned continues on any other, from the store."""
    said = lab.run("head", f"tune.search {LEARN} --max-concurrent-trials 2 --name learn", seconds=600)
    found = stored(lab, "learn")
    rows = [json.loads(text) for name, text in found.items() if name.startswith("trials/")]
    assert {row["node"] for row in rows} == {"w1", "w2"}, said
    assert {row["stage"] for row in rows} == {"speed", "learn", "final"}
    assert {row["outcome"] for row in rows} <= {"ok", "pruned"}, said
    finals = {(row["candidate"]["knobs"][0][1], row["round"]) for row in rows if row["stage"] == "final"}
    assert len(finals) == len([row for row in rows if row["stage"] == "final"]), "none was repeated"
    assert not any(name.startswith("learned/") for name in found)
    best = json.loads(found["best.json"])
    assert best["measured"]["loss_prediction"]["loss"] > 0
    assert re.search(r"Next +about .*: python -m train.run --config s3://lab/searches/learn/best.json", said)


@pytest.mark.usefixtures("data")
def test_a_ladder_runs_where_its_accelerator_is(lab: Any) -> None:
    """On ``head`` alone it would be about the head's device; its rungs leave what a ladder on one machine leaves."""
    flags = f"--suite loop --rungs accumulation --model {MODEL} --data s3://lab/small --out s3://lab/ladders --steps 8"
    said = lab.run("head", f"tune.ladder {flags} --cycle 8+0 --device cpu --accelerator A100 --name one")
    assert "s3://lab/ladders/one" in said
    files = json.loads(lab.execute(CONTENTS, "s3://lab/ladders/one"))
    runs = {name.rpartition("-")[0] for name in files if name.startswith("trials/")}
    assert runs == {"trials/control-00", "trials/01-accumulation", "trials/control-01"}
    assert {"ladder.json", "rungs.json", "best.json", "summary.md", "speed.png"} <= set(files)
    assert json.loads(lab.execute(BEST, "s3://lab/ladders/one"))["measured"]["machines"] == ["w2"]
    again = lab.run("head", "tune.ladder --resume one --out s3://lab/ladders --compare one")
    assert "3 finished trials" in again


@pytest.mark.usefixtures("data")
def test_a_model_of_ones_own_travels_to_the_machine_that_trains_it(lab: Any) -> None:
    """Its file is on ``head`` alone, in a folder outside the project's."""
    lab.receive("mkdir ~/own && cat > ~/own/mine.py", MINE.encode())
    there = f"cd ~/own && PYTHONPATH=~/project {lab.python} -m"
    flags = "--model mine:Bigram,vocab_size=257,context_length=32 --data s3://lab/small --global-batch 2 --device cpu"
    lab(
        "on",
        "head",
        f"{there} train.run {flags} --steps 8 --cycle 4+1 --accelerator A100 --out s3://lab/own --name one",
    )
    assert json.loads(lab.execute(RESULT, "s3://lab/own/one"))["machine"] == "w2"
    limits = "--memory-limit 8GB --trial-steps 8 --confirm-rounds 0 --searcher grid"
    lab("on", "head", f"{there} tune.search {flags} {limits} --out s3://lab/own --name two")
    best = json.loads(lab.execute(BEST, "s3://lab/own/two"))
    assert best["config"]["model"]["callable"] == "mine:Bigram"
    assert set(best["measured"]["machines"]) <= {"w1", "w2"}


def test_the_doctor_names_every_machine(lab: Any) -> None:
    said = lab.run("head", "infra.doctor --workers 2 --address auto --out s3://lab/doctor")
    for name, cores in {"head": 0, "w1": 2, "w2": 2}.items():
        assert re.search(rf"(?m)^{name} +{cores} ", said), said
        assert re.search(rf"(?m)^{name} .* [+-]\d\.\d{{3}} +[\d,]+ +[\d,]+, [\d,]+", said), said
    assert re.search(r"All-reduce between 2 workers on (w1, w2|w2, w1) \(gloo\)", said), said
    assert "saved in s3://lab/doctor/doctor.json" in said
    said = lab.run("head", "infra.doctor --quick --address auto --out s3://nowhere/doctor", code=2)
    assert "Cannot write to --out s3://nowhere/doctor" in said


def test_shards_are_finished_though_a_machine_loses_its_power(lab: Any, alone: dict[str, str]) -> None:
    """The last test, because that machine stays away."""
    working = lab.start("head", "pipeline.tokenize s3://lab/books --shard-size 1MB --out s3://lab/lost")
    lab("on", "w1", "until pgrep -f 'ray[:]:MapBatches'; do sleep 0.01; done")  # until it works on a partition
    assert working.poll() is None, "it has ended before anything was cut"
    lab("cut", "w1")
    said, _ = working.communicate(timeout=150)
    assert working.returncode == 0, said
    assert "take over its partitions" in said
    assert contents(lab, "s3://lab/lost") == alone
