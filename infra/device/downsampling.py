"""Downsampling of long curves, so that MLflow opens a long run's page as quickly as a short run's."""


def sampling_interval(position: int, full_resolution_points: int) -> int:
    """Return the distance between points at ``position``: 1 at first, and doubled after each
    ``full_resolution_points`` points.

    The distance only depends on the position, so that a resumed run has the same points. A curve of length n has about
    ``f * log2(n / f + 1)`` points, where f is ``full_resolution_points``.
    """
    return 1 << ((position // full_resolution_points + 1).bit_length() - 1)
