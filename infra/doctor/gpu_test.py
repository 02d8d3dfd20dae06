"""The GPU test, ``python -m infra.doctor --gpu``: five steps in some minutes, and a report that can be sent.

Each step is a process of its own with a time limit, so that one that crashes CUDA or hangs leaves the others. What the
steps do is in ``train.gpu_test``, which this package cannot import.
"""

import getpass
import json
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from infra.cli.console import console
from infra.cli.progress import status
from infra.device.gpu_report import REPORT_FILE, REPORT_VERSION, GpuReport, StepResult
from infra.device.hardware import DeviceInfo, device_info
from infra.errors import UserError
from infra.schema import to_json
from infra.storage.directory import StorageDir

MODULE = "train.gpu_test"
TOTAL_SECONDS = 480.0
"""Time limit of all steps together."""
FOLDERS = re.compile(r"(?<![\w.:/])/(?:[\w.@+-]+/)+")
"""Folders of an absolute path."""
ENDING_SECONDS = 5.0
"""Time limit for a process to end after it was interrupted."""


@dataclass(frozen=True)
class Step:
    """One step of the test."""

    name: str
    activity: str
    """What the step does, as a gerund."""
    seconds: float
    """Time limit."""


STEPS = (
    Step("device", "checking driver, memory and rates", 90),
    Step("attention", "comparing attention kernels with plain attention", 90),
    Step("compile", "comparing two compiled layers with eager ones", 180),
    Step("train", "training ten steps of the automatic config", 240),
    Step("nanogpt", "training nanoGPT's model on the same batches", 240),
)
"""The steps in their order; an A100 needs about five minutes for them."""

RunStep = Callable[[Step, dict[str, Any], float], dict[str, Any]]
"""Function that runs a step with a request, for at most so many seconds, and returns its result as JSON values."""


def run_in_process(step: Step, request: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Run ``step`` in a process of its own."""
    process = subprocess.Popen(
        [sys.executable, "-m", MODULE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True,
    )  # fmt: skip
    try:
        output, errors = process.communicate(json.dumps(request), timeout=seconds)
    except subprocess.TimeoutExpired:
        return _failure(f"not finished after {seconds:.0f} s", "stop other work on this machine, and run it again")
    finally:
        if process.poll() is None:  # It is too slow, or Ctrl-C was pressed.
            process.kill()
            process.wait(ENDING_SECONDS)
    try:
        return json.loads(output.splitlines()[-1])
    except (IndexError, ValueError):
        last = next(iter(reversed(errors.split("\n")[:-1])), "no message")
        text = f"its process ended with code {process.returncode} ({last[:200]})"
        return _failure(text, "look for the driver's messages with dmesg")


def run_test(
    out: StorageDir,
    model: str = "gpt2-124m",
    run_step: RunStep = run_in_process,
    clock: Callable[[], float] = time.monotonic,
    info: DeviceInfo | None = None,
) -> GpuReport:
    """Run all steps, print a line for each, and write the report to ``out`` after each of them.

    ``info`` describes the GPU; by default this machine's is described.

    Raises ``UserError`` if this process has no GPU.
    """
    started_at = clock()
    if info is None:
        with status("examining the GPU"):
            info = device_info()
    if info.kind != "cuda" or info.gpu_blocker:
        raise UserError(f"--gpu needs a CUDA GPU: {info.gpu_blocker or info.gpu_absence}.")
    report = GpuReport(REPORT_VERSION, False, info, {}, {}, {}, [])
    values: dict[str, Any] = {}
    for step in STEPS:
        remaining = TOTAL_SECONDS - (clock() - started_at)
        step_started_at = clock()
        with status(step.activity):
            if remaining > 0:
                request = {"step": step.name, "model": model, "facts": to_json(info), "values": values}
                fields = run_step(step, request, min(step.seconds, remaining))
            else:
                fields = _failure("no time was left", "stop other work on this machine, and run it again")
        seconds = clock() - step_started_at
        fields = without_names(fields)
        values[step.name] = fields.pop("values", None) or {}
        result = StepResult(step.name, seconds=round(seconds, 1), values=values[step.name], **fields)
        report = _with_result(report, result)
        _print_result(report.steps[-1], step_started_at - started_at)
        out.write_json(REPORT_FILE, to_json(report))
    return report


def without_names(value: Any) -> Any:
    """Return JSON values without names of this machine, its user, and its folders, which errors contain."""
    if isinstance(value, dict):
        return {name: without_names(part) for name, part in value.items()}
    if isinstance(value, list):
        return [without_names(part) for part in value]
    if not isinstance(value, str):
        return value
    for name in filter(None, (socket.gethostname(), getpass.getuser())):
        value = re.sub(rf"\b{re.escape(name)}\b", "...", value)
    return FOLDERS.sub(".../", value)


def verdict(report: GpuReport) -> str:
    """Return the result of the test in one sentence."""
    name = report.facts.name
    failed = [step.name for step in report.steps if step.outcome == "failed"]
    if failed:
        return f"{name}: {len(failed)} of {len(report.steps)} steps failed ({', '.join(failed)}); see the advice above."
    if report.simulated:
        return f"{name} is simulated: all steps ran, but its speeds and losses are not real."
    results = {step.name: step.values or {} for step in report.steps}
    speed, ratio = results["train"].get("tokens_per_second"), results["nanogpt"].get("ratio")
    texts = [f"{speed:,.0f} tokens/s" if speed else "no valid speed", f"x{ratio:.2f} of nanoGPT" if ratio else ""]
    return f"{name} is ready: all {len(report.steps)} steps passed ({', '.join(filter(None, texts))})."


def _with_result(report: GpuReport, result: StepResult) -> GpuReport:
    """Return ``report`` with one more step; what the first one measured of the GPU belongs to the whole."""
    values = dict(result.values or {})
    if result.name == "device" and values:
        report = replace(
            report, simulated=values.pop("simulated", False), matmul=values.pop("matmul", {}),
            copy=values.pop("copy", {}), software=values.pop("software", {}),
        )  # fmt: skip
        result = replace(result, values=values)
    return replace(report, steps=[*report.steps, result])


def _failure(summary: str, advice: str) -> dict[str, Any]:
    return {"outcome": "failed", "summary": summary, "advice": advice, "values": None}


def _print_result(result: StepResult, seconds: float) -> None:
    """Print the outcome of a step with the time at which it began."""
    sign, color = {"passed": ("✓", ""), "failed": ("✗", "red")}.get(result.outcome, ("–", ""))
    clock_text = f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
    console.print(f"{clock_text} {sign} {result.name}: {result.summary}", markup=False, style=color)
    if result.advice:
        console.print(f"       {result.advice}", markup=False, style=color)
