"""The input and the result of a trial: a proposal, and a row in a JSON file of its own.

A trial returns its row to the driver, which writes the file atomically before anything else uses the row. The files are
therefore the only state: whichever process is killed, the finished trials are those on disk.
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
from infra.storage.files import write_json
from train.intervals import Estimate
from tune.space import Candidate

Stage = Literal["probe", "refine", "confirm", "control", "baseline", "rung", "seed"]
"""Purpose of a trial. The first four belong to a search, where ``control`` is the control on an additional node, the
reference for speeds there. The others belong to a ladder: the ``baseline`` runs again after each ``rung``, and a rung
runs with another ``seed`` only for its validation loss."""
TrialOutcome = Literal["ok", "over_limit", "oom", "thrash", "stopped", "failed"]
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
    """One finished trial. Memory in bytes, speeds in tokens per second, times in seconds."""

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
    tokens_per_second: float | None = None
    low: float | None = None
    """Lower end of the speed's 95% confidence interval."""
    high: float | None = None
    """Upper end of the speed's 95% confidence interval."""
    memory: int | None = None
    """Peak memory of the process, to which the limit applies."""
    memory_source: str | None = None
    """Method that measured ``memory``: a key of :data:`tune.reporting.report.MEMORY_SOURCES`."""
    allocated: int | None = None
    reserved: int | None = None
    allocator_retries: int = 0
    rejected_steps: int = 0
    """Steps excluded from the speed, because the allocator freed its cache in them."""
    flops_per_second: float | None = None
    """Model FLOP/s, by the model's formula."""
    mfu: float | None = None
    hfu: float | None = None
    """MFU including recomputation; None if nothing is recomputed."""
    compile_seconds: float | None = None
    """Time of the first step beyond a steady step: compilation, autotuning and warm-up."""
    data_wait_fraction: float | None = None
    train_loss: float | None = None
    val_loss: float | None = None
    """Validation loss after the last cycle; None without validation."""
    device: str | None = None
    attention: str | None = None
    """The attention kernel that ran."""
    node: str = field(kw_only=True)
    """Name of the machine that ran the trial."""
    name: str = field(default="", kw_only=True)
    """Label of the configuration."""
    telemetry: dict[str, float] = field(default_factory=dict)
    """Averages of the machine's metrics after the first step; empty for a trial that failed."""
    too_short: bool = False
    """Whether the trial failed because its time was over before a speed could be measured."""
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
    """The rows in ``folder``, in the order in which their trials started."""
    return sorted((_read_row(path) for path in folder.glob("*.json")), key=lambda row: row.number)


def _read_row(path: Path) -> TrialRow:
    try:
        return from_json(TrialRow, json.loads(path.read_text(encoding="utf-8")), "it")
    except (ValueError, UserError) as damage:
        raise UserError(f"{path} is corrupt ({damage}). Delete it to run its trial again.") from damage


def rows_with_speed(rows: Sequence[TrialRow]) -> list[TrialRow]:
    """Rows of trials that stayed within the memory limit and have a speed."""
    return [row for row in rows if row.outcome in ("ok", "stopped") and row.tokens_per_second]


def measurement_json(speed: Estimate, memory: int | None, rows: Sequence[TrialRow]) -> dict[str, Any]:
    """The measurements of a candidate's ``rows`` in ``best.json``, the reference if a later run is slower."""
    waits = [row.data_wait_fraction for row in rows if row.data_wait_fraction is not None]
    averages = [row.telemetry for row in rows if row.telemetry]
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
        "telemetry": {name: fmean(each[name] for each in averages if name in each) for name in chain(*averages)},
    }


def flatten_row(row: TrialRow) -> dict[str, Any]:
    """A row as one flat dictionary with the candidate's values, without the values of single steps and telemetry."""
    values = {k: v for k, v in to_json(row).items() if k not in ("candidate", "step_seconds", "losses", "telemetry")}
    return {"micro_batch": row.candidate.micro_batch} | dict(row.candidate.knobs) | values
