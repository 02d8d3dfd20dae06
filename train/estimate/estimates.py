"""The predictions for all types of models. Each type has its estimates in its own file and an entry in ESTIMATES."""

from collections.abc import Callable
from typing import Any, Protocol

from train.config import Batch, Execution, Precision, Step
from train.estimate.breakdown import MemoryBreakdown
from train.estimate.custom import CustomModelEstimates
from train.estimate.gpt2 import GPT2Estimates
from train.estimate.gpu_rates import GpuRates
from train.model_config import ModelConfig, ModelSpec
from train.model_config.custom import CustomModel


class ModelEstimates(Protocol):
    """Predictions for a model."""

    def is_memory_known(self, step: Step) -> bool:
        """Return whether :meth:`predict_peak` needs no measurement."""
        ...

    def peak_bound(self, step: Step) -> float:
        """Return a generous bound on the peak of ``step`` in bytes, without a measurement; infinite if there is
        none."""
        ...

    def predict_peak(self, step: Step) -> MemoryBreakdown:
        """Return the peak of ``step`` on one worker by part."""
        ...

    def activation_formula(self, micro_batch: int, precision: Precision) -> tuple[int, str] | None:
        """Returns: (bytes of the blocks' activations as published, the formula as a text); None if none is known."""
        ...

    def roofline_speed(self, batch: Batch, execution: Execution, gpu_rates: GpuRates) -> float:
        """Return the tokens/s at the roofline of one GPU. Raises ``UserError`` if no formulas cover it."""
        ...

    def is_launch_bound(self, batch: Batch, execution: Execution, gpu_rates: GpuRates) -> bool:
        """Return whether launching a micro-batch's kernels one by one takes longer than the GPU computes them; False if
        no formulas cover it."""
        ...


ESTIMATES: dict[type[ModelSpec], Callable[[Any], ModelEstimates]] = {
    ModelConfig: GPT2Estimates,
    CustomModel: CustomModelEstimates,
}


def estimates_of(model: ModelSpec) -> ModelEstimates:
    """Return the estimates of ``model``."""
    return ESTIMATES[type(model)](model)
