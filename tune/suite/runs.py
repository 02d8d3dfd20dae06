"""The runs of a suite and their results."""

import hashlib
import json
from dataclasses import dataclass

from train.config import ResolvedConfig
from train.intervals import Difference, Estimate
from tune.trial.row import Stage, TrialRow

SAME_BATCH = ", same batch"
"""Suffix of a rung's first run, at the batch of the previous rung, if a run with a larger batch follows."""


@dataclass(frozen=True)
class SuiteRun:
    """A run of a suite: a rung or a control, with its config."""

    label: str
    """Identifier of the run within its suite."""
    name: str
    """Name of the rung or control in reports."""
    config: ResolvedConfig
    """Resolved settings of the run."""
    stage: Stage
    """Purpose of the run."""
    changes_numerics: bool = False
    """Whether the loss may differ from the loss of the previous rung."""

    @property
    def key(self) -> str:
        """Key of the run's trial, which depends on the config, so that a changed config runs again."""
        return f"{self.label}-{hashlib.sha256(json.dumps(self.config.to_json()).encode()).hexdigest()[:8]}"


@dataclass(eq=False)
class PendingRun(Exception):
    """The next run of a ladder, which has no row yet."""

    run: SuiteRun


@dataclass(frozen=True)
class RungResult:
    """A rung or a control with its measurement and, after all runs, its comparison; or the reason for no speed."""

    name: str
    """Name of the rung or control."""
    reason: str = ""
    """Reason why the rung has no speed; empty if it has one."""
    row: TrialRow | None = None
    """Row of the run; None if the rung did not run."""
    config: ResolvedConfig | None = None
    """Resolved settings of the run; None if the rung did not run."""
    changes_numerics: bool = False
    """Whether the loss may differ from the loss of the previous rung."""
    failed_micro_batches: tuple[int, ...] = ()
    """Larger micro-batches that were predicted to fit the memory limit but did not fit."""
    held_out: tuple[tuple[float, float], ...] = ()
    """Validation losses (previous rung, this rung) for each seed, if seeds are compared."""
    step: Difference | None = None
    """Speedup over the previous rung, each relative to the controls around it."""
    total: Difference | None = None
    """Speedup over the baseline."""
    matmul_rate: float | None = None
    """FLOP/s of matrix products at the rung's precision, measured by infra.doctor on the rung's machine."""
    loss: float | None = None
    """Mean training loss, in nats/token, over the last fifth of the tokens on which every rung has trained."""

    @property
    def speed(self) -> Estimate | None:
        """The speed in tokens/s with its interval; None if it was not measured."""
        return self.row and self.row.speed

    @property
    def memory(self) -> int | None:
        """Peak memory of the process in bytes; None if it was not measured."""
        return self.row and self.row.memory

    @property
    def val_loss(self) -> float | None:
        """Validation loss in nats/token; None without validation."""
        return self.row and self.row.result and self.row.result.val_loss

    @property
    def batch(self) -> str:
        """Text with the micro-batch, an accumulation above 1, and in brackets a predicted batch that did not fit."""
        if self.config is None:
            return ""
        size, accumulation = self.config.batch.micro_batch, self.config.batch.accumulation
        return f"{size}{f' x {accumulation}' * (accumulation > 1)}" + "".join(
            f" ({n})" for n in self.failed_micro_batches[:1]
        )

    @property
    def ceiling(self) -> float | None:
        """Model FLOP/s as a fraction of the measured matmul rate."""
        flops = self.row and self.row.result and self.row.result.flops_per_second
        return flops / self.matmul_rate if flops and self.matmul_rate else None
