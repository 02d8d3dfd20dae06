"""The memory of a custom model, measured where no formula knows it: two small probes, and the line between them.

A process of its own builds the model as the run would and takes two steps at each of two sizes, on this machine's
device, so that nothing of it stays in ours.
"""

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from typing import Any

from infra.errors import UserError
from infra.hardware import device_facts
from infra.progress import doing
from infra.schema import from_json, strict
from train.config import Cycle, TrainConfig
from train.model_config import format_model

TOKENS = 1024
"""At least so many are in the smaller probe's micro-batch; the larger one has three times as many."""

PROGRAM = "train.loop.probe"
"""It is above this package, and runs in another process."""

REFUSED = 2
"""Its exit code when the model is wrong, which its last line tells."""


@strict
@dataclass(frozen=True)
class Line:
    """Peak bytes of a process, without its context, as ``fixed + each * micro_batch``; the rest is in every one."""

    weights: int
    gradients: int
    optimizer: int
    fixed: float
    each: float

    def peak(self, micro_batch: int) -> int:
        """Bytes with ``micro_batch`` sequences; at least what every size holds."""
        return round(max(self.weights + self.gradients + self.optimizer, self.fixed + self.each * micro_batch))


_lines: dict[TrainConfig, Line] = {}


def known_line(config: TrainConfig) -> Line | None:
    """The line of ``config``, if this process has measured it."""
    return _lines.get(_probed(config))


def line(config: TrainConfig) -> Line:
    """The line of ``config``. Raises ``UserError`` where its device is not here, or a probe fails."""
    probed = _probed(config)
    if probed not in _lines:
        if config.device == "cuda" and device_facts().kind != "cuda":
            raise UserError(
                f"the memory of --model {config.model.callable} is measured, and there is no GPU here: "  # type: ignore[union-attr]
                "give --micro-batch, and leave what predicts memory to the machine that trains."
            )
        with doing("measuring the model's memory with two small micro-batches"):
            _lines[probed] = _measured(probed)
    return _lines[probed]


def _probed(config: TrainConfig) -> TrainConfig:
    """The run of the smaller probe, the same for all that have the same line.

    It accumulates two micro-batches where they do, because gradients are then there while the second is computed.
    """
    size = -(-TOKENS // config.model.context_length)
    kept = tuple(name for name in config.ablate if name in ("zero", "pages"))
    return replace(
        config, micro_batch=size, global_batch=min(2, config.accumulation) * size, workers=1, shard=False, seed=0,
        data="", stream=(), steps=None, tokens=None, time_budget=None, within=None, cycle=Cycle(1, 0),
        reading=type(config.reading)(), accelerator=None, ablate=kept, loader_workers=0,
    )  # fmt: skip


def _measured(config: TrainConfig) -> Line:
    done = subprocess.run(
        [sys.executable, "-P", "-m", PROGRAM], input=json.dumps(config.to_json()), capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    said: list[str] = done.stdout.splitlines()
    if done.returncode or not said:
        why = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        if done.returncode == -signal.SIGKILL:
            why = "it was killed, as when memory runs out"
        if done.returncode == REFUSED:
            raise UserError(why)
        raise UserError(
            f"the memory of --model {format_model(config.model)} could not be measured: {why.rstrip('.')}; a run with "
            "--micro-batch does without."
        )
    found: dict[str, Any] = json.loads(said[-1])
    return from_json(Line, found, "the probe")
