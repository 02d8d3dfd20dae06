"""What the GPU campaign does, and in which order: the most valuable steps first.

In: the rows of the steps that have ended. Out: the next step. This file needs nothing but Python.
"""

import math
from collections.abc import Iterator
from typing import Any

from card import STEP_SECONDS, Card, Extent, Row, Settings, Step
from commands import SLICES, plan_commands

GPU_TEST_SECONDS = 500.0
"""Maximum time of the five-minute test, which limits its own steps."""
BEATEN = 0.8
"""A value whose speed was below this share of another's is not tried again with other settings."""

TESTS = (
    "tests/infra/device/test_gpu.py", "tests/train/models",
    "tests/train/data/test_loader.py", "tests/train/test_switches.py",
    "tests/train/loop/test_golden.py", "tests/train/loop/test_memory_cap.py", "tests/train/loop/test_oom.py",
)  # fmt: skip
"""Files with tests for a GPU that need no Ray and no MLflow."""

REHEARSED_TESTS = ("tests/infra/device/test_gpu.py", "tests/train/loop/test_memory_cap.py")
"""Those of a rehearsal."""
GATES = ("gpu test", "tests")
"""What must pass before anything is measured: on a GPU that computes wrong numbers no speed means anything."""


SMALL_GPU_TEST = """
import sys
from infra.doctor.gpu_test import run_test, verdict
from infra.storage.directory import StorageDir
report = run_test(StorageDir.of(sys.argv[3]), sys.argv[1])
print(verdict(report))
sys.exit(not report.passed)
"""
"""The five-minute test of a rehearsal, with another model than the command's."""


def gates(extent: Extent) -> Iterator[Step]:
    """The steps of :data:`GATES`."""
    command, files = ("-m", "infra.doctor", "--gpu", "--out"), TESTS
    if extent.is_rehearsal:
        command, files = ("-c", SMALL_GPU_TEST, extent.model, "--out"), REHEARSED_TESTS
    yield Step("gpu test", "gpu test", seconds=240, command=command, limit=GPU_TEST_SECONDS)
    yield Step("tests", "tests", seconds=90, command=("tests/cuda/run.py", "-q", *files))


def gate_failure(rows: list[Row]) -> str:
    """Why the campaign ends early: the gate that failed, and what it said; empty if none did."""
    for gate in GATES:
        row = next((row for row in rows if row["step"] == gate and row["outcome"] == "failed"), None)
        if row:
            return f"{gate} failed: {row.get('reason') or row.get('said', '')}"
    return ""


def plan(rows: list[Row], sides: tuple[str, ...], extent: Extent) -> Iterator[Step]:
    """The steps in the order of their worth, without those that ``rows`` make pointless; done ones are among them.

    The main question comes first: the automatic settings beside nanoGPT's model. Then other settings are tried, and
    where some are faster, they are compared with nanoGPT's model, too, in turns of their own.
    """
    card = Card.of(rows, extent)
    for gate in gates(extent):
        yield gate
        if gate_failure(rows) or not any(row["step"] == gate.name for row in rows):
            return
    main, others = sides[:2], sides[2:]
    yield from _turns(rows, main, card.first, extent.rounds, "automatic")
    yield Step("versions", "versions", seconds=30)
    yield from _trainer(rows, card.first)
    yield from _variants(rows, card)
    chosen = _chosen(rows, VARIED | {"precision": {*card.precisions}}, card)
    if chosen != card.first:
        yield from _turns(rows, main, chosen, extent.rounds, "best")
    if others:
        yield from _turns(rows, (main[0], *others), chosen, extent.rounds, "others")
    yield Step("ceilings", "ceilings", seconds=20 + 20 * extent.ceiling_seconds)
    yield Step("profile", "profile", chosen, seconds=90)
    # Autotuning measures kernels, for minutes; those of a simulated GPU take no time.
    if not card.is_simulated:
        yield from _trainer(rows, chosen | {"compile": "coordinate-descent"}, seconds=150)
    if card.fp8:
        yield from _trainer(rows, chosen | {"fp8": True}, seconds=90)
    if not card.is_simulated:
        yield from _trainer(rows, chosen | {"compile": "max-autotune"}, seconds=STEP_SECONDS)
    yield from plan_commands(chosen, card.limit, extent)


VARIED: dict[str, set[Any]] = {
    "attention": {"auto", "flash", "cudnn"}, "loss": {"fused", "plain"}, "fp8": {None},
    "compile": {"whole", "blocks", "reduce-overhead"},
}  # fmt: skip
"""The values among which the best settings are chosen for what comes after them."""


def _variants(rows: list[Row], card: Card) -> Iterator[Step]:
    """Other settings than the automatic ones, one after the other, each on top of the best so far."""
    precision = card.first["precision"]
    allowed: dict[str, set[Any]] = {
        "attention": {"auto"}, "loss": {card.first["loss"]}, "compile": {card.first["compile"]}, "fp8": {None},
        "micro_batch": {card.first["micro_batch"]}, "precision": {precision},
    }  # fmt: skip
    values: list[tuple[str, Any]] = [("precision", value) for value in card.precisions if value != precision]
    values += [("micro_batch", size) for size in card.order[1:]]
    values += [("attention", "flash"), ("attention", "cudnn")] if card.bf16 else []  # Older GPUs have neither.
    values += [("compile", "reduce-overhead"), ("compile", "blocks")]
    for knob, value in values:
        yield from _trainer(rows, _chosen(rows, allowed, card) | {knob: value})
        allowed[knob].add(value)
    # Without the fused loss all logits are stored, for which nanoGPT's micro-batch is known to be small enough.
    base = _chosen(rows, allowed, card)
    size = min(base["micro_batch"], card.peer_micro_batch or base["micro_batch"])
    yield from _trainer(rows, base | {"loss": "plain" if base["loss"] == "fused" else "fused", "micro_batch": size})


def _chosen(rows: list[Row], allowed: dict[str, set[Any]], card: Card) -> Settings:
    """The best settings with ``allowed`` values only, so that a later row does not change what came before it."""
    top = best([row for row in rows if all(row["settings"].get(knob) in values for knob, values in allowed.items())])
    return top["settings"] if top else card.first


def _trainer(rows: list[Row], settings: Settings, seconds: float = 60) -> Iterator[Step]:
    """A fresh trainer with ``settings``, unless ``rows`` answer it already."""
    name = "train " + " ".join("fp8" if value is True else str(value) for _, value in sorted(settings.items()))
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
    losers: set[tuple[str, Any]] = set()
    trained = speeds(rows)
    for slow in trained:
        for fast in trained:
            slow_settings, fast_settings = slow["settings"], fast["settings"]
            knobs = {*slow_settings, *fast_settings}
            differing = [knob for knob in knobs if slow_settings.get(knob) != fast_settings.get(knob)]
            if len(differing) == 1 and slow["tokens_per_second"] < BEATEN * fast["tokens_per_second"]:
                losers.add((differing[0], slow_settings.get(differing[0])))
    return losers


def speeds(rows: list[Row]) -> list[Row]:
    """The rows of trainers that have a speed."""
    return [row for row in rows if row["kind"] == "train" and row.get("tokens_per_second")]


def best(rows: list[Row]) -> Row | None:
    """The fastest trainer without 8-bit matrices, which change the numerics."""
    candidates = [row for row in speeds(rows) if not row["settings"].get("fp8")]
    return max(candidates, key=lambda row: row["tokens_per_second"], default=None)


def _turns(rows: list[Row], sides: tuple[str, ...], settings: Settings, rounds: int, group: str) -> Iterator[Step]:
    """All sides in turn, there and back; a side that has failed has no more turns."""
    failed = {row["kind"] for row in rows if row["kind"].startswith("peer ") and row["outcome"] == "failed"}
    for turn in range(rounds):
        for side in sides if turn % 2 == 0 else reversed(sides):
            kind, own = f"peer {side}", settings if side == "ours" else _peer_settings(rows, side)
            name = f"{kind} {group} {turn} at {own['micro_batch']}"
            if kind not in failed or any(row["step"] == name for row in rows):
                yield Step(name, kind, own, group=group)


def _peer_settings(rows: list[Row], side: str) -> Settings:
    """The largest micro-batch at which a peer has not run out of memory, or was close to it."""
    card = Card.of(rows)
    sizes = [
        row["settings"]["micro_batch"] for row in rows if row["kind"] == f"peer {side}" and row["outcome"] == "oom"
    ]  # fmt: skip
    largest = min([card.peer_micro_batch or card.sizes[0], *(0.8 * size for size in sizes)])
    return {"micro_batch": next((size for size in card.sizes if size <= largest), 1)}


def next_step(rows: list[Row], sides: tuple[str, ...], extent: Extent, *, ray: bool, seconds: float) -> Step | None:
    """The most valuable step that is worth an attempt and expected to fit into ``seconds``; None if there is none.

    A step that was stopped is tried once more after all others, with a warmer cache. Only the product's commands, which
    come last, are continued at once.
    """
    attempts: dict[str, list[str]] = {}
    for row in rows:
        attempts.setdefault(row["step"], []).append(row["outcome"])
    steps = [step for step in plan(rows, sides, extent) if ray or not step.needs_ray]
    single = [step for step in steps if not step.needs_ray]
    new = [step for step in single if step.name not in attempts]
    stopped = [step for step in single if attempts.get(step.name) == ["timeout"] and step.name not in GATES]
    commands = [
        step for step in steps
        if step.needs_ray and attempts.get(step.name, ["timeout"])[-1] == "timeout"
        and len(attempts.get(step.name, [])) < SLICES
    ]  # fmt: skip
    for step in (*new, *stopped, *commands):
        if min(step.seconds + step.grace, step.limit) <= seconds:
            return step
    return None


def is_done(rows: list[Row], sides: tuple[str, ...], extent: Extent, *, ray: bool) -> bool:
    """Whether no step is left, however much time there is."""
    return next_step(rows, sides, extent, ray=ray, seconds=math.inf) is None
