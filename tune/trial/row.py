"""What a search or a ladder asks for and what it gets: proposals in, rows out, one JSON file per row.

A trial's row reaches the driver as its result, and the driver writes the file, whole or not at all, before anything
else hears of it. The files are therefore the only state: whoever is killed, what is on disk is what was done.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, get_args

from infra.errors import UserError
from infra.schema import from_json, strict, to_json
from infra.storage import write_json
from train.intervals import Estimate
from tune.space import Candidate

Stage = Literal["probe", "refine", "confirm", "control", "baseline", "rung", "seed"]
"""The first four are a search's: ``control`` is the control of one more node, with which the speeds measured there are
compared. The others are a ladder's: the ``baseline`` is run again after every ``rung``, and a rung is run with another
``seed`` for its held-out loss alone."""
TrialOutcome = Literal["ok", "over_limit", "oom", "thrash", "stopped", "failed"]
OUTCOMES: tuple[TrialOutcome, ...] = get_args(TrialOutcome)


@dataclass(frozen=True)
class Proposal:
    """The next trial, and why. Memory in bytes, speeds in tokens per second."""

    candidate: Candidate
    stage: Stage
    round: int = 0
    """Which repetition of the candidate in this stage: a round of confirmations, or 1 for a trial with more time."""
    predicted_memory: float | None = None
    predicted_speed: float | None = None
    bar: float | None = None
    """Speed below which the trial cannot win and stops; None lets it run to its end."""
    node: str | None = None
    """The node that must run it: that of a ``control``; None leaves it to the driver."""

    def key(self, space_key: str) -> str:
        """Identity of this trial in the search over the space that ``space_key`` names."""
        parts = [space_key, self.candidate.micro_batch, self.candidate.knobs, self.stage, self.round]
        text = json.dumps(parts if self.node is None else [*parts, self.node])
        return f"m{self.candidate.micro_batch}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


Curve = list[tuple[int, float]]
"""Tokens seen and training loss, in nats per token, after every step."""


@strict
@dataclass(frozen=True)
class TrialRow:
    """One finished trial. Memory in bytes, speeds in tokens per second, times in seconds."""

    key: str
    number: int
    """Place in the order in which trials were begun, from 1."""
    stage: Stage
    round: int
    candidate: Candidate
    accumulation: int
    outcome: TrialOutcome
    reason: str
    seconds: float
    """From the request for a process to the result, by the driver's clock: what the trial cost."""
    predicted_memory: float | None = None
    predicted_speed: float | None = None
    tokens_per_second: float | None = None
    low: float | None = None
    high: float | None = None
    """95% interval of the speed."""
    memory: int | None = None
    """Peak of the process, which the limit is about."""
    memory_source: str | None = None
    allocated: int | None = None
    reserved: int | None = None
    allocator_retries: int = 0
    rejected_steps: int = 0
    """Steps left out of the speed, because the allocator had to free its cache in them."""
    flops_per_second: float | None = None
    """Of the model's formula."""
    mfu: float | None = None
    hfu: float | None = None
    """MFU with the arithmetic that is done a second time; None where nothing is recomputed."""
    compile_seconds: float | None = None
    """The first step's time beyond a steady step: compilation, autotuning and warm-up."""
    data_wait_fraction: float | None = None
    train_loss: float | None = None
    val_loss: float | None = None
    """After the last cycle; None without validation."""
    device: str | None = None
    attention: str | None = None
    """The kernel that attention ran."""
    node: str = field(kw_only=True)
    """Name of the machine that ran it."""
    name: str = field(default="", kw_only=True)
    """What was run, in words."""
    telemetry: dict[str, float] = field(default_factory=dict)
    """Means of what its machine did after the first step, by metric; empty for a trial that failed."""
    too_short: bool = False
    """It failed because its time ended before enough steps were counted for a speed."""
    step_tokens: int = 0
    step_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    """Training loss of every step, in nats per token."""

    @property
    def speed(self) -> Estimate | None:
        if self.tokens_per_second and self.low and self.high:
            return Estimate(self.tokens_per_second, self.low, self.high)
        return None

    @property
    def curve(self) -> Curve:
        return [(self.step_tokens * step, loss) for step, loss in enumerate(self.losses, 1)]


def write_row(folder: Path, row: TrialRow) -> None:
    write_json(folder / f"{row.key}.json", to_json(row))


def read_rows(folder: Path) -> list[TrialRow]:
    """The rows kept in ``folder``, in the order in which their trials were begun."""
    return sorted((_read_row(path) for path in folder.glob("*.json")), key=lambda row: row.number)


def _read_row(path: Path) -> TrialRow:
    try:
        return from_json(TrialRow, json.loads(path.read_text(encoding="utf-8")), "it")
    except (ValueError, UserError) as damage:
        raise UserError(f"{path} is damaged ({damage}): remove it, and its trial runs again.") from damage


def feasible(rows: Sequence[TrialRow]) -> list[TrialRow]:
    """Rows that ran within the limit and have a speed: only these can win."""
    return [row for row in rows if row.outcome in ("ok", "stopped") and row.tokens_per_second]


def measured(speed: Estimate, memory: int | None, rows: Sequence[TrialRow]) -> dict[str, Any]:
    """What ``best.json`` keeps of a candidate with these ``rows``, to compare with those of a run that is slower."""
    waits = [row.data_wait_fraction for row in rows if row.data_wait_fraction is not None]
    machines = [row.telemetry for row in rows if row.telemetry]
    return {
        "tokens_per_second": speed.middle,
        "low": speed.low,
        "high": speed.high,
        "memory_bytes": memory,
        "runs": len(rows),
        "tied_with": [],
        "device": rows[0].device,
        "machines": sorted({row.node for row in rows}),
        "data_wait_fraction": fmean(waits) if waits else None,
        "telemetry": {name: fmean(seen[name] for seen in machines if name in seen) for name in chain(*machines)},
    }


def flat_row(row: TrialRow) -> dict[str, Any]:
    """A row without nesting: the candidate's parts as columns, without what belongs to single steps, and telemetry."""
    values = {k: v for k, v in to_json(row).items() if k not in ("candidate", "step_seconds", "losses", "telemetry")}
    return {"micro_batch": row.candidate.micro_batch} | dict(row.candidate.knobs) | values
