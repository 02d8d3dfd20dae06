"""What the store of MLflow is asked for: how far the curves of a run go."""

import pytest

from infra.tracking.store import create_run, read_logged
from infra.tracking.tracker import Tracker


@pytest.mark.usefixtures("working_folder")
def test_a_curve_ends_at_its_highest_step_however_its_points_arrived() -> None:
    """Those that a store lacked while it was away are sent after later ones."""
    key = create_run("train", "one")
    with Tracker(key) as tracker:
        for step in (1, 5, 9):
            tracker.log_metrics({"loss/step": 2.0}, step)
        tracker.flush()
        for step in (3, 2):
            tracker.log_metrics({"loss/step": 3.0, "loss/val": 1.0}, step)
    assert read_logged(key).steps == {"loss/step": 9, "loss/val": 3}
