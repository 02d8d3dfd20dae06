"""The picture of a run: every step behind the means of the cycles."""

from pathlib import Path

import pytest
from matplotlib.image import imread

from train.reporting.charts import draw_curves
from train.run_files.run_folder import RunFolder


def folder_with(path: Path, cycles: list[tuple[int, int, float | None]]) -> RunFolder:
    """The folder of a run with these cycles: the last step, the number of steps, the validation loss."""
    folder = RunFolder(path)
    for step, steps, val_loss in cycles:
        folder.append_cycle({
            "step": step, "train_tokens": 1024 * step, "train_loss": 5.0, "val_loss": val_loss,
            "step_losses": [5.0 + number / 10 for number in range(steps)], "cycle_tokens": 1024 * steps,
            "cycle_seconds": 2.0,
        })  # fmt: skip
    return folder


@pytest.mark.parametrize(
    ("cycles", "is_drawn"),
    [
        ([], False),
        ([(1, 1, None)], False),
        ([(3, 3, None)], True),  # a run that ended in its first cycle
        ([(10, 10, 5.5), (20, 10, None)], True),
        ([(30, 10, 5.5)], True),  # the log of a run that continued elsewhere begins later
    ],
)
def test_a_run_of_two_steps_has_a_picture(
    tmp_path: Path, cycles: list[tuple[int, int, float | None]], is_drawn: bool
) -> None:
    folder = folder_with(tmp_path, cycles)
    draw_curves(folder, "Loss and speed of tiny", "cpu", 1000, step_tokens=1024)
    assert folder.curves.exists() == is_drawn
    if is_drawn:
        height, width, _ = imread(folder.curves).shape
        assert width > height > 500


@pytest.mark.parametrize("cycles", [[], [(10, 10, 5.5)]])
def test_an_interrupted_run_shows_the_steps_after_its_last_cycle(
    tmp_path: Path, cycles: list[tuple[int, int, float | None]]
) -> None:
    """Also if it has no cycle."""
    folder = folder_with(tmp_path, cycles)
    draw_curves(folder, "Loss of tiny", "cpu", 12, step_tokens=1024, unreported_losses=[5.5, 5.4])
    assert folder.curves.exists()
