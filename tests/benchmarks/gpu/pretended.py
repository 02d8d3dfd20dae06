"""What the steps of the GPU campaign could leave on an H100, after as much pretended time: for the schedule."""

import json
import os
from pathlib import Path

from card import Card, Row, Step

PRETENDED_SIDES = ("ours", "nanogpt", "build-nanogpt", "llm.c", "huggingface")
NAME = "NVIDIA H100 80GB HBM3"
SPEED = 430_000.0
SIDE_FACTORS = {
    "peer ours": 1.0, "peer nanogpt": 0.94, "peer huggingface": 0.78, "peer build-nanogpt": 0.82, "peer llm.c": 0.95,
}  # fmt: skip
MODE_FACTORS = {"blocks": 0.7, "max-autotune": 1.02}
SLICES = {"run": 1, "search": 3, "grid": 4, "ladder": 8}
"""Calls that each of the product's commands needs; others need four."""


def pretend(now: list[float], folder: Path, step: Step, seconds: float, card: Card) -> Row:
    """What ``step`` leaves, after which it is later ``now``."""
    now[0] += min(seconds, step.seconds)
    if step.needs_ray:  # of which the long ones are continued
        done = folder / "runs" / step.run / "slices"
        done.parent.mkdir(parents=True, exist_ok=True)
        slices = int(done.read_text()) + 1 if done.exists() else 1
        done.write_text(str(slices))
        return {"outcome": "finished" if slices >= SLICES.get(step.name, 4) else "timeout"}
    if step.kind == "gpu test":
        config = {"precision": "bf16", "compile": "whole", "loss": "fused", "micro_batch": 160}
        values = {
            "train": {"config": config, "tokens_per_second": SPEED},
            "nanogpt": {"micro_batch": 80, "ratio": 1.05},
        }
        steps = [{"name": name, "values": value} for name, value in values.items()]
        facts = {"name": NAME, "memory": 85e9, "bf16": True}
        report = {"simulated": False, "facts": facts, "matmul": {"bf16": 790e12}, "steps": steps}
        return {"outcome": "finished", "device": NAME, "facts": facts, "simulated": False, "report": report}
    if step.kind in ("versions", "ceilings"):
        return {"outcome": "finished", "device": NAME, "matmul": {"bf16": 790e12}}
    if step.kind in ("tests", "profile"):
        return {"outcome": "finished", "step": "a name of its own"}
    size = step.settings["micro_batch"]
    if step.kind != "train":
        factor = SIDE_FACTORS[step.kind]
        if size > 60 and step.kind != "peer ours":
            return {"outcome": "oom"}
        speed = SPEED * factor * (1.05 if step.settings.get("precision") == "bf16-activations" else 1.0)
        return {"outcome": "finished", "tokens_per_second": speed, "losses": [10.9 + 0.01 * factor], "sm_clock": 1755}
    if step.settings["loss"] == "plain" and size > 80:
        return {"outcome": "oom"}
    factor = {"bf16-activations": 1.05}.get(step.settings["precision"], 1.0)
    speed = SPEED * factor * MODE_FACTORS.get(step.settings["compile"], 1.0) * size / (size + 2)
    cache = folder / "inductor" / f"{len(json.dumps(step.settings))}-{size}"
    cache.parent.mkdir(exist_ok=True)
    cache.write_bytes(os.urandom(2**16))
    kernel = "cudnn" if step.settings["attention"] == "auto" else step.settings["attention"]
    memory = 4e9 + 0.5e9 * size
    return {
        "outcome": "finished", "tokens_per_second": speed, "flops_per_second": 855e6 * speed, "attention": kernel,
        "data_wait_fraction": 0.0004, "predicted": memory, "process": memory * 1.02, "config": step.settings,
    }  # fmt: skip
