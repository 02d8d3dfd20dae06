"""FLOPs by named formulas, because an MFU means nothing without its formula.

FLOPs are per token, forward and backward. A multiplication and an addition are two FLOPs; the backward pass costs twice
as much as the forward pass.
"""

from dataclasses import dataclass, replace

from infra.ceilings import read_matmul_rate
from infra.storage.directory import StorageDir
from train.config import Checkpointing, Precision
from train.custom_model import CustomModel
from train.model_config import AnyModel, ModelConfig
from train.models.gpt2 import parameter_count
from train.result import RunResult


@dataclass(frozen=True)
class Formula:
    """A formula for FLOPs per token, with its source and value."""

    name: str
    text: str
    flops: float


def parameters(model: AnyModel) -> int:
    """Number of parameters of ``model``."""
    return model.model_info.parameters if isinstance(model, CustomModel) else parameter_count(model)


def formulas(model: AnyModel) -> list[Formula]:
    """FLOPs per token of ``model`` by all formulas; the first one defines MFU."""
    if isinstance(model, CustomModel):
        text = "3 x the forward pass, counted by torch.utils.flop_counter"
        return [Formula("counted", text, model.model_info.flops_per_token)]
    text = "6 x matmul parameters + 12 x layers x context x width (arXiv 2204.02311, appendix B)"
    checkpointed = hardware_flops(model, recomputed=model.layers)
    return [
        Formula("PaLM", text, palm_flops(model)),
        Formula("causal", "6 x matmul parameters + 6 x layers x context x width", causal_flops(model)),
        Formula("6N", "6 x all parameters (arXiv 2001.08361, section 2.1)", 6.0 * parameter_count(model)),
        Formula("hardware, checkpointed", "PaLM + a second forward pass of the blocks", checkpointed),
    ]


def model_flops_per_token(model: AnyModel) -> float:
    """FLOPs per token of ``model``, by the first of its :func:`formulas`."""
    return formulas(model)[0].flops


def min_flops_per_token(model: AnyModel) -> float:
    """Minimum FLOPs per token of any kernels; up to half of a custom model's may be attention that is causal."""
    return model_flops_per_token(model) / 2 if isinstance(model, CustomModel) else causal_flops(model)


def executed_flops_per_token(model: AnyModel, checkpointing: Checkpointing) -> float:
    """FLOPs per token that the device executes; for a custom model without recomputation."""
    if isinstance(model, CustomModel):
        return model_flops_per_token(model)
    return hardware_flops(model, recomputed=recomputed_blocks(model, checkpointing))


def matmul_parameters(model: ModelConfig) -> int:
    """Parameters in matrix products: the blocks' matrices and the head with its padded vocabulary.

    Embeddings are looked up and not multiplied. A tied head is multiplied once.
    """
    return model.layers * 12 * model.width**2 + model.padded_vocab_size * model.width


def palm_flops(model: ModelConfig) -> float:
    """Model FLOPs per token by PaLM's formula (arXiv 2204.02311, appendix B), which counts attention as not causal."""
    return 6 * matmul_parameters(model) + 12 * model.layers * model.context_length * model.width


def causal_flops(model: ModelConfig) -> float:
    """Model FLOPs per token with causal attention, half of PaLM's (FlashAttention-2, arXiv 2307.08691, section 4)."""
    return 6 * matmul_parameters(model) + 6 * model.layers * model.context_length * model.width


def hardware_flops(model: ModelConfig, *, recomputed: int) -> float:
    """FLOPs per token that the device executes if the forward pass of ``recomputed`` blocks runs twice.

    If all blocks are recomputed, this is known as 8N instead of 6N (Korthikanti et al., arXiv 2205.05198, appendix A).
    The head is not recomputed.
    """
    block = 2 * 12 * model.width**2 + 4 * model.context_length * model.width
    return palm_flops(model) + recomputed * block


def recomputed_blocks(model: AnyModel, checkpointing: Checkpointing) -> int:
    """Number of blocks whose matrix products and attention are recomputed; selective checkpointing stores theirs.

    0 for a custom model, because the FLOPs of its blocks are unknown.
    """
    if isinstance(model, CustomModel):
        return 0
    layers = model.layers
    return {"full": layers, "alternate": (layers + 1) // 2}.get(checkpointing, 0)


def with_matmul_efficiency(result: RunResult, precision: Precision, workers: int, out: StorageDir) -> RunResult:
    """``result`` with its FLOP/s as a fraction of the matmul rate in the doctor's file in ``out``."""
    rate = read_matmul_rate(out, result.device, precision, result.machine)
    if not rate or not result.flops_per_second:
        return result
    return replace(result, matmul_utilisation=result.flops_per_second / (rate * workers))


def utilization(tokens_per_second: float, flops_per_token: float, peak: float | None, devices: int) -> float | None:
    """Fraction of ``peak`` (FLOP/s of one device) that training uses; None if the peak is unknown."""
    return tokens_per_second * flops_per_token / (peak * devices) if peak else None
