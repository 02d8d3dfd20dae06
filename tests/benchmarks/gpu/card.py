"""A step of the GPU campaign, how much it does, and the GPU that decides its sizes.

This file needs nothing but Python.
"""

import math
from dataclasses import dataclass, field
from typing import Any

STEP_SECONDS = 230.0
"""Maximum time of a step with its start; a longer one is stopped, and tried once more at the end."""
GRACE_SECONDS = 10.0
"""For a step to end after an interrupt; commands, which save what they have, get more."""
OPTIMIZER_STEP_SECONDS = 4.0
"""Time of an optimizer step that the global batch is chosen for; ten of them are a row."""
GLOBAL_BATCH = 480
"""Global batch in sequences, unless the GPU would need too long for it."""

FP8_CAPABILITY = (8, 9)
"""Compute capability from which on GPUs multiply 8-bit matrices."""

Row = dict[str, Any]
Settings = dict[str, Any]


@dataclass(frozen=True)
class Extent:
    """How much each step does."""

    model: str = "gpt2-124m"
    global_batch: int | None = None
    """Sequences per optimizer step; None: as many as the GPU trains in some seconds, at most 480."""
    steps: int = 10
    rounds: int = 3
    """Turns of each side of the peers."""
    ceiling_seconds: float = 3.0
    """Duration of the measurement of one ceiling."""
    is_rehearsal: bool = False
    """Whether each step does as little as it can, and compiles only where the step is about that; its numbers mean
    nothing."""


FULL = Extent()
SMALL_MODEL = "gpt2-124m,layers=1,width=96,heads=3"
"""Inductor's autotuning copies whole activations, which on a simulated GPU takes minutes for a wider model."""
REHEARSAL = Extent(SMALL_MODEL, GLOBAL_BATCH, steps=4, rounds=1, ceiling_seconds=0.1, is_rehearsal=True)


@dataclass(frozen=True)
class Step:
    """One process and the row that it leaves."""

    name: str
    kind: str
    settings: Settings = field(default_factory=dict)
    seconds: float = 50.0
    """What it is expected to take."""
    command: tuple[str, ...] = ()
    """After the interpreter; empty for a kind that ``step.py``, ``peers.py`` or ``llm_c.py`` runs."""
    result: str = ""
    """A command's last file, in the campaign's folder: it is continued until that exists."""
    run: str = ""
    """What ``--resume`` continues."""
    limit: float = STEP_SECONDS
    """Maximum seconds, its start included."""
    group: str = ""
    """The turns that are compared: those of one group were taken one after the other."""

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
    """What decides the sizes on a GPU, as the five-minute test has found it."""

    memory: float = 40e9
    """Bytes."""
    bf16: bool = True
    fp8: bool = True
    """Whether it multiplies 8-bit matrices."""
    automatic: Settings = field(default_factory=dict)
    """The settings with which ``train.run`` trains there; empty where they are unknown."""
    speed: float | None = None
    """Tokens per second with them; None on a GPU that computes nothing."""
    peer_micro_batch: int | None = None
    """Micro-batch of nanoGPT's model, which stores all logits."""
    is_simulated: bool = False
    """Whether it computes nothing."""

    @classmethod
    def of(cls, rows: list[Row], extent: Extent = FULL) -> "Card":
        """The card that ``rows`` are of; before the test has run, one of 40 GB."""
        row = next((row for row in rows if row.get("facts")), None)
        if row is None:
            return cls()
        facts = row["facts"]
        steps = report_values(row)
        train = steps.get("train", {})
        automatic = {name: train["config"][name] for name in KNOBS} if train.get("config") else {}
        if extent.is_rehearsal:
            automatic |= {"compile": "off"}
        return cls(
            facts.get("memory", cls.memory), facts.get("bf16", cls.bf16),
            tuple(facts.get("capability", FP8_CAPABILITY)) >= FP8_CAPABILITY, automatic, train.get("tokens_per_second"),
            steps.get("nanogpt", {}).get("micro_batch"), bool(row.get("simulated")),
        )  # fmt: skip

    @property
    def first(self) -> Settings:
        """The automatic settings: their row comes first, and the others differ from it."""
        largest = max(1.0, (self.memory - 3e9) / 0.45e9)
        guess: Settings = {
            "precision": self.precisions[0], "compile": "whole", "loss": "fused",
            "micro_batch": max(size for size in divisors(GLOBAL_BATCH) if size <= min(80.0, largest)),
        }  # fmt: skip
        return {"attention": "auto"} | guess | self.automatic

    @property
    def precisions(self) -> tuple[str, ...]:
        """Precisions to try."""
        return ("bf16", "bf16-activations") if self.bf16 else ("fp16",)

    @property
    def global_batch(self) -> int:
        """Sequences per optimizer step that are trained in some seconds: 480 on an A100, 48 on a T4."""
        size = self.first["micro_batch"]
        candidates = [batch for batch in divisors(GLOBAL_BATCH) if batch % size == 0] or [size]
        if self.speed is None:
            return candidates[-1]
        wanted = self.speed * OPTIMIZER_STEP_SECONDS / 1024
        return min(candidates, key=lambda batch: abs(math.log(batch / wanted)))

    @property
    def sizes(self) -> list[int]:
        """Micro-batches to try, the largest first."""
        return [size for size in reversed(divisors(self.global_batch)) if size <= self.first["micro_batch"]]

    @property
    def order(self) -> list[int]:
        """Some of them in the order of their worth; the first is the automatic one."""
        largest = self.sizes[:5]
        return [size for index in (0, 2, 1, 4) for size in largest[index : index + 1]]

    @property
    def limit(self) -> str:
        """The memory limit of searches and ladders: that of the published study, or what a smaller card has."""
        return f"{min(40e9, 0.9 * self.memory) / 1e9:.1f}GB"


KNOBS = ("precision", "compile", "loss", "micro_batch")
"""Settings that a report names and a trainer is given."""


def report_values(row: Row) -> dict[str, Any]:
    """What the steps of the five-minute test have measured, by the name of the step."""
    return {step["name"]: step.get("values") or {} for step in row.get("report", {}).get("steps", [])}


def divisors(number: int) -> list[int]:
    """The divisors of ``number`` in ascending order."""
    return [size for size in range(1, number + 1) if number % size == 0]
