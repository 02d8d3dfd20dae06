"""The interface of callbacks, which Python programs pass to :func:`train.train` to follow or to stop a run."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn

    from train.config import Batch
    from train.result import CycleReport


@dataclass(frozen=True)
class TrainStep:
    """An optimizer step that the loop has launched."""

    step: int
    """Number of the step in the run, from 1."""
    loss: "Tensor"
    """Mean training loss of the step, a scalar on the device. Reading it, as by ``float(loss)``, waits for a GPU."""
    learning_rate: float
    """Learning rate of the step."""
    model: "nn.Module"
    """The model that is trained, with the weights after the step."""
    batch: "Batch"
    """The step's sequences, and their division into micro-batches."""
    context_length: int
    """Tokens per sequence."""


class Callback:
    """Methods that the training loop calls in its own process and thread. Override those that you need.

    A method that returns True stops the run after the current step: the last cycle is validated and reported, a
    checkpoint is saved, and the outcome of the run is ``finished``. An exception ends the run.
    """

    def on_step_end(self, step: TrainStep) -> bool | None:
        """Handle the end of an optimizer step; the loop waits for this method."""

    def on_cycle_end(self, report: "CycleReport") -> bool | None:
        """Handle the report of a cycle. It arrives one step later, so that the loop need not wait for the device."""
