"""The curves that a ladder draws: by tokens, the band as far as every control ran, and short enough to be drawn."""

import itertools
import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from train.ladder.losses import MOST_POINTS, band, loss_curve, thinned


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


@given(st.integers(0, 20 * MOST_POINTS))
def test_a_long_curve_is_thinned_evenly_from_its_first_point(length: int) -> None:
    kept = thinned(range(length))
    assert len(kept) <= MOST_POINTS
    assert len(kept) > MOST_POINTS / 2 or len(kept) == length
    assert kept[:1] == [0][:length]
    assert len({after - before for before, after in itertools.pairwise(kept)}) <= 1
