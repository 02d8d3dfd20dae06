"""The curves that a ladder draws: by tokens, and the band as far as every control ran."""

import json
from pathlib import Path

from train.ladder.losses import band, loss_curve


def test_a_curve_is_by_tokens_and_a_run_that_failed_has_none(tmp_path: Path) -> None:
    cycles = [
        {"step": 2, "step_losses": [9.0, 8.0], "train_tokens": 64},
        {"step": 3, "step_losses": [7.5], "train_tokens": 96},
    ]
    (tmp_path / "cycles.jsonl").write_text("".join(json.dumps(cycle) + "\n" for cycle in cycles))
    assert loss_curve(tmp_path) == [(32, 9.0), (64, 8.0), (96, 7.5)]
    assert loss_curve(tmp_path / "failed") == []


def test_the_band_ends_with_the_shortest_control() -> None:
    controls = [[(10, 5.0), (20, 4.0), (30, 3.0)], [(10, 5.5), (20, 3.5)], [(10, 4.5), (20, 3.75)]]
    assert band(controls) == [(10, 4.5, 5.5), (20, 3.5, 4.0)]
    assert band([]) == []
