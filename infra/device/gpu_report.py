"""The report of ``python -m infra.doctor --gpu``: what one GPU is, what it reached, and which steps passed.

It has no names of hosts, users or files and no serial numbers, so that it can be pasted into an issue. Plans read its
rates, and later predictions are compared with the reports in ``infra/device/reports``.
"""

from dataclasses import dataclass
from typing import Any, Literal

from infra.device.hardware import DeviceInfo
from infra.errors import UserError
from infra.schema import from_json, strict

REPORT_FILE = "gpu-report.json"
"""Default name of the file."""
REPORT_VERSION = 1
"""Version of the format; a file of another version is not read."""

AGAIN = "Run 'python -m infra.doctor --gpu' again on the machine with the GPU"
"""Advice for a report that cannot be used."""

Outcome = Literal["passed", "failed", "not compared"]


@strict
@dataclass(frozen=True)
class StepResult:
    """Result of one step of the test."""

    name: str
    outcome: Outcome
    """``not compared`` is a step that ran, but whose numbers mean nothing on a simulated GPU."""
    seconds: float
    summary: str
    """What the step showed, as one line."""
    advice: str = ""
    """What to do about a failure; empty if there is none."""
    values: dict[str, Any] | None = None
    """Measured values by name; None if the step failed before it measured."""


@strict
@dataclass(frozen=True)
class GpuReport:
    """Report of the test of one GPU."""

    version: int
    simulated: bool
    """Whether the GPU computes nothing, so that its speeds and losses are not real."""
    facts: DeviceInfo
    matmul: dict[str, float]
    """FLOP/s of matrix products by precision; empty if they were not measured."""
    copy: dict[str, float]
    """Bytes/s of memory copies by name; empty if they were not measured."""
    software: dict[str, str]
    """Versions by package, and of the driver."""
    steps: list[StepResult]

    @property
    def passed(self) -> bool:
        """Whether no step failed."""
        return all(step.outcome != "failed" for step in self.steps)


def is_gpu_report(record: Any) -> bool:
    """Return whether the content of a JSON file is a report of the GPU test, of any version."""
    return isinstance(record, dict) and "version" in record and "steps" in record


def parse_report(record: Any, source: str) -> GpuReport:
    """Convert the content of a JSON file, which errors name as ``source``, to the report.

    Raises ``UserError`` if it is damaged, of another version, or without the rates of a GPU.
    """
    if not is_gpu_report(record):
        raise UserError(f"{source} is not a report of the GPU test. {AGAIN}.")
    version = record["version"]
    if version != REPORT_VERSION:
        update = "Update this program, or use a report of its version" if str(version) > str(REPORT_VERSION) else AGAIN
        raise UserError(
            f"{source} has version {version} of the report, and this program reads version {REPORT_VERSION}. {update}."
        )
    report = from_json(GpuReport, record, source)
    if report.facts.kind != "cuda":
        raise UserError(f"{source} describes no GPU, but {report.facts.name}. {AGAIN}.")
    names = {name for step in report.steps if (name := (step.values or {}).get("device")) and name != report.facts.name}
    if names:
        others = ", ".join(sorted(names))
        raise UserError(f"{source} describes {report.facts.name}, but has results of {others}. {AGAIN}.")
    return report
