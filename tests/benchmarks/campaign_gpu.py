"""Everything that only a GPU can show, in steps that fit a bare machine lent by the half hour.

    python -P tests/benchmarks/campaign_gpu.py prepare     # at home: what to bring along, in campaign/bring
    python -P tests/benchmarks/campaign_gpu.py rehearse    # at home: the whole schedule, by pretended times
    python -P tests/benchmarks/campaign_gpu.py run --out campaign/bring    # on the machine, until it is done
    python -P tests/benchmarks/campaign_gpu.py record      # at home: all rows and the verdict, under records

In: ``--bring``, a folder with packages, token shards and, from the second call on, the archive of the calls before.
Out: in ``--out`` one archive, in parts that are small enough to take home, and the verdict so far. Every step is a
process of its own and leaves one row. The first is the five-minute test, ``infra.doctor --gpu``; the others take less
than four minutes each. Where the first or the tests fail, the campaign ends, because what follows would mean nothing.
The other steps are in the order of their worth, so that a call may end anywhere. Sizes follow the memory of the card.
The archive holds the rows and Inductor's cache; what no longer fits of the cache, the oldest first, is compiled again.

This file needs nothing but Python, so that it runs before the packages are unpacked. Only the last steps need Ray and
MLflow: they wait for a machine to which ``prepare --site`` brought an archive with both.
"""

import argparse
import importlib.util
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
STEP = str(Path(__file__).with_name("gpu_step.py"))
PEERS = str(Path(__file__).with_name("peers.py"))
LLM_C = str(Path(__file__).with_name("llm_c.py"))

STEP_SECONDS = 230.0
"""Most time of a step, its start included; a longer one is stopped and tried once more with a warmer cache."""
GPU_TEST_SECONDS = 500.0
"""Most time of the five-minute test, which bounds its own steps."""
SLICES = 16
"""Times that one of the product's own commands may be stopped, and continued."""
GRACE_SECONDS = 10.0
"""For a step to end after an interrupt; commands, which save what they have, get more."""
PART_BYTES = 15 * 2**20
"""Size of the archive's parts: at most 8 files of 16 MiB are copied back at a time."""
BROUGHT_BYTES = 64 * 2**20
"""All that may be brought along, this repository included."""
BEATEN = 0.8
"""A value whose speed was below this share of another's is not tried again with other settings."""

LIGHT = (
    "annotated-types", "docstring-parser", "gigatoken", "pydantic", "pydantic-core", "tyro", "typing-extensions",
    "typing-inspection",
)  # fmt: skip
"""What the loop, a trial, a profile and the peers need besides torch and what images with torch commonly have."""

GOALS: dict[str, float] = {"A100": 185_000, "H100": 500_000, "H200": 550_000}
"""Tokens per second of GPT-2 124M, by the card's name."""

Row = dict[str, Any]
Settings = dict[str, Any]


@dataclass(frozen=True)
class Step:
    """One process and the row that it leaves."""

    name: str
    kind: str
    settings: Settings = field(default_factory=dict)
    seconds: float = 50.0
    """What it is expected to take."""
    command: tuple[str, ...] = ()
    """After the interpreter, where it is not :data:`STEP` of this kind with these settings."""
    result: str = ""
    """A command's last file, in the campaign's folder: it is continued until that exists."""
    run: str = ""
    """What ``--resume`` continues."""
    limit: float = STEP_SECONDS
    """Most seconds, its start included."""

    @property
    def needs_ray(self) -> bool:
        """Whether it is one of the product's own commands."""
        return self.kind == "command"

    @property
    def grace(self) -> float:
        """Seconds between the interrupt and the end."""
        return 4 * GRACE_SECONDS if self.needs_ray else GRACE_SECONDS


@dataclass(frozen=True)
class Card:
    """What decides the sizes on a GPU."""

    memory: float = 40e9
    """Bytes, as the five-minute test has found them."""
    bf16: bool = True

    @classmethod
    def of(cls, rows: list[Row]) -> "Card":
        """The card that ``rows`` are of; before the test has run, one of 40 GB."""
        facts = next((row["facts"] for row in rows if row.get("facts")), {})
        return cls(facts.get("memory", cls.memory), facts.get("bf16", cls.bf16))

    @property
    def sizes(self) -> list[int]:
        """Micro-batches of GPT-2 124M to try, the largest that may fit first: 80 on 40 GB and more, 24 on a T4."""
        most = min(80.0, (self.memory - 3e9) / 0.45e9)
        return [size for size in (80, 60, 48, 40, 32, 30, 24, 20, 16, 15, 12, 10, 8, 6, 5, 4, 3, 2, 1) if size <= most]

    @property
    def order(self) -> list[int]:
        """Four of them in the order of their worth: the best guess is the second largest."""
        largest = self.sizes[:5]
        return [size for index in (1, 4, 0, 2) for size in largest[index : index + 1]] or [1]

    @property
    def precisions(self) -> tuple[str, ...]:
        """Precisions to try, the best guess first."""
        return ("bf16-activations", "bf16") if self.bf16 else ("fp16",)

    @property
    def limit(self) -> str:
        """The memory limit of searches and ladders: that of the published study, or what a smaller card has."""
        return f"{min(40e9, 0.9 * self.memory) / 1e9:.1f}GB"

    @property
    def first(self) -> Settings:
        """The best guess: its row comes first, and the others differ from it."""
        return FIRST | {"precision": self.precisions[0], "micro_batch": self.order[0]}


# --- What to do next, given what is known ---------------------------------------------------------------------------

FIRST: Settings = {
    "precision": "bf16-activations", "compile": "whole", "attention": "auto", "loss": "plain", "micro_batch": 60,
}  # fmt: skip
"""The best guess on a card of 40 GB with bf16."""

TESTS = (
    "tests/infra/device/test_gpu.py", "tests/train/models",
    "tests/train/data/test_loader.py", "tests/train/test_switches.py",
    "tests/train/loop/test_golden.py", "tests/train/loop/test_memory_cap.py", "tests/train/loop/test_oom.py",
)  # fmt: skip
"""Files with tests for a GPU that need no Ray and no MLflow."""


GATES = (
    Step("gpu test", "gpu test", seconds=300, command=("-m", "infra.doctor", "--gpu", "--out"), limit=GPU_TEST_SECONDS),
    Step("tests", "tests", seconds=150, command=("tests/cuda/run.py", "-q", *TESTS)),
)
"""What must pass before anything is measured: on a GPU that computes wrong numbers no speed means anything."""


def gate_failure(rows: list[Row]) -> str:
    """Why the campaign ends early: the gate that failed, and what it said; empty if none did."""
    names = {gate.name for gate in GATES}
    failed = next((row for row in rows if row["step"] in names and row["outcome"] == "failed"), None)
    return f"{failed['step']} failed: {failed.get('reason') or failed.get('said', '')}" if failed else ""


def plan(rows: list[Row], sides: tuple[str, ...], rounds: int = 3) -> Iterator[Step]:
    """The steps in the order of their worth, without those that ``rows`` make pointless; done ones are among them."""
    card = Card.of(rows)
    for gate in GATES:
        yield gate
        if gate_failure(rows):
            return
    yield Step("versions", "versions", seconds=30)
    yield Step("ceilings", "ceilings", seconds=110)
    for size in card.order:
        for precision in card.precisions:
            yield from _trainer(rows, card.first | {"precision": precision, "micro_batch": size})
    known: dict[str, set[Any]] = {"attention": {"auto"}, "loss": {"plain"}, "compile": {"whole"}, "fp8": {None}}
    for knob, value in (
        ("attention", "flash"), ("attention", "cudnn"), ("loss", "fused"), ("compile", "blocks"),
        ("compile", "reduce-overhead"),
    ):  # fmt: skip
        yield from _trainer(rows, _chosen(rows, known) | {knob: value})
        known[knob].add(value)
    ours = _chosen(rows, known)
    for turn in range(rounds):
        for side in sides if turn % 2 == 0 else reversed(sides):
            yield _peer(rows, side, turn, ours)
    yield Step("profile", "profile", ours, seconds=90)
    yield from _trainer(rows, ours | {"compile": "coordinate-descent"}, seconds=150)
    yield from _trainer(rows, ours | {"fp8": True}, seconds=90)
    yield from _trainer(rows, ours | {"compile": "max-autotune"}, seconds=STEP_SECONDS)
    yield from _commands(ours, card.limit)


def _chosen(rows: list[Row], known: dict[str, set[Any]]) -> Settings:
    """The best settings with ``known`` values only, so that a later row does not change what came before it."""
    top = best([row for row in rows if all(row["settings"].get(knob) in values for knob, values in known.items())])
    return top["settings"] if top else Card.of(rows).first


def _trainer(rows: list[Row], settings: Settings, seconds: float = 50) -> Iterator[Step]:
    """A fresh trainer with ``settings``, unless ``rows`` answer it already."""
    words = [str(value) for value in settings.values()]
    name = "train " + " ".join("fp8" if value == "True" else value for value in words)
    if any(row["step"] == name for row in rows) or not is_pointless(rows, settings):
        yield Step(name, "train", settings, seconds)


def is_pointless(rows: list[Row], settings: Settings) -> bool:
    """Whether ``rows`` tell how a trainer with ``settings`` would end: too slow, too large, or as another one."""
    for row in rows:
        if row["kind"] != "train":
            continue
        other: Settings = row["settings"]
        differing = {knob for knob in {*settings, *other} if settings.get(knob) != other.get(knob)}
        if row["outcome"] == "oom" and differing <= {"micro_batch"} and settings["micro_batch"] >= other["micro_batch"]:
            return True
        same_kernel = row.get("attention") == settings["attention"] and row["outcome"] == "finished"
        if differing == {"attention"} and same_kernel:
            return True
    return any(settings.get(knob) == value for knob, value in beaten(rows))


def beaten(rows: list[Row]) -> set[tuple[str, Any]]:
    """(knob, value) that another value of the knob, all else being equal, beat by more than a fifth."""
    found: set[tuple[str, Any]] = set()
    trained = speeds(rows)
    for slow in trained:
        for fast in trained:
            ours, theirs = slow["settings"], fast["settings"]
            differing = [knob for knob in {*ours, *theirs} if ours.get(knob) != theirs.get(knob)]
            if len(differing) == 1 and slow["tokens_per_second"] < BEATEN * fast["tokens_per_second"]:
                found.add((differing[0], ours.get(differing[0])))
    return found


def speeds(rows: list[Row]) -> list[Row]:
    """The rows of trainers that have a speed."""
    return [row for row in rows if row["kind"] == "train" and row.get("tokens_per_second")]


def best(rows: list[Row]) -> Row | None:
    """The fastest trainer without 8-bit matrices, which change the numerics."""
    chosen = [row for row in speeds(rows) if not row["settings"].get("fp8")]
    return max(chosen, key=lambda row: row["tokens_per_second"], default=None)


def _peer(rows: list[Row], side: str, turn: int, ours: Settings) -> Step:
    """A turn of one side, at the largest micro-batch that has not run out of memory."""
    tried = [
        row["settings"]["micro_batch"] for row in rows if row["kind"] == f"peer {side}" and row["outcome"] == "oom"
    ]
    sizes = [size for size in Card.of(rows).sizes if size < min(tried, default=81)]
    settings = ours if side == "ours" else {"micro_batch": sizes[0] if sizes else 1}
    return Step(f"peer {side} {turn} at {settings['micro_batch']}", f"peer {side}", settings)


def _commands(ours: Settings, memory_limit: str) -> Iterator[Step]:
    """The product's own commands, which need Ray and MLflow."""
    shared = ("--data", "tokens", "--config", "best.json")
    limit, trial = (
        ("--memory-limit", memory_limit),
        ("--trial-steps", "12", "--trial-time", "20s", "--confirm-rounds", "0"),
    )
    rung = (
        "--time-budget",
        "15s",
        "--speed-tolerance",
        "0.005",
        "--cycle",
        "20+0",
        "--name",
    )  # no validation to compile anew

    def command(name: str, module: str, *flags: str, result: str, run: str = "") -> Step:
        return Step(name, "command", ours, STEP_SECONDS, ("-m", module, *flags), result, run)

    yield command("run", "train.run", *shared, "--steps", "60", "--cycle", "20+1", "--keep-checkpoints", "1",
                  "--name", "best", result="runs/best/result.json", run="best")  # fmt: skip
    # The knobs were decided above: the search is about the batch that fits, against all of them.
    yield command("search", "tune.search", *shared, *limit, *trial, "--name", "search",
                  result="runs/search/summary.md", run="search")  # fmt: skip
    yield command("grid", "tune.search", *shared, *limit, *trial, "--searcher", "grid", "--name",
                  "grid", result="runs/grid/summary.md", run="grid")  # fmt: skip
    yield command("ladder", "tune.ladder", "--suite", "a100", "--data", "tokens", "--fit-batch", *limit, "--compare",
                  "study", *rung, "a100", result="runs/a100/summary.md", run="a100")  # fmt: skip
    for suite in ("kernels", "memory", "sizes"):
        yield command(f"ladder {suite}", "tune.ladder", "--suite", suite, "--data", "tokens", *rung, suite,
                      result=f"runs/{suite}/summary.md", run=suite)  # fmt: skip


def next_step(rows: list[Row], sides: tuple[str, ...], *, ray: bool) -> Step | None:
    """The first step that is worth another attempt; None when nothing is left to do here."""
    for step in plan(rows, sides):
        attempts = [row["outcome"] for row in rows if row["step"] == step.name]
        most = {"command": SLICES, "tests": 1, "gpu test": 1}.get(step.kind, 2)
        if not attempts or (attempts[-1] == "timeout" and len(attempts) < most):
            return step if ray or not step.needs_ray else None
    return None


# --- Doing it -------------------------------------------------------------------------------------------------------

Execute = Callable[[Step, float], Row]
"""Run a step for at most so many seconds: its outcome and what it measured."""


@dataclass
class Campaign:
    """The rows so far in ``folder``, and where the archive of all of it goes."""

    folder: Path
    out: Path
    sides: tuple[str, ...]
    ray: bool
    execute: Execute
    room: int = 32 * 2**20
    """Bytes that the archive may take of what can be brought along."""
    part_bytes: int = PART_BYTES
    clock: Callable[[], float] = time.monotonic

    @property
    def rows(self) -> list[Row]:
        """Those of all calls, oldest first; one that a machine's end has cut in two is none."""
        path = self.folder / ROWS
        found = []
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
        return found

    def work(self, seconds: float) -> bool:
        """Do one step after the other until none is left, which is True, or none fits into ``seconds``."""
        until = self.clock() + seconds
        self._choose()
        while step := next_step(self.rows, self.sides, ray=self.ray):
            left = until - self.clock()
            if left < min(step.seconds + step.grace, step.limit):
                return False
            began = self.clock()
            print(f"{step.name} ...", flush=True)
            found = self.execute(step, min(step.limit, left) - step.grace)
            row = {"step": step.name, "kind": step.kind, "settings": step.settings, "seconds": self.clock() - began}
            self.keep(found | row)  # whatever a step calls what it found: its name tells that it is done
        return True

    def keep(self, row: Row) -> None:
        """Add a row, and bring verdict and archive up to date."""
        with (self.folder / ROWS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        rows = self.rows
        if row["kind"] == "ceilings" and row["outcome"] == "finished":  # where ladders look for it
            (self.folder / "runs").mkdir(exist_ok=True)
            (self.folder / "runs" / "doctor.json").write_text(json.dumps(row), encoding="utf-8")
        self._choose()
        shown = {name: value for name, value in row.items() if name in ("outcome", "tokens_per_second", "reason")}
        print(f"  {row['seconds']:.0f} s: {json.dumps(shown)}", flush=True)
        text = "\n".join(sentences(rows))
        (self.folder / "verdict.txt").write_text(text + "\n", encoding="utf-8")
        self.out.mkdir(parents=True, exist_ok=True)
        for name in ("verdict.txt", ROWS):
            shutil.copy(self.folder / name, self.out)
        pack(self.folder, self.out, self.room, self.part_bytes)

    def _choose(self) -> None:
        """Write the config of the best trainer, which the steps after the trainers start from.

        On a pretended GPU none has a speed, and the first that ended well is taken.
        """
        ended = (row for row in self.rows if row["kind"] == "train" and row["outcome"] == "finished")
        if chosen := best(self.rows) or next(ended, None):
            (self.folder / "best.json").write_text(json.dumps(chosen["config"]), encoding="utf-8")


def real(step: Step, seconds: float, *, folder: Path, options: argparse.Namespace) -> Row:
    """Run a step in a process of its own."""
    shared = ["--data", str(folder / "tokens"), "--model", options.model, "--global-batch", str(options.global_batch)]
    command = [*step.command]
    if step.run:
        made = folder / "runs" / step.run
        if any(made.glob("checkpoints/step-*" if "train.run" in command else "*.json")):
            command = [*step.command[:2], "--resume", step.run]
        else:
            shutil.rmtree(made, ignore_errors=True)  # there is nothing to continue
    elif step.kind == "peer llm.c":
        command = ["-P", LLM_C, "--checkout", str(folder / "peers" / "llm.c"), "--data", str(folder / "tokens"),
                   "--micro-batch", str(step.settings["micro_batch"])]  # fmt: skip
    elif step.kind == "gpu test":
        command.append(str(folder))
    elif step.kind.startswith("peer"):
        settings = step.settings
        card = Card.of(Campaign(folder, folder, (), False, lambda step, seconds: {}).rows)
        limit = options.memory_limit or f"{0.9 * card.memory / 1e9:.1f}GB"
        command = ["-P", PEERS, "--side", step.kind.removeprefix("peer "), "--size", str(settings["micro_batch"]),
                   *shared, "--memory-limit", limit,
                   "--build-nanogpt", str(folder / "peers" / "build-nanogpt")]  # fmt: skip
        command += ["--config", str(folder / "best.json")] if step.kind == "peer ours" else []
    elif not command:
        command = ["-P", STEP, step.kind, *shared, "--settings", json.dumps(step.settings)]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(folder / "site"), str(REPOSITORY)]),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
    }  # fmt: skip
    where = folder if step.needs_ray else REPOSITORY
    ran: Row = {"command": " ".join(["python", *command])}
    log, output = (folder / f"{step.name.replace(' ', '-')}.{end}" for end in ("log", "out"))
    with log.open("w") as errors, output.open("w") as printed:  # no pipes, which Ray's processes would hold open
        process = subprocess.Popen(
            [sys.executable, *command], cwd=where, env=environment, start_new_session=True, stdout=printed,
            stderr=errors,
        )  # fmt: skip
        try:
            process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # to it alone, so that it can end Ray's processes itself
            try:
                process.wait(timeout=step.grace)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            return ran | {"outcome": "timeout", "reason": output.read_text()[-600:]}
        except KeyboardInterrupt:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    said = output.read_text()
    if step.kind == "gpu test":
        return ran | gpu_test_row(folder, process.returncode, said or log.read_text())
    if process.returncode and step.kind != "tests":
        return ran | {"outcome": "failed", "reason": log.read_text()[-600:]}
    if step.kind == "tests":
        return ran | {"outcome": "failed" if process.returncode else "finished", "said": said[-2000:]}
    if step.needs_ray:
        return ran | {"outcome": "finished", "found": command_result(folder, step)}
    found = json.loads(said.strip().splitlines()[-1])
    names = {"ok": "finished", "out of memory": "oom"}
    return ran | found | {"outcome": names.get(found.get("outcome"), found.get("outcome", "finished"))}


def gpu_test_row(folder: Path, code: int, said: str) -> Row:
    """The row of the five-minute test: the card, and which of its steps failed."""
    path = folder / "gpu-report.json"
    report = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    facts = report.get("facts", {})
    row: Row = {"facts": facts, "device": facts.get("name"), "report": report}
    return row | ({"outcome": "failed", "reason": said[-1500:]} if code else {"outcome": "finished"})


def command_result(folder: Path, step: Step) -> Any:
    """What a command left: its standings, its result, or its trials."""
    home = folder / "runs" / step.run
    for name in ("rungs.json", "result.json"):
        if (home / name).exists():
            return json.loads((home / name).read_text(encoding="utf-8"))
    trials = home / "trials.csv"
    return trials.read_text(encoding="utf-8") if trials.exists() else None


# --- What it says -----------------------------------------------------------------------------------------------------


def verdict(rows: list[Row]) -> dict[str, tuple[float | None, float, bool]]:
    """For each goal what was reached so far, what is wanted, and whether more is better."""
    by_step = {row["step"]: row for row in rows if row["outcome"] == "finished"}
    device = by_step.get("versions", {}).get("device", "")
    top = best(rows)
    speed = top["tokens_per_second"] if top else None
    ceiling = max(by_step.get("ceilings", {}).get("matmul", {}).values(), default=None)
    turns = {side: middle(rows, side) for side in ("ours", "nanogpt", "build-nanogpt", "huggingface", "llm.c")}
    mine, ladder = turns["ours"], by_step.get("ladder", {}).get("found") or {}
    climbed = [row["speed"] for row in ladder.get("rows", ()) if row["speed"]]
    wanted = next((goal for name, goal in GOALS.items() if name in device), max(GOALS.values()))
    through_ray = ((by_step.get("run", {}).get("found") or {}).get("throughput") or {}).get("tokens_per_second")
    flops = top["flops_per_second"] if top else None
    return {
        "times nanoGPT": (_over(mine, turns["nanogpt"]), 1.35, True),
        "times build-nanogpt": (_over(mine, turns["build-nanogpt"]), 1.0, True),
        "times Hugging Face": (_over(mine, turns["huggingface"]), 1.0, True),
        "times llm.c": (_over(mine, turns["llm.c"]), 1.0, True),
        "losses beside nanoGPT's, nats": (loss_difference(rows, "ours", "nanogpt"), 0.03, False),
        "tokens/s": (speed, wanted, True),
        "of the measured matmul ceiling": (_over(flops, ceiling), 0.6, True),
        "error of predicted memory": (memory_error(rows), 0.03, False),
        "data wait, of a step": (top["data_wait_fraction"] if top else None, 0.001, False),
        "last rung over the first": (_over(climbed[-1], climbed[0]) if climbed else None, 12, True),
        "cost of Ray and MLflow": (1 - through_ray / speed if through_ray and speed else None, 0.01, False),
    }


def sentences(rows: list[Row]) -> list[str]:
    """The verdict so far, a line for each goal, and what the steps took."""
    lines = []
    for goal, (reached, wanted, more) in verdict(rows).items():
        word = "unknown" if reached is None else "reached" if (reached >= wanted) is more else "MISSED"
        lines.append(f"{word:8} {goal}: {_short(reached)} (goal {_short(wanted)})")
    spent = sum(row["seconds"] for row in rows)
    return [*lines, f"{len(rows)} rows in {spent / 60:.0f} minutes; last {rows[-1]['step']}, {rows[-1]['outcome']}"]


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def middle(rows: list[Row], side: str) -> float | None:
    """The median speed of a side's turns; the upper of two."""
    turns = [row for row in rows if row["kind"] == f"peer {side}" and row["outcome"] == "finished"]
    found = sorted(speed for row in turns if (speed := row.get("tokens_per_second")))
    return found[len(found) // 2] if found else None


def memory_error(rows: list[Row]) -> float | None:
    """How far the predicted memory of a trainer's process was off at most, as it was predicted."""
    trained = [row for row in rows if row["kind"] == "train" and row["outcome"] == "finished" and row.get("process")]
    return max((abs(row["predicted"] / row["process"] - 1) for row in trained), default=None)


def loss_difference(rows: list[Row], side: str, other: str) -> float | None:
    """The largest difference of two sides' losses in the same step; None before both have trained."""
    kinds = {row["kind"]: row["losses"] for row in rows if row["outcome"] == "finished" and row.get("losses")}
    one, another = kinds.get(f"peer {side}"), kinds.get(f"peer {other}")
    if one is None or another is None:
        return None
    return max((abs(first - second) for first, second in zip(one, another, strict=False)), default=None)


def _over(one: float | None, other: float | None) -> float | None:
    return one / other if one and other else None


# --- What comes along and goes home -----------------------------------------------------------------------------------

ARCHIVE, ROWS = "campaign.tar.gz", "rows.jsonl"
"""The rows are also copied on their own, in case the machine ends while the archive's parts are written."""
LARGE = ("inductor", "runs")
"""Folders of which the newest files are kept, as far as they fit; all else is small."""
NOT_KEPT = (
    "bring",
    "tokens",
    "site",
    "peers",
    "trace.json.gz",
    "memory.pickle",
    "checkpoints",
    "mlruns",
    "mlartifacts",
)


def pack(folder: Path, out: Path, room: int, part_bytes: int = PART_BYTES) -> None:
    """Write ``folder`` to parts of one archive in ``out``, of at most ``room`` bytes together."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    files = [path for path in files if not set(NOT_KEPT) & {*path.relative_to(folder).parts}]
    small = [path for path in files if path.relative_to(folder).parts[0] not in LARGE]
    large = sorted(set(files) - set(small), key=lambda path: (path.relative_to(folder).parts[0] == "inductor",
                                                              -path.stat().st_mtime))  # fmt: skip
    share = len(large)
    while True:
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=1) as tar:
            for path in (*small, *large[:share]):
                tar.add(path, str(path.relative_to(folder)))
        if packed.tell() <= room or not share:
            break
        share = int(share * min(0.9, room / packed.tell()))
    whole = packed.getvalue()
    pieces = [whole[start : start + part_bytes] for start in range(0, len(whole), part_bytes)]
    for number, piece in enumerate(pieces):
        temporary = out / f"{ARCHIVE}.{number:02d}.tmp"
        temporary.write_bytes(piece)
        temporary.replace(temporary.with_suffix(""))
    for stale in out.glob(f"{ARCHIVE}.*"):
        if stale.suffix == ".tmp" or int(stale.suffix[1:]) >= len(pieces):
            stale.unlink()


def _extract(tar: tarfile.TarFile, folder: Path) -> None:
    """Unpack ``tar`` by the data filter, which came with Python 3.11.4; before it, our own archives as they are."""
    tar.extraction_filter = getattr(tarfile, "data_filter", lambda member, _: member)
    tar.extractall(folder)  # noqa: S202 - by the filter above


def restore(bring: Path, folder: Path) -> None:
    """Unpack what was brought into ``folder``, and the archive of earlier calls unless its rows are there already."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("site.tar.xz", "tokens.tar.gz", "peers.tar.gz"):
        target = folder / name.partition(".")[0]
        if (bring / name).exists() and not target.exists():
            with tarfile.open(bring / name) as tar:
                _extract(tar, target)
    if (folder / ROWS).exists():
        return
    parts = sorted(bring.glob(f"{ARCHIVE}.??"))
    try:
        with tarfile.open(fileobj=io.BytesIO(b"".join(part.read_bytes() for part in parts))) as tar:
            _extract(tar, folder)
    except (tarfile.TarError, EOFError, OSError, zlib.error) as damage:
        if parts:
            print(f"The archive is damaged ({damage}): the rows are kept, the cache starts empty.")
    if (bring / ROWS).exists():
        shutil.copy(bring / ROWS, folder)


def prepare(options: argparse.Namespace) -> None:
    """Make ``options.bring``: packages for ``options.python``, token shards, and the peers' sources."""
    bring: Path = options.bring
    bring.mkdir(parents=True, exist_ok=True)
    shards = options.folder / "tokens"
    if not (shards / "manifest.json").exists():
        subprocess.run([sys.executable, "-m", "pipeline.tokenize", "--out", str(shards)], check=True)
    _tar(bring / "tokens.tar.gz", {path.name: path for path in shards.iterdir()})
    _tar(bring / "peers.tar.gz", sources(options))
    if options.site and options.site.resolve() != (bring / "site.tar.xz").resolve():
        shutil.copy(options.site, bring / "site.tar.xz")
    elif not options.site:
        _light(bring / "site.tar.xz", options.python)
    left = room(bring)
    print(f"{bring}: {left / 2**20:.1f} of {BROUGHT_BYTES / 2**20:.0f} MiB are left for the archive of earlier calls")
    if left < 2**20:
        sys.exit("That is too large to bring along.")
    with tempfile.TemporaryDirectory() as before:
        parts = Path(before, "parts")
        parts.mkdir()
        for part in (*bring.glob(f"{ARCHIVE}.??"), *bring.glob(ROWS)):
            shutil.copy(part, parts)
        restore(parts, Path(before, "state"))
        if (Path(before, "state") / ROWS).exists():
            pack(Path(before, "state"), bring, left)


def sources(options: argparse.Namespace) -> dict[str, Path]:
    """The files of the peers whose checkouts are given, by their names in the folder of peers."""
    found = {}
    if options.llm_c:
        found["llm.c"] = options.llm_c
    if options.build_nanogpt:
        found["build-nanogpt/train_gpt2.py"] = options.build_nanogpt / "train_gpt2.py"
    return found


def room(bring: Path) -> int:
    """Bytes that are left for the archive beside this repository and all else in ``bring``."""
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    files = [REPOSITORY / name for name in tracked.stdout.split("\0") if name]
    files += [path for path in bring.iterdir() if not path.name.startswith(ARCHIVE)]
    return BROUGHT_BYTES - sum(path.stat().st_size for path in files if path.is_file())


def _light(path: Path, python: str) -> None:
    """Pack the packages of :data:`LIGHT` for that version of Python on Linux."""
    platforms = [f"--platform=manylinux_2_{glibc}_x86_64" for glibc in (28, 27, 24, 17)]
    with tempfile.TemporaryDirectory() as site:
        subprocess.run(
            [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--target", site,
             "--only-binary=:all:", f"--python-version={python}", "--platform=manylinux2014_x86_64", *platforms,
             "--constraint", str(REPOSITORY / "constraints.txt"), *LIGHT],
            check=True,
        )  # fmt: skip
        _tar(path, {each.name: each for each in Path(site).iterdir()})


def record(bring: Path, records: Path) -> Path:
    """Write what was copied back to ``bring`` as one record of all rows, with the verdict; returns its path."""
    rows = Campaign(bring, bring, (), False, lambda step, seconds: {}).rows
    device = next((row["device"] for row in rows if row.get("device")), None)
    if device is None:
        sys.exit(f"{bring} has no {ROWS} of a machine: copy there what the machine left in --out.")
    path = records / f"campaign-{''.join(c if c.isalnum() else '-' for c in device.lower())}.json"
    path.write_text(json.dumps({"device": device, "verdict": verdict(rows), "rows": rows}, indent=1) + "\n")
    return path


def _tar(path: Path, files: dict[str, Path]) -> None:
    with tarfile.open(path, "w:xz" if path.suffix == ".xz" else "w:gz") as tar:
        for name, source in files.items():
            tar.add(source, name)


# --- The rehearsal ----------------------------------------------------------------------------------------------------


def rehearse(machines: int = 12, minutes: float = 28) -> list[list[Row]]:
    """The rows that each machine of a pretended campaign leaves; its archive really is packed and unpacked."""
    now = [0.0]
    found: list[list[Row]] = []
    with tempfile.TemporaryDirectory() as scratch:
        bring = Path(scratch, "bring")
        bring.mkdir()
        for number in range(machines):
            folder = Path(scratch, f"machine-{number}")
            restore(bring, folder)
            step = Campaign(
                folder, bring, ("ours", "nanogpt", "huggingface", "build-nanogpt", "llm.c"), number > 0,
                partial(pretend, now, folder), clock=lambda: now[0],
            )  # fmt: skip
            before = len(step.rows)
            done = step.work(60 * minutes)
            found.append(step.rows[before:])
            shutil.rmtree(folder)
            if done and step.ray:
                break
    return found


def pretend(now: list[float], folder: Path, step: Step, seconds: float) -> Row:
    """What ``step`` could leave on an H100, after as much pretended time."""
    settings = step.settings
    took = min(seconds, step.seconds)
    if step.needs_ray:  # of which the long ones are continued
        done = folder / "runs" / step.run / "slices"
        done.parent.mkdir(parents=True, exist_ok=True)
        slices = int(done.read_text()) + 1 if done.exists() else 1
        done.write_text(str(slices))
        now[0] += took
        long = {"run": 1, "search": 3, "grid": 4, "ladder": 8}
        return {"outcome": "finished" if slices >= long.get(step.name, 4) else "timeout"}
    now[0] += took
    if step.kind == "gpu test":
        facts = {"name": "NVIDIA H100 80GB HBM3", "memory": 85e9, "bf16": True}
        return {"outcome": "finished", "device": facts["name"], "facts": facts}
    if step.kind in ("versions", "ceilings"):
        return {"outcome": "finished", "device": "NVIDIA H100 80GB HBM3", "matmul": {"bf16": 790e12}}
    if step.kind in ("tests", "profile"):
        return {"outcome": "finished", "step": "a name of its own"}
    size = settings["micro_batch"]
    if step.kind != "train":
        factor = {"peer ours": 1.0, "peer nanogpt": 0.8, "peer huggingface": 0.78, "peer build-nanogpt": 0.82,
                  "peer llm.c": 0.95}[step.kind]  # fmt: skip
        small = size <= 60 or step.kind == "peer ours"
        return (
            {"outcome": "oom"}
            if not small
            else {"outcome": "finished", "tokens_per_second": 430_000 * factor, "losses": [10.9 + 0.01 * factor]}
        )
    factor = {"bf16": 0.93}.get(settings["precision"], 1.0) * {"blocks": 0.7, "max-autotune": 1.02}.get(
        settings["compile"], 1.0
    )
    if settings["precision"] == "bf16" and size == 80:
        return {"outcome": "oom"}
    cache = folder / "inductor" / f"{len(json.dumps(settings))}-{size}"
    cache.parent.mkdir(exist_ok=True)
    cache.write_bytes(os.urandom(2**16))
    speed = 430_000 * factor * size / (size + 2)
    kernel = "cudnn" if settings["attention"] == "auto" else settings["attention"]
    memory = 4e9 + 0.5e9 * size
    return {
        "outcome": "finished", "tokens_per_second": speed, "flops_per_second": 855e6 * speed, "attention": kernel,
        "data_wait_fraction": 0.0004, "predicted": memory, "process": memory * 1.02, "config": settings,
    }  # fmt: skip


def main() -> None:
    """Prepare, rehearse, or run; ``run`` exits with 1 when another call is needed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["prepare", "rehearse", "run", "record"])
    parser.add_argument("--folder", type=Path, default=Path("campaign"))
    parser.add_argument("--bring", type=Path, default=Path("campaign/bring"))
    parser.add_argument("--out", type=Path, default=Path("campaign/bring"))
    parser.add_argument("--minutes", type=float, default=9.5, help="of a call of run")
    parser.add_argument("--model", default="gpt2-124m")
    parser.add_argument("--global-batch", type=int, default=480, help="sequences per step")
    parser.add_argument("--memory-limit", help="of every side of the peers; by default nine tenths of the card's")
    parser.add_argument(
        "--archive-mib", type=float, default=32, help="most that it may take; prepare says what is left"
    )
    parser.add_argument("--site", type=Path, help="packages with Ray and MLflow, instead of the few that come first")
    parser.add_argument("--records", type=Path, default=REPOSITORY / "tests/benchmarks/records")
    parser.add_argument("--python", default="3.12", help="of the machine")
    parser.add_argument("--llm-c", type=Path, help="a checkout of llm.c, to bring along; it needs nvcc on the machine")
    parser.add_argument("--build-nanogpt", type=Path, help="a checkout of build-nanogpt, to bring along")
    options = parser.parse_args()
    if options.what == "prepare":
        prepare(options)
        return
    if options.what == "record":
        print(record(options.bring, options.records))
        return
    if options.what == "rehearse":
        for number, rows in enumerate(rehearse(), 1):
            spent = 0.0
            for row in rows:
                print(f"{number}  {spent / 60:5.1f} min  {row['seconds']:4.0f} s  {row['step']}: {row['outcome']}")
                spent += row["seconds"]
        return
    folder = options.folder.resolve()
    restore(options.bring, folder)
    for name, source in sources(options).items():
        (folder / "peers" / name).parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, folder / "peers" / name, dirs_exist_ok=True)
        else:
            shutil.copy(source, folder / "peers" / name)
    brought = [side for side in ("build-nanogpt", "llm.c") if (folder / "peers" / side).exists()]
    if "llm.c" in brought and not shutil.which("nvcc"):
        print("llm.c is left out: NVIDIA's compiler, nvcc, is missing.")
        brought.remove("llm.c")
    sides = ("ours", "nanogpt", *brought, "huggingface")
    ray = (folder / "site" / "ray").exists() or importlib.util.find_spec("ray") is not None
    campaign = Campaign(
        folder, options.out.resolve(), sides, ray, partial(real, folder=folder, options=options),
        int(options.archive_mib * 2**20),
    )  # fmt: skip
    done = campaign.work(60 * options.minutes)
    print("\n".join(sentences(campaign.rows)) if campaign.rows else "There was no time for a step.")
    if reason := gate_failure(campaign.rows):
        sys.exit(f"The campaign ends: {reason}")
    if done and not ray:
        sys.exit("The remaining steps need Ray and MLflow: bring an archive of packages with both, by prepare --site.")
    if not done:
        sys.exit("Not finished: run the same command again.")


if __name__ == "__main__":
    main()
