"""How far apart the points of a long curve are, so that a page opens as quickly for a long run as for a short one."""


def sampling_interval(position: int, full_resolution_points: int) -> int:
    """The distance between points at ``position``: 1 for the first ``full_resolution_points`` points, then doubled
    after each ``full_resolution_points``.

    It depends on the position alone, so that a run that is continued has the same points. A curve of length n has
    about ``dense * log2(n / dense + 1)`` points.
    """
    return 1 << ((position // full_resolution_points + 1).bit_length() - 1)
