"""``train.run`` with its driver on a head without cores, its worker on another machine, and all files in a store."""

import json
import re
import signal
import subprocess
import time

from conftest import Lab

MODEL = "tiny,layers=2,heads=2,width=32,context_length=32,vocabulary=257,padded_vocabulary=320"
FLAGS = (
    f"--data s3://lab/tokens --out s3://lab/runs --accelerator A100 --model {MODEL} --global-batch 8 --micro-batch 4 "
    "--cycle 10+1 --checkpoint-every 15 --schedule constant"
)
UPLOAD = """
import sys; sys.path.insert(0, "tests")
from pathlib import Path
from conftest import write_small_shards
from infra.place import Place
folder = write_small_shards(Path("/tmp/tokens"))
for name in Place.of(folder).files():
    Place.of("s3://lab/tokens").put(folder / name, name)
"""
READ = """
import json
from infra.place import Place
from infra.tracking.key import RunKey
from mlflow.tracking import MlflowClient
place = Place.of("s3://lab/runs/one")
key = json.loads(place.read("tracking.json"))
client = MlflowClient(key["store"])
steps = [point.step for point in client.get_metric_history(key["run_id"], "loss/step")]
run = client.get_run(key["run_id"])
print(json.dumps({"files": sorted(place.files()), "steps": steps, "tags": run.data.tags, "status": run.info.status,
                  "result": json.loads(place.read("result.json"))}))
"""


def python(lab: Lab, program: str) -> str:
    """The output of a Python program in the project's folder of the head."""
    return lab("on", "head", f"cd ~/project && {lab.python} -c '{program}'")


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


def test_a_run_is_interrupted_and_continued_where_machines_share_a_store_alone(lab: Lab) -> None:
    python(lab, UPLOAD)
    assert "is on this machine's disk" in lab.run("head", f"train.run {FLAGS} --out runs --steps 5", code=2)
    running = lab.start("head", f"train.run {FLAGS} --name one --steps 100000")
    printed, seconds = interrupted(running, "tok/sec")
    assert running.returncode == 130, printed
    assert seconds < 30
    assert "w2 fetches s3://lab/tokens: 0 of 3 shards" in printed
    assert printed.splitlines()[-1] == "continue with: python -m train.run --resume s3://lab/runs/one"
    (checkpoint,) = re.findall(r"s3://lab/runs/one/checkpoints/step-(\d+)", printed)
    end = int(checkpoint) + 12

    printed = lab.run("head", f"train.run --resume s3://lab/runs/one --steps {end}")
    assert "fetches" not in printed, "the worker's machine has the data"
    found = json.loads(python(lab, READ))
    assert found["steps"] == list(range(1, end + 1)), "every step once"
    assert found["status"] == "FINISHED"
    assert found["tags"]["worker"] == "w2"
    assert found["result"]["checkpoint"] == f"s3://lab/runs/one/checkpoints/step-{end:08d}"
    assert f"checkpoints/step-{end:08d}/progress.json" in found["files"]
    assert {"config.json", "cycles.jsonl", "result.json", "tracking.json"} <= set(found["files"])
