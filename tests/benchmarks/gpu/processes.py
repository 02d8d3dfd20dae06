"""Steps of the GPU campaign as processes: their commands, their time, and the rows that they leave.

This file needs nothing but Python.
"""

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from card import FULL, Extent, Row, Step

REPOSITORY = Path(__file__).parents[3]
STEP = str(Path(__file__).with_name("step.py"))
PEERS = str(Path(__file__).with_name("peers.py"))
LLM_C = str(Path(__file__).with_name("llm_c.py"))

SHOWN = 1500
"""Characters of an output that a row has: its end."""
OUTCOMES = {"ok": "finished", "out of memory": "oom"}
"""Outcomes of ``peers.py`` and ``llm_c.py``, and those of rows."""
FAILED_TEST = re.compile(r"^[.sxX]*[FE]", re.MULTILINE)
"""pytest's progress with a failure in it."""


@dataclass(frozen=True)
class Processes:
    """Runs steps in ``folder``."""

    folder: Path
    extent: Extent = FULL
    memory_limit: str | None = None
    """Of the peers; by default the memory that was free, by which the automatic micro-batch was chosen."""

    def run(self, step: Step, seconds: float, global_batch: int, memory: float) -> Row:
        """Run ``step`` for at most so many seconds on a GPU with so much memory."""
        command = self._command(step, global_batch, memory)
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(self.folder / "site"), str(REPOSITORY)]),
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "inductor"), "PYTHONUNBUFFERED": "1",
        }  # fmt: skip
        row: Row = {"command": " ".join(["python", *command]), "folders": [str(self.folder), str(REPOSITORY)]}
        (self.folder / "logs").mkdir(exist_ok=True)
        log, output = (self.folder / "logs" / f"{step.name.replace(' ', '-')}.{end}" for end in ("log", "out"))
        with log.open("w") as errors, output.open("w") as printed:  # no pipes, which Ray's processes would hold open
            process = subprocess.Popen(
                [sys.executable, *command], cwd=self.folder if step.needs_ray else REPOSITORY, env=environment,
                start_new_session=True, stdout=printed, stderr=errors,
            )  # fmt: skip
            try:
                process.wait(timeout=seconds)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGINT)  # to it alone, so that it can end Ray's processes itself
                try:
                    process.wait(timeout=step.grace)
                except subprocess.TimeoutExpired:
                    _kill(process)
                return row | self._stopped(step, seconds, _end(output) or _end(log))
            finally:  # also after an interrupt of the campaign
                _kill(process)
        return row | self._ended(step, process.returncode, output.read_text(errors="replace"), _end(log))

    def _command(self, step: Step, global_batch: int, memory: float) -> list[str]:
        extent = self.extent
        tokens = str(self.folder / "tokens")
        shared = ["--data", tokens, "--model", extent.model, "--global-batch", str(global_batch)]
        shared += ["--steps", str(extent.steps)]
        if step.needs_ray:
            return self._continued(step)
        if step.kind == "gpu test":
            return [*step.command, str(self.folder)]
        if step.command:
            return [*step.command]
        if step.kind == "peer llm.c":
            return ["-P", LLM_C, "--checkout", str(self.folder / "peers" / "llm.c"), "--data", tokens,
                    "--micro-batch", str(step.settings["micro_batch"]), "--steps", str(extent.steps)]  # fmt: skip
        if step.kind.startswith("peer "):
            limit = self.memory_limit or f"{memory // 1e6:.0f}MB"
            side = step.kind.removeprefix("peer ")
            return ["-P", PEERS, "--side", side, "--size", str(step.settings["micro_batch"]), *shared,
                    "--memory-limit", limit, "--settings", json.dumps(step.settings),
                    "--compile", "off" if extent.is_rehearsal else "whole",
                    "--build-nanogpt", str(self.folder / "peers" / "build-nanogpt")]  # fmt: skip
        return ["-P", STEP, step.kind, *shared, "--settings", json.dumps(step.settings),
                "--seconds", str(extent.ceiling_seconds)]  # fmt: skip

    def _continued(self, step: Step) -> list[str]:
        """A command of the product, or its continuation where it was stopped."""
        run = self.folder / "runs" / step.run
        has_state = any(run.glob("checkpoints/step-*" if "train.run" in step.command else "*.json"))
        if has_state:
            return [*step.command[:2], "--resume", step.run]
        if run.exists():  # There is nothing to continue, and the name is taken.
            run.rename(run.with_name(f"{run.name}-stopped-{len(list(run.parent.glob(f'{run.name}-stopped-*')))}"))
        return [*step.command]

    def _stopped(self, step: Step, seconds: float, end: str) -> Row:
        reason = f"stopped after {seconds:.0f} s; its output ended with: {end}"
        has_failed = step.kind == "tests" and FAILED_TEST.search(end)
        return {"outcome": "failed" if has_failed else "timeout", "reason": reason}

    def _ended(self, step: Step, code: int, output: str, log: str) -> Row:
        end = (output.strip() or log)[-SHOWN:]
        if step.kind == "gpu test":
            return _gpu_test_row(self.folder, code, end)
        if step.kind == "tests":
            return {"outcome": "failed" if code else "finished", "said": end}
        if step.needs_ray:
            # A search without a winner, or a run that ran out of memory, is a result, too: its files say which.
            has_result = (self.folder / step.result).exists()
            outcome = "failed" if code and not has_result else "finished"
            return {"outcome": outcome, "exit_code": code, "reason": log if code else "", "said": end,
                    "found": _command_result(self.folder / "runs" / step.run)}  # fmt: skip
        answer = _answer(output)
        if answer is None:
            reason = f"ended by {signal.Signals(-code).name}: {log}" if code < 0 else log
            return {"outcome": "failed", "reason": reason}
        outcome = answer.get("outcome", "finished")
        return answer | {"outcome": OUTCOMES.get(outcome, outcome)}


def _answer(output: str) -> Row | None:
    """What a step printed last, as JSON. It counts also if the process crashed at its end, when threads are stopped."""
    lines = output.strip().splitlines()
    with suppress(ValueError):
        answer = json.loads(lines[-1]) if lines else None
        return answer if isinstance(answer, dict) else None
    return None


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End what is left of a process and of what it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _end(path: Path) -> str:
    return path.read_text(errors="replace").strip()[-SHOWN:]


def _gpu_test_row(folder: Path, code: int, end: str) -> Row:
    """The row of the five-minute test: the GPU, and which of its steps failed."""
    path = folder / "gpu-report.json"
    report = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    facts = report.get("facts", {})
    row: Row = {"facts": facts, "device": facts.get("name"), "simulated": report.get("simulated"), "report": report}
    return row | ({"outcome": "failed", "reason": end} if code else {"outcome": "finished"})


def _command_result(run: Path) -> Any:
    """What a command left: the rungs of a ladder, the trials of a search, or the result of a run."""
    if (trials := run / "trials.csv").exists() and not (run / "rungs.json").exists():
        return trials.read_text(encoding="utf-8")
    for name in ("rungs.json", "result.json"):
        if (run / name).exists():
            return json.loads((run / name).read_text(encoding="utf-8"))
    return None
