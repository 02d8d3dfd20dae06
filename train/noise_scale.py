"""The gradient noise scale: the global batch above which more sequences per step hardly help (arXiv 1812.06162).

The simple noise scale is tr(S) / |G|^2, with the covariance S of the gradients of sequences and their mean G. Far below
this global batch, twice the batch needs half the steps; far above it, as many. Gradients of two batch sizes determine
it, and a step with accumulation has both: that of its first micro-batch and that of the whole step.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from infra.errors import UserError
from train.callbacks import Callback, TrainStep
from train.config import Batch
from train.intervals import Estimate, mean_ratio


def estimate_noise_scale(
    small_squares: Sequence[float], large_squares: Sequence[float], small: int, large: int
) -> Estimate:
    """Estimate the noise scale in sequences from squared gradient norms of steps, with its 95% interval.

    Args:
        small_squares: squared norm of the mean gradient of ``small`` sequences in each step.
        large_squares: squared norm of the mean gradient of ``large`` sequences in the same steps.
        small: sequences of the smaller batch.
        large: sequences of the larger batch.
    """
    pairs = list(zip(small_squares, large_squares, strict=True))
    traces = [(of_small - of_large) / (1 / small - 1 / large) for of_small, of_large in pairs]
    gradients = [(large * of_large - small * of_small) / (large - small) for of_small, of_large in pairs]
    return mean_ratio(traces, gradients)


class NoiseScale(Callback):
    """Estimates the noise scale in some steps of a run; needs an accumulation of at least 2.

    Only these steps are observed, by a hook of each parameter, whose norms stay on the device until the last of them.
    Training is not changed.

    Args:
        first: first step that is observed, at least 2. The noise scale grows while the loss falls, so that it is of
            little use before the warm-up has ended.
        steps: number of steps that are observed, at least 2.
    """

    def __init__(self, first: int = 20, steps: int = 20) -> None:
        if min(first, steps) < 2:
            raise UserError(f"The noise scale needs at least 2 steps, from step 2 on: NoiseScale({first}, {steps}).")
        self.first, self.steps = first, steps
        self._reset()

    def _reset(self) -> None:
        self._last_step = 0
        self._handles: list[RemovableHandle] = []
        self._micro_batches: dict[Tensor, int] = {}
        self._first_squares: dict[Tensor, Tensor] = {}
        self._whole_squares: dict[Tensor, Tensor] = {}
        self._observed: list[Tensor] = []
        self._batch: Batch | None = None
        self._context_length = 0

    @property
    def sequences(self) -> Estimate | None:
        """The noise scale in sequences; None if less than two steps were observed.

        The upper end is infinite if the mean gradient cannot be distinguished from zero.
        """
        if self._batch is None or len(self._observed) < 2:
            return None
        steps = torch.stack(self._observed).tolist()
        # A gradient that overflowed with the loss scale of fp16 was not used either.
        finite = [step for step in steps if all(map(math.isfinite, step))]
        if len(finite) < 2:
            return None
        small_squares, large_squares = zip(*finite, strict=True)
        return estimate_noise_scale(small_squares, large_squares, self._batch.micro_batch, self._batch.global_batch)

    @property
    def tokens(self) -> Estimate | None:
        """The noise scale in tokens."""
        sequences = self.sequences
        return sequences and Estimate(*(self._context_length * value for value in sequences))

    def on_step_end(self, step: TrainStep) -> None:
        if step.step <= self._last_step:  # The run began again with a smaller micro-batch.
            self._remove_hooks()
            self._reset()
        self._last_step = step.step
        if self._handles:
            self._end_observed_step()
        if len(self._observed) == self.steps:
            self._remove_hooks()
        elif not self._handles and step.step + 1 >= self.first:
            self._begin(step)

    def _begin(self, step: TrainStep) -> None:
        """Observe the steps from the next one on."""
        self._batch, self._context_length = step.batch, step.context_length
        if self._batch.accumulation < 2:
            raise UserError(
                f"The noise scale needs at least two micro-batches per step, and a micro-batch of "
                f"{self._batch.micro_batch} is the whole global batch. Use a smaller micro_batch."
            )
        parameters = [parameter for parameter in step.model.parameters() if parameter.requires_grad]
        self._handles = [parameter.register_post_accumulate_grad_hook(self._observe) for parameter in parameters]

    def _observe(self, parameter: Tensor) -> None:
        """Take the squared norm of a parameter's gradient after the first and the last micro-batch of a step."""
        assert self._batch is not None, "hooks are set once the batch is known"
        count = self._micro_batches[parameter] = self._micro_batches.get(parameter, 0) + 1
        if count == 1:
            self._first_squares[parameter] = _squared_norm(parameter)
        elif count == self._batch.accumulation:
            self._whole_squares[parameter] = _squared_norm(parameter)

    def _end_observed_step(self) -> None:
        """Add up the norms of the parameters that had a gradient in every micro-batch."""
        assert self._batch is not None, "hooks are set once the batch is known"
        whole = self._whole_squares
        if whole:
            # The loss of a micro-batch is divided by the accumulation before its backward pass.
            small = self._batch.accumulation**2 * torch.stack([self._first_squares[p] for p in whole]).sum()
            self._observed.append(torch.stack([small, torch.stack(list(whole.values())).sum()]))
        self._micro_batches, self._first_squares, self._whole_squares = {}, {}, {}

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []


def _squared_norm(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None, "the hook follows the accumulation of a gradient"
    return torch.linalg.vector_norm(parameter.grad, dtype=torch.float32).square()
