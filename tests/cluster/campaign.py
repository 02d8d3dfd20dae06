"""Random faults on the lab's cluster: ``RECORD=FILE pytest tests/cluster/campaign.py``, which pytest does not collect.

FAULTS (default 20) are spread over tokenizing, training and searching, by SEED (default 0). Each strikes a command of
its own at a random moment: a machine loses its power, or its network for 5 to 60 s; the driver, the worker or Ray
Train's controller gets SIGKILL; the storage or the MLflow server cannot be reached for a while. What is left must be
what a command left alone leaves: shards byte by byte, losses bit by bit, every step and every trial once in MLflow.
"""

import json
import os
import random
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

SEED, FAULTS = int(os.environ.get("SEED", "0")), int(os.environ.get("FAULTS", "20"))
KINDS = ("cut", "partition", "driver", "worker", "controller", "storage", "tracker")
LATEST = {"tokenize": 14.0, "train": 60.0, "search": 40.0}
"""Seconds after the start of a command at which it may still be struck: less than it takes undisturbed."""

SECONDS = 420.0
"""Most that a command may take, a fault included."""

MACHINES = ("w1", "w2")

MODEL = "tiny,layers=2,heads=2,width=32,context_length=32,vocab_size=257,padded_vocab_size=320"
STEPS = 1500
TOKENIZE = "pipeline.tokenize s3://lab/books --shard-size 1MB --out s3://lab"
TRAIN = (
    f"train.run --data s3://lab/small --out s3://lab/runs --device cpu --model {MODEL} --global-batch 8 "
    f"--micro-batch 4 --cycle 25+1 --checkpoint-every 50 --schedule constant --steps {STEPS}"
)
SEARCH = (
    f"tune.search --model {MODEL} --device cpu --data s3://lab/small --out s3://lab/searches --global-batch 4 "
    "--micro-batch 1 --trial-steps 40 --searcher grid --confirm-rounds 1 --memory-limit 8GB"
)
CONTINUED = {
    "tokenize": TOKENIZE + "/{name}",
    "train": "train.run --resume s3://lab/runs/{name}",
    "search": "tune.search --resume {name} --out s3://lab/searches",
}
BEGUN = {"tokenize": TOKENIZE + "/{name}", "train": TRAIN + " --name {name}", "search": SEARCH + " --name {name}"}

BOOKS = """
import random
from infra.storage.directory import StorageDir
chance = random.Random(0)
words = ["".join(chance.choices("aeioulnrst", k=chance.randint(2, 7))) for _ in range(3000)]
for number in range(24):
    text = ". ".join(f"Number {number} " + " ".join(chance.choices(words, k=100)) for _ in range(1500))
    StorageDir.of("s3://lab/books").write(f"book {number}.txt", text.encode())
"""
COPY = """
from pathlib import Path
from infra.storage.directory import StorageDir
there, here = StorageDir.of("s3://lab/small"), Path.home() / "small"
for name in StorageDir.of(here).list_files():
    there.upload(here / name, name)
"""
LEFT = {
    "tokenize": """
import json, sys
from infra.storage.directory import StorageDir
directory = StorageDir.of(f"s3://lab/{sys.argv[1]}")
names = [name for name in directory.list_files() if name.endswith(("arrow", "manifest.json"))]
print(json.dumps({name: directory.checksum(name) for name in names}))
""",
    "train": """
import json, sys
from infra.storage.directory import StorageDir
from infra.tracking.run_ref import RunRef
from mlflow.tracking import MlflowClient
directory = StorageDir.of(f"s3://lab/runs/{sys.argv[1]}")
key = json.loads(directory.read("tracking.json"))
client = MlflowClient(key["store"])
points = client.get_metric_history(key["run_id"], "loss/step")
cycles = [json.loads(line) for line in directory.read("cycles.jsonl").splitlines()]
print(json.dumps({
    "losses": [loss for cycle in cycles for loss in cycle["step_losses"]],
    "validation": [cycle["val_loss"] for cycle in cycles],
    "in_mlflow": [[point.step, point.value] for point in points],
    "status": client.get_run(key["run_id"]).info.status,
}))
""",
    "search": """
import json, sys
from infra.storage.directory import StorageDir
from mlflow.tracking import MlflowClient
directory = StorageDir.of(f"s3://lab/searches/{sys.argv[1]}")
parent = json.loads(directory.read("search.json"))["mlflow_run"]
client = MlflowClient(parent["store"])
experiment = client.get_run(parent["run_id"]).info.experiment_id
children = client.search_runs([experiment], f"tags.`mlflow.parentRunId` = '{parent['run_id']}'")
rows = [json.loads(directory.read(name)) for name in directory.list_files() if name.startswith("trials/")]
trials = sorted([row["stage"], row["round"], row["candidate"]["micro_batch"], row["outcome"]] for row in rows)
print(json.dumps({
    "probes": [trial for trial in trials if trial[0] == "probe"],
    "confirmed": sorted({trial[3] for trial in trials if trial[0] == "confirm"}),  # how many depends on their speeds
    "twice": [trial for trial in trials if trials.count(trial) > 1],
    "not_in_mlflow": len(trials) - len(children),
    "children": sorted({child.info.status for child in children}),
    "parent": client.get_run(parent["run_id"]).info.status,
}))
""",
}

record: list[dict[str, Any]] = []

pytestmark = pytest.mark.timeout(7200)


@pytest.fixture(scope="module", autouse=True)
def recorded(lab: Any, small_shards: Path) -> Iterator[None]:
    """The data, and at the end the record."""
    lab.execute(BOOKS)
    packed = subprocess.run(["tar", "-C", small_shards, "-cf", "-", "."], capture_output=True, check=True).stdout
    lab.receive("mkdir ~/small && tar -C ~/small -xf -", packed)
    lab.execute(COPY)
    yield
    if where := os.environ.get("RECORD"):
        about = {
            "command": f"SEED={SEED} FAULTS={FAULTS} pytest tests/cluster/campaign.py", "faults": len(record),
            "versions": {name: version(name) for name in ("torch", "ray", "mlflow")},
            "machine": {"cores": os.cpu_count(), "lab": "a head without cores, two workers with two each"},
        }  # fmt: skip
        passed = sum(row["as_undisturbed"] for row in record)
        Path(where).write_text(json.dumps(about | {"as_undisturbed": passed, "rows": record}, indent=1) + "\n")


@pytest.fixture(scope="module")
def undisturbed(lab: Any) -> Callable[[str], Any]:
    """What each command leaves when nothing strikes it."""
    left: dict[str, Any] = {}

    def of(command: str) -> Any:
        if command not in left:
            lab.run("head", BEGUN[command].format(name=f"{command}-alone"))
            left[command] = json.loads(lab.execute(LEFT[command], f"{command}-alone"))
        return left[command]

    return of


def cases() -> Iterator[tuple[int, str, str]]:
    """A number, a command and a kind of fault for each."""
    chance = random.Random(SEED)
    for number in range(FAULTS):
        command = ("tokenize", "train", "search")[number % 3]
        kinds = [kind for kind in KINDS if kind != "controller" or command == "train"]
        kinds = [kind for kind in kinds if kind != "worker" or command != "tokenize"]
        yield number, command, chance.choice(kinds)


@pytest.mark.parametrize(("number", "command", "kind"), cases())
def test_a_command_that_was_struck_leaves_what_one_left_alone_leaves(
    lab: Any, undisturbed: Callable[[str], Any], number: int, command: str, kind: str
) -> None:
    expected = undisturbed(command)
    chance, name = random.Random(f"{SEED} {number}"), f"{command}-{number}"
    row: dict[str, Any] = {"number": number, "command": command, "fault": kind, "as_undisturbed": False}
    record.append(row)
    began = time.monotonic()
    running, output = start(lab, BEGUN[command].format(name=name))
    row["after_s"] = round(chance.uniform(4, LATEST[command]), 1)
    time.sleep(row["after_s"])
    row["struck"] = running.poll() is None
    repair = strike(lab, kind, chance, running, row)
    code = ended(running, began)
    repair()
    row["again"] = 0
    while code not in (0, None) and row["again"] < 2:  # as a person would, by the printed command
        row["again"] += 1
        has_begun = command == "tokenize" or lab("on", "head", exists(lab, command, name)).strip() == "True"
        name = name if has_begun else f"{name}-again"
        running, more = start(lab, (CONTINUED if has_begun else BEGUN)[command].format(name=name))
        code = ended(running, began)
        output += more
    row["seconds"], row["exit"] = round(time.monotonic() - began), code
    assert code == 0, "".join(output)[-6000:]
    left = json.loads(lab.execute(LEFT[command], name))
    row["as_undisturbed"] = left == expected
    assert left == expected, "".join(output)[-6000:]


def start(lab: Any, line: str) -> tuple[subprocess.Popen[str], list[str]]:
    """The command on the head, and the list that its output goes to."""
    process, lines = lab.start("head", line), list[str]()
    threading.Thread(target=lambda: lines.extend(process.stdout), daemon=True).start()
    return process, lines


def ended(process: subprocess.Popen[str], began: float) -> int | None:
    """The exit code; None for a command that had to be killed because it took too long."""
    try:
        return process.wait(max(1.0, began + SECONDS - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        return None


def exists(lab: Any, command: str, name: str) -> str:
    """A shell command that says whether there is something to continue."""
    where = {"train": f"s3://lab/runs/{name}/checkpoints", "search": f"s3://lab/searches/{name}"}[command]
    program = f"from infra.storage.directory import StorageDir; print(bool(StorageDir.of('{where}').list_files()))"
    return f'cd ~/project && {lab.python} -c "{program}"'


def strike(
    lab: Any, kind: str, chance: random.Random, running: subprocess.Popen[str], row: dict[str, Any]
) -> Callable[[], None]:
    """Do it; returns what makes the cluster whole again."""
    machine = row["machine"] = chance.choice(MACHINES)
    if kind == "cut":
        lab("cut", machine)
        return lambda: started(lab, machine)
    if kind in ("partition", "storage", "tracker"):
        away = {"partition": machine, "storage": "store", "tracker": "tracker"}[kind]
        row["machine"], row["away_s"] = away, round(chance.uniform(5, 60 if kind == "partition" else 20), 1)
        lab("pause", away)
        time.sleep(row["away_s"])
        lab("resume", away)
        if kind == "partition":
            restarted(lab, machine)
        return lambda: None
    patterns = {  # which do not match themselves in the command line of the shell that looks for them
        "driver": (("head",), "python.* -m (pipeline|train|tune)[.]"),
        "controller": (("head",), "ray[:]:TrainController"),
        "worker": (MACHINES, "ray[:]:(RayTrainWorker|ImplicitFunc|trainable)"),
    }
    where, pattern = patterns[kind]
    kill = f"pkill -KILL -f '{pattern}' && echo yes || echo no"
    row["machine"] = []
    while not row["machine"] and running.poll() is None:  # between two trials there is no worker
        row["machine"] = [each for each in where if lab("on", each, kill).strip() == "yes"]
    row["struck"] = bool(row["machine"])
    return lambda: None


def restarted(lab: Any, machine: str) -> None:
    """Start a machine anew on which Ray ends because it was away too long, as what manages a cluster does."""
    alive = "import ray; ray.init('auto'); print([n['NodeManagerHostname'] for n in ray.nodes() if n['Alive']])"
    if machine in lab("on", "head", f'{lab.python} -c "{alive}" 2>/dev/null'):
        return
    deadline = time.monotonic() + 60
    while lab("on", machine, "pgrep raylet || true").strip() and time.monotonic() < deadline:
        time.sleep(1)
    lab("cut", machine)
    started(lab, machine)


def started(lab: Any, machine: str) -> None:
    """Start a machine that was cut, and Ray on it."""
    lab("up", machine)
    lab("ray", f"{machine}=2" + (",accelerator_type:A100=1" if machine == "w2" else ""))
