"""How far apart the points of a long curve are, so that a page opens as quickly for a long run as for a short one."""


def stride(position: int, dense: int) -> int:
    """The distance between points at ``position``: 1 for the first ``dense`` points, then doubled after each ``dense``.

    It depends on the position alone, so that a run that is continued has the same points. A curve of length n has
    about ``dense * log2(n / dense + 1)`` points.
    """
    return 1 << ((position // dense + 1).bit_length() - 1)
