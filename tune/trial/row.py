"""The input and the result of a trial: a proposal, and a row in a JSON file of its own.

A trial returns its row to the driver, which writes the file atomically before anything else uses the row. The files are
therefore the only state: whichever process is killed, the finished trials are those on disk.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from infra.errors import UserError
from infra.schema import from_json, strict, to_json
from infra.storage.files import write_json
from train.intervals import Estimate
from train.result import RunResult
from tune.space import Candidate

Stage = Literal["probe", "refine", "confirm", "control", "baseline", "rung", "seed"]
"""Purpose of a trial. The first four belong to a search, where ``control`` is the control on an additional node, the
reference for speeds there. The others belong to a ladder: the ``baseline`` runs again after each ``rung``, and a rung
runs with another ``seed`` only for its validation loss."""
TrialOutcome = Literal["ok", "over_limit", "oom", "thrash", "pruned", "failed"]
OUTCOMES: tuple[TrialOutcome, ...] = get_args(TrialOutcome)


@dataclass(frozen=True)
class Proposal:
    """The next trial, with its purpose and predictions. Memory in bytes, speeds in tokens per second."""

    candidate: Candidate
    stage: Stage
    round: int = 0
    """Repetition of the candidate in this stage: the confirmation round, or 1 for a retry with more time."""
    predicted_memory: float | None = None
    predicted_speed: float | None = None
    speed_threshold: float | None = None
    """Speed that the trial must reach to win; it stops once it cannot. None: it always runs to its end."""
    node: str | None = None
    """The node that must run the trial, if it is a ``control``; None: any node."""

    def key(self, space_key: str) -> str:
        """Identity of this trial in the search with the name ``space_key``."""
        parts = [space_key, self.candidate.micro_batch, self.candidate.knobs, self.stage, self.round]
        text = json.dumps(parts if self.node is None else [*parts, self.node])
        return f"m{self.candidate.micro_batch}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


Curve = list[tuple[int, float]]
"""(training tokens so far, training loss in nats per token) for each step."""


@strict
@dataclass(frozen=True)
class TrialRow:
    """One finished trial: what ran, how it ended, and what it measured. Memory in bytes, times in seconds."""

    key: str
    number: int
    """Number of the trial in the order of their starts, from 1."""
    stage: Stage
    round: int
    candidate: Candidate
    accumulation: int
    outcome: TrialOutcome
    reason: str
    seconds: float
    """Duration from the request for a process to the result, by the driver's clock."""
    predicted_memory: float | None = None
    predicted_speed: float | None = None
    """Tokens per second."""
    node: str = field(kw_only=True)
    """Name of the machine that ran the trial."""
    name: str = field(default="", kw_only=True)
    """Label of the configuration."""
    labels: dict[str, str] = field(default_factory=dict, kw_only=True)
    """Additional columns of the trial in MLflow's list of runs."""
    result: RunResult | None = None
    """What the trial measured; None if it ended by an error or without a reply. Its speed is of the valid steps, and
    its process memory is what the limit applies to."""
    rejected_steps: int = 0
    """Steps excluded from the speed, because the allocator freed its cache in them."""
    ended_too_early: bool = False
    """Whether the trial failed because its time was over before a speed could be measured."""
    step_tokens: int = 0
    step_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    """Training loss of every step, in nats per token."""

    @property
    def speed(self) -> Estimate | None:
        """Tokens per second with their interval."""
        return self.result and self.result.throughput and self.result.throughput.estimate

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second; 0 without a speed."""
        return self.speed.middle if self.speed else 0.0

    def with_speed(self, speed: Estimate) -> "TrialRow":
        """The row with another speed, if its trial has one."""
        result = self.result
        if result is None or result.throughput is None:
            return self
        throughput = replace(result.throughput, tokens_per_second=speed.middle, low=speed.low, high=speed.high)
        return replace(self, result=replace(result, throughput=throughput))

    @property
    def memory(self) -> int | None:
        """Peak memory of the process, to which the limit applies."""
        return self.result and self.result.memory.process

    @property
    def compile_seconds(self) -> float | None:
        """Time of the first step beyond a steady step: compilation, autotuning and warm-up."""
        if not (self.speed and self.step_seconds):
            return None
        return max(0.0, self.step_seconds[0] - self.step_tokens / self.speed.middle)

    @property
    def curve(self) -> Curve:
        return [(self.step_tokens * step, loss) for step, loss in enumerate(self.losses, 1)]


def write_row(folder: Path, row: TrialRow) -> None:
    write_json(folder / f"{row.key}.json", to_json(row))


def read_rows(folder: Path) -> list[TrialRow]:
    """The rows in ``folder``, in the order in which their trials started."""
    return sorted((_read_row(path) for path in folder.glob("*.json")), key=lambda row: row.number)


def _read_row(path: Path) -> TrialRow:
    try:
        return from_json(TrialRow, json.loads(path.read_text(encoding="utf-8")), "it")
    except (ValueError, UserError) as damage:
        raise UserError(f"{path} is corrupt ({damage}). Delete it to run its trial again.") from damage


def rows_with_speed(rows: Sequence[TrialRow]) -> list[TrialRow]:
    """Rows of trials that stayed within the memory limit and have a speed."""
    return [row for row in rows if row.outcome in ("ok", "pruned") and row.speed]


def flatten_row(row: TrialRow) -> dict[str, Any]:
    """A row as the columns of trials.csv, without the values of single steps and telemetry."""
    result = row.result
    memory, speed = result and result.memory, row.speed
    return {"micro_batch": row.candidate.micro_batch} | dict(row.candidate.knobs) | {
        "key": row.key, "number": row.number, "stage": row.stage, "round": row.round, "accumulation": row.accumulation,
        "outcome": row.outcome, "reason": row.reason, "seconds": row.seconds,
        "predicted_memory": row.predicted_memory, "predicted_speed": row.predicted_speed,
        "tokens_per_second": speed and speed.middle, "speed_low": speed and speed.low,
        "speed_high": speed and speed.high, "memory": row.memory, "memory_source": memory and memory.process_source,
        "allocated": memory and memory.allocated, "reserved": memory and memory.reserved,
        "allocator_retries": memory.allocator_retries if memory else 0, "rejected_steps": row.rejected_steps,
        "flops_per_second": result and result.flops_per_second, "mfu": result and result.mfu,
        "hfu": result and result.hfu, "compile_seconds": row.compile_seconds,
        "data_wait_fraction": result and result.data_wait_fraction, "train_loss": result and result.train_loss,
        "val_loss": result and result.val_loss, "device": result and result.device,
        "attention": result and result.attention, "node": row.node, "name": row.name,
        "ended_too_early": row.ended_too_early, "step_tokens": row.step_tokens,
    }  # fmt: skip
