"""Training losses of a ladder's runs against tokens seen, and the band between the lowest and the highest control."""

import json
from collections.abc import Sequence
from pathlib import Path

from train.checkpoint.run_folder import RunFolder

Curve = list[tuple[int, float]]
"""Tokens seen and training loss, in nats per token, after every step."""


def loss_curve(folder: Path) -> Curve:
    """The curve of the run in ``folder``."""
    curve: Curve = []
    path = RunFolder(folder).cycles
    for cycle in map(json.loads, path.read_text(encoding="utf-8").splitlines() if path.exists() else ()):
        step_tokens = cycle["train_tokens"] // cycle["step"]
        first = cycle["step"] - len(cycle["step_losses"]) + 1
        curve += [(step_tokens * step, loss) for step, loss in enumerate(cycle["step_losses"], first)]
    return curve


def loss_at(folder: Path, tokens: int) -> float | None:
    """Mean training loss over the last fifth of the first ``tokens`` tokens, which rungs of any batch share."""
    chosen = [loss for seen, loss in loss_curve(folder) if 0.8 * tokens < seen <= tokens]
    return sum(chosen) / len(chosen) if chosen else None


def band(controls: Sequence[Curve]) -> list[tuple[int, float, float]]:
    """Tokens seen, and the lowest and the highest loss of the ``controls`` there, as far as all of them ran."""
    return [
        (points[0][0], min(loss for _, loss in points), max(loss for _, loss in points))
        for points in zip(*controls, strict=False)
    ]
