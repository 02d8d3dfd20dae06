"""A long curve has few points: all of them at first, and never too far apart."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from infra.device.downsampling import sampling_interval


@given(length=st.integers(1, 3000), dense=st.integers(1, 50))
def test_a_thinned_curve_is_dense_at_first_and_stays_short(length: int, dense: int) -> None:
    shown = [point for point in range(1, length + 1) if point % sampling_interval(point, dense) == 0]
    assert shown[: dense - 1] == list(range(1, min(length, dense - 1) + 1))
    gaps = [after - before for before, after in pairwise([*shown, length])]
    assert all(gap <= 2 * (point / dense + 1) for point, gap in zip(shown, gaps, strict=True))
    doublings = (length // dense + 1).bit_length()
    assert len(shown) <= dense * doublings + doublings


def test_the_losses_of_a_million_steps_are_ten_thousand_points() -> None:
    counts = [
        sum(step % sampling_interval(step, 1000) == 0 for step in range(1, last + 1))
        for last in (999, 100_000, 1_000_000)
    ]
    assert counts == [999, 6577, 9954]
