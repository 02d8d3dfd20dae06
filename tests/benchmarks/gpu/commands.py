"""The product's own commands in the GPU campaign, which need Ray and MLflow. This file needs nothing but Python."""

from collections.abc import Iterator
from pathlib import Path

from card import STEP_SECONDS, Extent, Settings, Step

SLICES = 16
"""Times that a command may be stopped, and continued."""
REHEARSED_RUNGS = {
    "a100": ("tensor cores", "compile"), "kernels": ("CUDA graphs",), "memory": ("checkpointing",),
    "sizes": ("6 heads",),
}  # fmt: skip
"""Rungs of each suite that a rehearsal runs."""
REHEARSED_CONTEXT, REHEARSED_LIMIT = 16, "1.5GB"
"""Context length and memory limit of a rehearsal's ladders: on a simulated GPU, kernels take no time, and a speed above
the peak FLOP/s of the GPU is no measurement. With few tokens per step, launching takes longer than the peak allows."""


def plan_commands(settings: Settings, memory_limit: str, extent: Extent) -> Iterator[Step]:
    """The product's own commands, which need Ray and MLflow."""
    shared = ("--data", "tokens", "--config", "best.json")
    limit = fitted = ("--memory-limit", memory_limit)
    trial = ("--trial-steps", "12", "--trial-time", "20s", "--confirm-rounds", "0")
    rung = ("--time-budget", "15s", "--speed-tolerance", "0.005", "--cycle", "20+0")  # no validation to compile anew
    length: tuple[str, ...] = ("--steps", "60", "--cycle", "20+1")
    small: dict[str, tuple[str, ...]] = {}
    if extent.is_rehearsal:
        batch = ("--global-batch", "4", "--micro-batch", "auto")
        trial = ("--trial-steps", "7", "--trial-time", "5s", "--confirm-rounds", "0", *batch)
        length = ("--steps", "4", *batch)
        rung = ("--steps", "8", "--cycle", "8+0", "--model", f"{extent.model},context_length={REHEARSED_CONTEXT}")
        fitted = ("--memory-limit", REHEARSED_LIMIT)
        small = {suite: ("--rungs", *rungs) for suite, rungs in REHEARSED_RUNGS.items()}

    def command(name: str, module: str, *flags: str, result: str) -> Step:
        run = Path(result).parts[1]
        command = ("-m", module, *flags, "--name", run)
        return Step(name, "command", settings, STEP_SECONDS, command, result, run)

    yield command("run", "train.run", *shared, *length, "--keep-checkpoints", "1", result="runs/best/result.json")
    # The knobs were decided above: the search is about the batch that fits, against all of them.
    yield command("search", "tune.search", *shared, *limit, *trial, result="runs/search/summary.md")
    yield command("grid", "tune.search", *shared, *limit, *trial, "--searcher", "grid", result="runs/grid/summary.md")
    yield command("ladder", "tune.ladder", "--suite", "a100", "--data", "tokens", "--fit-batch", *fitted, "--compare",
                  "study", *rung, *small.get("a100", ()), result="runs/a100/summary.md")  # fmt: skip
    for suite in ("kernels", "memory", "sizes"):
        yield command(f"ladder {suite}", "tune.ladder", "--suite", suite, "--data", "tokens", *rung,
                      *small.get(suite, ()), result=f"runs/{suite}/summary.md")  # fmt: skip
