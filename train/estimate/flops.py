"""Arithmetic by named formulas, because "MFU" is meaningless without its formula.

FLOPs are per token, forward and backward. A multiplication and an addition are two FLOPs; the backward pass costs twice
as much as the forward pass.
"""

from dataclasses import dataclass, replace

from infra.doctor.ceilings import read_matmul_rate
from infra.storage_dir import StorageDir
from train.config import TrainConfig
from train.custom_model import CustomModel
from train.model.gpt import parameter_count
from train.model_config import ModelConfig
from train.result import RunResult


@dataclass(frozen=True)
class Formula:
    """A way to count FLOPs per token, with its source."""

    name: str
    text: str
    flops: float


def parameters(config: TrainConfig) -> int:
    model = config.model
    return model.looked_at.parameters if isinstance(model, CustomModel) else parameter_count(model)


def formulas(config: TrainConfig) -> list[Formula]:
    """Every count of FLOPs per token of a resolved ``config``'s model: first the one that MFU is of."""
    model = config.model
    if isinstance(model, CustomModel):
        return [Formula("counted", COUNTED, model.looked_at.flops_per_token)]
    everything = hardware(model, recomputed=model.layers)
    return [
        Formula("PaLM", FLOPS_FORMULA, palm(model)),
        Formula("causal", "6 x matmul parameters + 6 x layers x context x width", causal(model)),
        Formula("6N", "6 x all parameters (arXiv 2001.08361, section 2.1)", 6.0 * parameter_count(model)),
        Formula("hardware, checkpointed", "PaLM + the blocks' forward again", everything),
    ]


def per_token(config: TrainConfig) -> float:
    """Model FLOPs per token of a resolved ``config``, by the first of its :func:`formulas`."""
    return formulas(config)[0].flops


def least(config: TrainConfig) -> float:
    """FLOPs per token that no kernel can do without: of a custom model half of them could be attention's."""
    return per_token(config) / 2 if isinstance(config.model, CustomModel) else causal(config.model)


def executed(config: TrainConfig) -> float:
    """FLOPs per token that the device executes; of a custom model what is computed again is not counted."""
    if isinstance(config.model, CustomModel):
        return per_token(config)
    return hardware(config.model, recomputed=recomputed_blocks(config))


def matmul_parameters(model: ModelConfig) -> int:
    """Parameters that every token is multiplied by: the blocks' matrices and the head, at its padded size.

    Embeddings are looked up, not multiplied; a tied head is multiplied once.
    """
    return model.layers * 12 * model.width**2 + model.padded_vocabulary * model.width


def palm(model: ModelConfig) -> float:
    """Model FLOPs per token by PaLM (arXiv 2204.02311, appendix B): attention counted as if it were not causal."""
    return 6 * matmul_parameters(model) + 12 * model.layers * model.context_length * model.width


def causal(model: ModelConfig) -> float:
    """The same with the half of attention that causality leaves (FlashAttention-2, arXiv 2307.08691, section 4)."""
    return 6 * matmul_parameters(model) + 6 * model.layers * model.context_length * model.width


def hardware(model: ModelConfig, *, recomputed: int) -> float:
    """FLOPs per token that the device executes, where the forward pass of ``recomputed`` blocks runs twice.

    With all of them known as 8N instead of 6N (Korthikanti et al., arXiv 2205.05198, appendix A); the head is not
    recomputed.
    """
    block = 2 * 12 * model.width**2 + 4 * model.context_length * model.width
    return palm(model) + recomputed * block


def recomputed_blocks(config: TrainConfig) -> int:
    """Blocks whose matrix products and attention are computed again; selective checkpointing keeps their results.

    0 for a custom model, the arithmetic of whose blocks is not known.
    """
    if isinstance(config.model, CustomModel):
        return 0
    layers = config.model.layers
    return {"full": layers, "alternate": (layers + 1) // 2}.get(config.checkpointing, 0)


def with_matmul_efficiency(result: RunResult, config: TrainConfig, out: StorageDir) -> RunResult:
    """``result`` with its FLOP/s as a fraction of the matmul rate that the doctor saved in ``out``."""
    rate = read_matmul_rate(out, result.device, config.precision, result.machine)
    if not rate or not result.flops_per_second:
        return result
    return replace(result, matmul_utilisation=result.flops_per_second / (rate * config.workers))


def utilisation(tokens_per_second: float, flops_per_token: float, peak: float | None, devices: int) -> float | None:
    """Fraction of ``peak`` (FLOP/s of one device) that training uses; None where no peak is known."""
    return tokens_per_second * flops_per_token / (peak * devices) if peak else None


COUNTED = "3 x the forward pass as torch.utils.flop_counter counts it"
FLOPS_FORMULA = "6 x matmul parameters + 12 x layers x context x width (arXiv 2204.02311, appendix B)"
