"""A search on machines without a common disk: rows travel to the driver, and what it finds is in object storage.

The driver's machine has no cores; the doctor sees the same three machines.
"""

import json
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.cluster.conftest import LAB, Lab  # type: ignore[reportMissingImports] pytest finds it

FLAGS = (
    "--model tiny,layers=2,heads=2,width=32,context_length=32,vocabulary=257,padded_vocabulary=320 --device cpu "
    "--data s3://lab/small --out s3://lab/searches --global-batch 2 --micro-batch 1 --trial-steps 8 --searcher grid "
    "--confirm 0 --memory-limit 8GB"
)

COPY = """
import sys
from pathlib import Path
from infra.place import Place
there = Place.of("s3://lab/small")
for name in Place.of(sys.argv[1]).files():
    there.put(Path(sys.argv[1]) / name, name)
"""


@pytest.fixture(scope="module")
def data(lab: Lab, small_shards: Path) -> None:
    """The small shards in the lab's storage."""
    packed = subprocess.run(["tar", "-C", small_shards, "-cf", "-", "."], capture_output=True, check=True).stdout
    command = f"mkdir ~/small && tar -C ~/small -xf - && cd ~/project && {lab.python} -c '{COPY}' ~/small"
    subprocess.run([LAB, "on", "head", command], input=packed, env=lab.environment, check=True)


def stored(lab: Lab, name: str) -> dict[str, str]:
    """The JSON and CSV files of the search ``name`` in the storage."""
    read = (
        "import json; from infra.place import Place; "
        f'place = Place.of("s3://lab/searches/{name}"); '
        'print(json.dumps({n: place.read(n).decode() for n in place.files() if n.endswith(("json", "csv"))}))'
    )
    return json.loads(lab("on", "head", f"cd ~/project && {lab.python} -c '{read}'").splitlines()[-1])


@pytest.mark.usefixtures("data")
def test_a_search_that_was_stopped_continues_on_two_machines(lab: Lab) -> None:
    """Ctrl-C after the first trial, then the printed command, with each machine's own control."""
    search = lab.start("head", f"tune.search {FLAGS} --name one")
    assert search.stdout
    line = next(line for line in search.stdout if re.match(r" +1 probe", line))
    assert "on w1 | ok" in line
    search.send_signal(signal.SIGINT)
    asked = time.monotonic()
    said = search.stdout.read()
    assert search.wait(60) == 130, said
    assert time.monotonic() - asked < 30
    (again,) = re.findall(r"continue with: python -m (tune\.search .*)", said)
    assert again == "tune.search --resume one --out s3://lab/searches"
    kept = stored(lab, "one")
    said = lab.run("head", f"{again} --parallel 2")
    found = stored(lab, "one")
    rows = {name: json.loads(text) for name, text in found.items() if name.startswith("trials/")}
    assert {name: text for name, text in kept.items() if name.startswith("trials/")}.items() <= found.items()
    assert sorted((row["stage"], row["outcome"], row["candidate"]["micro_batch"]) for row in rows.values()) == [
        ("control", "ok", 1), ("probe", "ok", 1), ("probe", "ok", 2)
    ]  # fmt: skip
    assert {row["node"] for row in rows.values() if row["stage"] == "control"} == {"w2"}
    assert json.loads(found["best.json"])["measured"]["tokens_per_second"] > 0
    assert "train with it: python -m train.run --config s3://lab/searches/one/best.json" in said


def test_the_doctor_names_every_machine(lab: Lab) -> None:
    said = lab.run("head", "infra.doctor --quick --address auto --storage s3://lab/doctor")
    for name, cores in {"head": 0, "w1": 2, "w2": 2}.items():
        assert re.search(rf"(?m)^{name} +{cores} .* s +[\d,]+ GB +[\d,]+ MB/s, [\d,]+ MB/s", said), said
    said = lab.run("head", "infra.doctor --quick --address auto --storage s3://nowhere/doctor", code=1)
    assert "w1: cannot use s3://nowhere/doctor" in said
