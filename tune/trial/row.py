"""The proposal of a trial, and the row of its result in a JSON file.

A trial returns its row to the driver, which writes the file atomically before any other use. The files are therefore
the only state of an experiment, even if processes are killed.
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

Stage = Literal[
    "probe", "refine", "confirm", "control", "baseline", "rung", "seed", "speed", "learn", "final",
]  # fmt: skip
"""Purpose of a trial.

In a search, ``probe`` and ``refine`` explore, ``confirm`` repeats the best candidates, and ``control`` is the control
on an additional machine. In a ladder, the ``baseline`` runs again after each ``rung``, and ``seed`` is a rung with
another seed, for its validation loss. In a search for the lowest loss, ``speed`` measures the speed of candidates,
``learn`` explores, and ``final`` trains the finalists longer, with several seeds.
"""
TrialOutcome = Literal["ok", "over_limit", "oom", "thrash", "pruned", "failed"]
"""Outcome of a trial; ``thrash``: allocator retries distort its speed, ``pruned``: it cannot win."""
OUTCOMES: tuple[TrialOutcome, ...] = get_args(TrialOutcome)
"""All outcomes of trials."""


@dataclass(frozen=True)
class Proposal:
    """A trial that a strategy proposes, with its purpose and predictions."""

    candidate: Candidate
    """Candidate to run."""
    stage: Stage
    """Purpose of the trial."""
    round: int = 0
    """Repetition of the candidate in this stage: the confirmation round, the number of the seed, or 1 for a retry with
    more time."""
    predicted_memory: float | None = None
    """Predicted peak memory of the process in bytes; None if it is not predicted."""
    predicted_speed: float | None = None
    """Predicted speed in tokens/s; None if it is not predicted."""
    speed_threshold: float | None = None
    """Speed in tokens/s that the trial must reach to win; it is pruned once it cannot. None: it is never pruned."""
    node: str | None = None
    """Machine that must run the trial, if it is a ``control``; None: any machine."""

    def key(self, space_key: str) -> str:
        """Compute the key of this trial in the search with the name ``space_key``."""
        identity = [space_key, self.candidate.micro_batch, self.candidate.knobs, self.stage, self.round]
        text = json.dumps(identity if self.node is None else [*identity, self.node])
        return f"m{self.candidate.micro_batch}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


UNLEARNED_LOSS = 1e3
"""Loss that counts for a model that has not learned more than the frequencies of tokens, in nats/token. It is finite,
because Ray Tune's ASHA interpolates between losses."""


@strict
@dataclass(frozen=True)
class RungLoss:
    """The loss of a learning trial at a rung, a length that the final run may have."""

    seconds: float
    """Time of the final run in seconds, without its first step."""
    tokens: int
    """Training tokens of the final run."""
    loss: float
    """Validation loss after the decay of the learning rate, in nats/token."""
    has_learned: bool = True
    """Whether the loss is well below the entropy of token frequencies. Before that, it says little about settings,
    because a model first learns frequencies, with any settings, and then stays at their entropy for a while."""

    @property
    def comparable_loss(self) -> float:
        """The loss to compare with those of other trials at the same rung: of models that have not learned yet, the
        same one, above all others."""
        return self.loss if self.has_learned else UNLEARNED_LOSS


Curve = list[tuple[int, float]]
"""(training tokens so far, training loss in nats/token) of each step."""


@strict
@dataclass(frozen=True)
class TrialRow:
    """The result of a finished trial: its configuration, outcome and measurements."""

    key: str
    """Key of the trial, which is also the name of its file."""
    number: int
    """Number of the trial in the order of starts, from 1."""
    stage: Stage
    """Purpose of the trial."""
    round: int
    """Repetition of the candidate in this stage: the confirmation round, the number of the seed, or 1 for a retry with
    more time."""
    candidate: Candidate
    """Micro-batch and knobs of the trial."""
    accumulation: int
    """Micro-batches per step."""
    outcome: TrialOutcome
    """Outcome of the trial."""
    reason: str
    """Reason for the outcome, as a part of a sentence."""
    seconds: float
    """Duration from the request for a process to the result, by the driver's clock, in seconds."""
    predicted_memory: float | None = None
    """Predicted peak memory of the process in bytes; None if it was not predicted."""
    predicted_speed: float | None = None
    """Predicted speed in tokens/s; None if it was not predicted."""
    node: str = field(kw_only=True)
    """Name of the machine that ran the trial."""
    name: str = field(default="", kw_only=True)
    """Label of the configuration."""
    labels: dict[str, str] = field(default_factory=dict, kw_only=True)
    """Additional columns of the trial in MLflow's list of runs."""
    result: RunResult | None = None
    """Measurements of the trial; None if it failed. The speed excludes rejected steps, and the process memory is the
    value that is compared with the limit."""
    rejected_steps: int = 0
    """Number of steps excluded from the speed, because the allocator freed its cache in them."""
    ended_too_early: bool = False
    """Whether the trial failed because its time limit was too short to measure a speed."""
    step_tokens: int = 0
    """Training tokens per step."""
    step_seconds: list[float] = field(default_factory=list)
    """Duration of every step in seconds."""
    losses: list[float] = field(default_factory=list)
    """Training loss of every step, in nats/token."""
    rungs: list[RungLoss] = field(default_factory=list, kw_only=True)
    """Losses of a learning trial by rung, in ascending order; empty for other trials."""
    noise_scale: Estimate | None = field(default=None, kw_only=True)
    """Gradient noise scale in sequences; None if it was not measured."""

    @property
    def speed(self) -> Estimate | None:
        """The speed in tokens/s with its interval; None if it was not measured."""
        return self.result and self.result.throughput and self.result.throughput.estimate

    @property
    def tokens_per_second(self) -> float:
        """The speed in tokens/s; 0 if it was not measured."""
        return self.speed.middle if self.speed else 0.0

    def with_speed(self, speed: Estimate) -> "TrialRow":
        """Return the row with another speed, or unchanged if it has none."""
        result = self.result
        if result is None or result.throughput is None:
            return self
        throughput = replace(result.throughput, tokens_per_second=speed.middle, low=speed.low, high=speed.high)
        return replace(self, result=replace(result, throughput=throughput))

    @property
    def memory(self) -> int | None:
        """Peak memory of the process in bytes; None if it was not measured."""
        return self.result and self.result.memory.process

    @property
    def compile_seconds(self) -> float | None:
        """Time of the first step in addition to a steady-state step: compilation, autotuning and warm-up."""
        if not (self.speed and self.step_seconds):
            return None
        return max(0.0, self.step_seconds[0] - self.step_tokens / self.speed.middle)

    @property
    def curve(self) -> Curve:
        """The training loss after each step."""
        return [(self.step_tokens * step, loss) for step, loss in enumerate(self.losses, 1)]


def write_row(folder: Path, row: TrialRow) -> None:
    """Write the file of ``row`` in ``folder``."""
    write_json(folder / f"{row.key}.json", to_json(row))


def read_rows(folder: Path) -> list[TrialRow]:
    """Read the rows in ``folder``, in the order in which their trials started."""
    return sorted((_read_row(path) for path in folder.glob("*.json")), key=lambda row: row.number)


def _read_row(path: Path) -> TrialRow:
    try:
        return from_json(TrialRow, json.loads(path.read_text(encoding="utf-8")), "it")
    except (ValueError, UserError) as damage:
        raise UserError(f"{path} is corrupt ({damage}). Delete it to run its trial again.") from damage


def rows_with_speed(rows: Sequence[TrialRow]) -> list[TrialRow]:
    """Select the rows of trials that fit the memory limit and have a speed."""
    return [row for row in rows if row.outcome in ("ok", "pruned") and row.speed]


def flatten_row(row: TrialRow) -> dict[str, Any]:
    """Convert a row to the columns of trials.csv, without the values of single steps and telemetry."""
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
    } | _learning_columns(row)  # fmt: skip


def _learning_columns(row: TrialRow) -> dict[str, Any]:
    """Return the additional columns of a learning trial: its loss by the seconds of the final run, and noise scale."""
    if not row.rungs:
        return {}
    losses = " ".join(f"{rung.seconds:g}s:{rung.loss:.4f}" for rung in row.rungs)
    return {"rungs": losses, "noise_scale": row.noise_scale and row.noise_scale.middle}
