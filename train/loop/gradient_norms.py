"""Check of the gradient norms of all steps. One that is not finite makes the weights NaN, and has a cause."""

import math
from collections.abc import Sequence

MAX_SKIPPED_STEPS = 25
"""Maximum number of consecutive steps that loss scaling may skip. It halves its scale of 2^16 each time, so gradients
that are still not finite after so many steps have not overflowed."""
PLAIN = ("custom", "manual", "math")
"""Names of attention without a fused kernel."""


class NormCheck:
    """Finds the gradient norm that shows a fault. With ``skips_steps``, loss scaling skips steps that overflow."""

    def __init__(self, attention: str, *, skips_steps: bool) -> None:
        self._attention = attention
        self._max_consecutive = MAX_SKIPPED_STEPS if skips_steps else 0
        self._consecutive = 0

    def reason(self, first: int, losses: Sequence[float], norms: Sequence[float]) -> str | None:
        """Return why training must not continue after the steps that follow step ``first``; None if it may.

        Call it for each cycle in turn. A step whose loss is not finite either is left to the check of the losses. The
        reason names the attention kernel, because wrong gradients at a finite loss are most likely from its backward
        pass.
        """
        for step, (loss, norm) in enumerate(zip(losses, norms, strict=True), first + 1):
            if not math.isfinite(loss):
                return None
            self._consecutive = 0 if math.isfinite(norm) else self._consecutive + 1
            if self._consecutive > self._max_consecutive:
                count = f" and of {self._consecutive - 1} steps before it" if self._max_consecutive else ""
                advice = "" if self._attention in PLAIN else "; try another --attention"
                return f"the gradient norm is {norm} at step {step}{count} (attention kernel {self._attention}{advice})"
        return None
