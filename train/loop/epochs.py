"""Lines about the epochs of a run: when one begins, and before the run, if it will have many."""

from collections.abc import Callable

MANY_EPOCHS = 4
"""Number of epochs above which repeated data improve a model less and less (Muennighoff et al., arXiv 2305.16264)."""

LINE_SECONDS = 10.0
"""Minimum time between two lines about epochs, which a small data set passes quickly."""


def repetition_warning(length: str, epochs: float) -> str:
    """Return a warning that a run, whose ``length`` is a phrase, repeats its data often; empty if it does not."""
    if epochs <= MANY_EPOCHS:
        return ""
    return f"{length} is about {epochs:,.0f} epochs: the model sees each book that often. More books would help."


class Epochs:
    """Prints a line when a run begins an epoch after its first one.

    Args:
        windows: number of windows in an epoch; None if it is unknown, in which case nothing is printed.
        global_batch: number of windows of a step.
        on_line: called with a line.
        clock: returns the time in seconds.
        consumed: number of windows that the run has consumed.
    """

    def __init__(
        self,
        windows: int | None,
        global_batch: int,
        on_line: Callable[[str], object],
        clock: Callable[[], float],
        consumed: int = 0,
    ) -> None:
        self._windows, self._global_batch = windows, global_batch
        self._on_line, self._clock = on_line, clock
        self._epoch = max(0, consumed - 1) // windows if windows else 0
        self._printed_at = float("-inf")

    def begin_step(self, consumed: int, step: int) -> None:
        """Print a line if the step after ``step``, before which the run has ``consumed`` windows, begins an epoch."""
        if not self._windows:
            return
        epoch = (consumed + self._global_batch - 1) // self._windows
        if epoch > self._epoch and self._clock() - self._printed_at >= LINE_SECONDS:
            self._printed_at, self._epoch = self._clock(), epoch
            self._on_line(f"epoch {epoch + 1:,} begins at step {step + 1:,}")

    def announce_budget(self, steps: float) -> None:
        """Print a warning if a time budget, which is about ``steps`` steps, is many epochs."""
        epochs = steps * self._global_batch / self._windows if self._windows else 0.0
        if warning := repetition_warning("The time budget", epochs):
            self._on_line(warning)
