"""Machines that a search can be measured on without running anything: simulated GPUs, and a real grid replayed.

In: proposals. Out: rows, at the seconds that each would have cost, and the truth that a search does not see.
"""

import json
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from infra.device.hardware import cpu_info
from infra.schema import from_json
from train.config import config_from_json
from train.estimate.breakdown import CONTEXT
from train.loop.throughput import steady_state
from train.resolved import resolve
from train.result import Memory, RunResult, Throughput
from tune.experiment.machines import make_prior
from tune.space import Candidate, Space, make_space
from tune.trial import early_stop
from tune.trial.row import Proposal, TrialOutcome, TrialRow

STEPS = 20
PRECISION = 0.01
GPU_LIMIT = 40e9
START_SECONDS = 14.0

# Saturated tokens/s, micro-batch at which half of it is reached, bytes per sequence, bytes at rest, compile seconds.
BASE = {"speed": 150e3, "half": 1.6, "sequence": 0.62e9, "rest": 2.6e9, "compile": 2.0}
EFFECTS: dict[tuple[str, str], dict[str, float]] = {
    ("compile", "off"): {"speed": 0.42, "sequence": 1.45, "half": 1.8},
    ("compile", "blocks"): {"speed": 0.94, "compile": 12.0, "sequence": 1.05},
    ("compile", "whole"): {"compile": 22.0},
    ("compile", "max-autotune"): {"speed": 1.015, "compile": 90.0},
    ("compile", "reduce-overhead"): {"speed": 1.005, "compile": 25.0, "sequence": 1.05},
    ("attention", "manual"): {"speed": 0.72, "sequence": 1.9},
    ("checkpointing", "selective"): {"speed": 0.93, "sequence": 0.7},
    ("checkpointing", "full"): {"speed": 0.77, "sequence": 0.45},
    ("loss_chunks", "8"): {"speed": 0.985, "sequence": 0.62},
    ("optimizer", "adamw"): {"speed": 0.985},
}


class Machine(Protocol):
    """What a search is scored on. Memory in bytes, speeds in tokens per second, times in seconds."""

    space: Space
    seed: int
    limit: float
    seconds: float
    """Spent so far."""

    def prior(self, candidate: Candidate) -> float:
        """Memory predicted without running anything."""
        ...

    def memory(self, candidate: Candidate) -> float:
        """True peak."""
        ...

    def speed(self, candidate: Candidate) -> float:
        """True speed."""
        ...

    def fits(self, candidate: Candidate) -> bool:
        """Whether the candidate truly runs within the limit."""
        ...

    def run(self, proposal: Proposal, number: int, *, race: bool) -> TrialRow:
        """One trial: its row, and its cost added to ``seconds``."""
        ...


def measured(row: TrialRow, times: Sequence[float], step_tokens: int, *, memory: float, bar: float | None) -> TrialRow:
    """``row`` completed from the steps that a trial ran, and the seconds that they took."""
    speed = steady_state(times, step_tokens)
    assert speed is not None
    stopped: TrialOutcome = "pruned" if _ended(times, step_tokens, bar) == "cannot win" else "ok"
    return replace(
        row, outcome=stopped, result=result(int(memory), speed), step_seconds=list(times),
        seconds=row.seconds + sum(times),
    )  # fmt: skip


def result(memory: int, speed: Throughput | None = None) -> RunResult:
    """What a trial measured, as far as a search looks at it: its peak memory in bytes, and its speed."""
    return RunResult(
        outcome="finished", reason="", steps=0, throughput=speed, memory=Memory(None, None, memory, "rss"),
        train_loss=None, val_loss=None, train_tokens=0, val_tokens=0, books_seen=0, train_seconds=0.0,
        first_step_seconds=None, data_wait_fraction=None, flops_per_token=0.0, flops_formula="",
        flops_per_second=None, mfu=None, device="",
        machine="", checkpoint=None, data_fingerprint="", loss_curve=[],
    )  # fmt: skip


def _ended(times: Sequence[float], step_tokens: int, bar: float | None) -> str | None:
    return early_stop.verdict(times, threshold_seconds=step_tokens / bar if bar else None, precision=PRECISION)


def new_row(proposal: Proposal, number: int, space: Space, outcome: TrialOutcome, seconds: float) -> TrialRow:
    """A row before anything was measured."""
    return TrialRow(
        str(number), number, proposal.stage, proposal.round, proposal.candidate,
        space.config(proposal.candidate).batch.accumulation, outcome, "not run here", seconds=seconds,
        predicted_memory=proposal.predicted_memory, node="simulated",
    )  # fmt: skip


@dataclass
class Simulated:
    """A simulated GPU and training program; its truth is drawn from ``seed``.

    Saturating speeds and affine memory near the published ones (GPT-2 124M on an A100 40 GB), dips at sizes
    that fill no whole tiles or waves, noise that is correlated from step to step and differs from process
    to process, thrashing just below the limit, and what starting a process and compiling cost.
    """

    space: Space
    seed: int
    limit: float = GPU_LIMIT
    seconds: float = 0.0

    def __post_init__(self) -> None:
        draw = random.Random(self.seed)
        self.tilt = {name: draw.uniform(0.9, 1.1) for name in BASE}
        self.effect = {key: draw.uniform(0.96, 1.04) for key in EFFECTS}
        self.dips = {size: draw.uniform(0.0, 0.012) for size in self.space.micro_batches}
        self.prior_slope, self.prior_rest = draw.uniform(0.88, 1.08), draw.uniform(-1.2e9, 0.6e9)
        self.noise = random.Random(self.seed + 10**6)
        self.known: dict[Candidate, float] = {}

    def value(self, name: str, candidate: Candidate) -> float:
        """A parameter of BASE under the candidate's knobs."""
        result = BASE[name] * self.tilt[name]
        for knob, setting in candidate.knobs:
            effect = EFFECTS.get((knob, str(setting)), {})
            if name in effect:
                result *= effect[name] * (self.effect[knob, str(setting)] if name == "speed" else 1.0)
        return result

    def memory(self, candidate: Candidate) -> float:
        """True peak in bytes; accumulating keeps the gradients, once."""
        if candidate not in self.known:
            accumulating = 0.5e9 if candidate.micro_batch < self.space.global_batch(candidate) else 0.0
            moving = self.value("sequence", candidate) * candidate.micro_batch
            self.known[candidate] = self.value("rest", candidate) + moving + accumulating
        return self.known[candidate]

    def prior(self, candidate: Candidate) -> float:
        """What a prediction without the GPU would say: wrong in slope and offset."""
        return self.memory(candidate) * self.prior_slope + self.prior_rest

    def speed(self, candidate: Candidate) -> float:
        """True tokens per second; where the accumulation is searched, a step costs once what a micro-batch costs."""
        size, batch = candidate.micro_batch, self.space.global_batch(candidate)
        dip = self.dips[size] + (0.02 if size % 8 else 0.0) + (0.04 if size % 2 else 0.0)
        fixed = 1 / size + (1 / batch if self.space.is_accumulation_searched else 0.0)
        return self.value("speed", candidate) * (1 - dip) / (1 + self.value("half", candidate) * fixed)

    def fits(self, candidate: Candidate) -> bool:
        """Whether the candidate runs within the limit without thrashing."""
        return self.memory(candidate) <= 0.985 * self.limit

    def run(self, proposal: Proposal, number: int, *, race: bool) -> TrialRow:
        """One trial: its row, and its cost added to ``seconds``."""
        candidate = proposal.candidate
        config = self.space.config(candidate)
        row = new_row(proposal, number, self.space, "oom", START_SECONDS + 3.0)
        memory = self.memory(candidate)
        if memory <= self.limit:
            step = config.step_tokens / self.speed(candidate) * self.noise.gauss(1.0, 0.003)
            row = replace(row, outcome="thrash", result=result(int(memory)), seconds=START_SECONDS + 8 * step)
            if self.fits(candidate):
                times, bar = [step + self.value("compile", candidate)], proposal.speed_threshold if race else None
                drift = 0.0
                while len(times) < STEPS and not (race and _ended(times, config.step_tokens, bar)):
                    drift = 0.6 * drift + self.noise.gauss(0.0, 0.006)
                    slow = 1.3 if self.noise.random() < 0.02 else 1.0
                    times.append(step * (1 + drift) * slow * (1.02 if len(times) < 3 else 1.0))
                row = measured(
                    replace(row, seconds=START_SECONDS), times, config.step_tokens, memory=memory, bar=bar
                )  # fmt: skip
        self.seconds += row.seconds
        return row


@dataclass
class Replayed:
    """An exhaustive grid that was really run (``real_grid.py``), each candidate several times.

    A trial is one of the candidate's runs, drawn from ``seed``; the truth is the mean of all of them. The limit is
    one under which the share ``fitting`` of all candidates runs.
    """

    record: Path
    fitting: float
    seed: int
    seconds: float = 0.0

    def __post_init__(self) -> None:
        kept = json.loads(self.record.read_text(encoding="utf-8"))
        self.space = make_space(resolve(config_from_json(kept["base"], str(self.record)), cpu_info()), kept["knobs"])
        self.idle = float(kept["idle_bytes"])
        self.rows: dict[Candidate, list[dict[str, Any]]] = {}
        for row in kept["rows"]:
            self.rows.setdefault(from_json(Candidate, row["candidate"], self.record), []).append(row)
        peaks = sorted(self.memory(candidate) for candidate in self.rows)
        fit = round(self.fitting * len(peaks))
        self.limit = (peaks[fit - 1] + [*peaks, 1.2 * peaks[-1]][fit]) / 2
        self.draw = random.Random(self.seed)

    def prior(self, candidate: Candidate) -> float:
        """The prediction that a real search would use, with the memory of an idle process as it is here."""
        return make_prior(self.space)(candidate) - CONTEXT["cpu"] + self.idle

    def memory(self, candidate: Candidate) -> float:
        """The largest peak that was seen."""
        return max(row["memory"] for row in self.rows[candidate])

    def speed(self, candidate: Candidate) -> float:
        """The geometric mean of the runs."""
        return statistics.geometric_mean(row["tokens_per_second"] for row in self.rows[candidate])

    def fits(self, candidate: Candidate) -> bool:
        """Whether no run went over the limit."""
        return self.memory(candidate) <= self.limit

    def run(self, proposal: Proposal, number: int, *, race: bool) -> TrialRow:
        """One of the candidate's runs, cut where the stopping rule would have."""
        real = self.draw.choice(self.rows[proposal.candidate])
        start = real["seconds"] - sum(real["step_seconds"])
        row = new_row(proposal, number, self.space, "over_limit", start)
        times, tokens = real["step_seconds"], self.space.base.step_tokens
        bar = proposal.speed_threshold if race else None
        if real["memory"] > self.limit:
            row = replace(row, result=result(real["memory"]), seconds=start + times[0])
        else:
            if race:
                ends = (n for n in range(1, len(times)) if _ended(times[:n], tokens, bar))
                times = times[: next(ends, len(times))]
            row = measured(row, times, tokens, memory=real["memory"], bar=bar)
        self.seconds += row.seconds
        return row
