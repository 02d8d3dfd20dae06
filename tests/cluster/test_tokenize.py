"""Tokenizing on machines without a common disk: from storage to storage, to the bytes that one machine makes."""

import json
import re
from typing import Any

BOOKS = """
import random
from pathlib import Path
from infra.place import Place
chance = random.Random(0)
words = ["".join(chance.choices("aeioulnrst", k=chance.randint(2, 7))) for _ in range(3000)]
for number in range(6):
    text = ". ".join(f"Number {number} " + " ".join(chance.choices(words, k=100)) for _ in range(1500))
    for books in ("s3://lab/books", Path.home() / "books"):
        Place.of(books).write(f"book {number}.txt", text.encode())
"""
ON_ONE_MACHINE = """
from pipeline.config import TokenizeConfig
from pipeline.job import output
from pipeline.job.plan import Job
from pipeline.job.task import do_piece
job = Job(TokenizeConfig(("s3://lab/books",), out="alone", shard_size=1_000_000))
output.begin(job, ())
for piece in job.pieces:
    do_piece(piece, job.place, "alone")
output.finish(job)
"""
CONTENTS = """
import json, sys
from infra.place import Place
place = Place.of(sys.argv[1])
print(json.dumps({name: place.checksum(name) for name in place.files() if not name.endswith(".lock")}))
"""
LOSE = """
from infra.place import Place
Place.of("s3://lab/tokens").remove(["train/000001-000.arrow"])
"""


def test_shards_are_written_where_they_are_made_and_are_those_of_one_machine(lab: Any) -> None:
    def python(program: str, argument: str = "") -> str:
        return lab("on", "head", f"cd ~/project && {lab.python} - {argument} <<'END'{program}END")

    def contents(where: str) -> dict[str, str]:
        return json.loads(python(CONTENTS, where))

    python(BOOKS)
    python(ON_ONE_MACHINE)
    alone = contents("alone")
    assert sum(name.endswith(".arrow") for name in alone) == 6
    command = "pipeline.tokenize s3://lab/books --shard-size 1MB --out"
    lab.run("head", f"{command} s3://lab/tokens")
    assert contents("s3://lab/tokens") == alone
    assert "is finished; nothing to do" in lab.run("head", f"{command} s3://lab/tokens")
    python(LOSE)
    assert "done: 5 pieces; to do: 1 shards missing" in lab.run("head", f"{command} s3://lab/tokens")
    assert contents("s3://lab/tokens") == alone
    said = lab.run("head", f"{command} tokens", code=2)
    assert re.search("on this machine's disk, which w[12]\\S* .*of the cluster cannot see: give object storage", said)
    lab.run("head", "pipeline.tokenize ~/books --shard-size 1MB --out s3://lab/carried")  # which only the head has
    shards = {name: there for name, there in alone.items() if name.endswith(".arrow")}
    assert shards.items() <= contents("s3://lab/carried").items()
