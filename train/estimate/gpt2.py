"""The estimates of GPT-2, by formulas alone, without using a device."""

import math
from dataclasses import dataclass

from infra.errors import UserError
from train.config import HALF_PRECISIONS, Batch, Execution, Precision, Step
from train.estimate.breakdown import MemoryBreakdown
from train.estimate.gpt2_memory import predict_breakdown, published_activations
from train.estimate.gpt2_speed import launch_seconds, pass_seconds, predict_roofline
from train.estimate.gpu_rates import GpuRates
from train.model_config import ModelConfig


@dataclass(frozen=True)
class GPT2Estimates:
    """Predictions for a GPT-2."""

    model: ModelConfig

    def is_memory_known(self, step: Step) -> bool:
        """Return True, because formulas predict the memory."""
        return True

    def peak_bound(self, step: Step) -> float:
        """Return infinity, because the prediction needs no measurement."""
        return math.inf

    def predict_peak(self, step: Step) -> MemoryBreakdown:
        """Return the peak of ``step`` on one worker by part; see :func:`predict_breakdown`."""
        return predict_breakdown(self.model, step.batch, step.execution, step.optimization.optimizer)

    def activation_formula(self, micro_batch: int, precision: Precision) -> tuple[int, str]:
        """Return the bytes of the blocks' activations by the formula of Korthikanti et al., and the formula as a
        text."""
        factor = "" if precision in HALF_PRECISIONS else "2"
        text = f"{self.model.layers} x {factor}sbh(34 + 5as/h), Korthikanti et al. 2022"
        return published_activations(self.model, micro_batch, precision), text

    def roofline_speed(self, batch: Batch, execution: Execution, gpu_rates: GpuRates) -> float:
        """Return the tokens/s at the roofline of one GPU; see :func:`predict_roofline`."""
        return predict_roofline(self.model, batch, execution, gpu_rates)

    def is_launch_bound(self, batch: Batch, execution: Execution, gpu_rates: GpuRates) -> bool:
        """Return whether the launches of a micro-batch take longer than its kernels; see :func:`launch_seconds`."""
        try:
            seconds = pass_seconds(self.model, batch, execution, gpu_rates)
        except UserError:  # The formulas do not cover every setting.
            return False
        return launch_seconds(self.model, batch, execution) > seconds
