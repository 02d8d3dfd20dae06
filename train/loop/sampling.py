"""Generate text with a model: load it from a checkpoint, and sample tokens one by one.

The whole context is recomputed for every token, which is fast enough for the few hundred tokens that check a training,
not for a service.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from infra.errors import UserError
from infra.storage.directory import StorageDir
from pipeline.encoding.tokenizer import Tokenizer, load_from
from train.config import config_from_json
from train.loop.execution import build_inference_model
from train.loop.trainer import Trainer
from train.model_config import ModelSpec
from train.result import RunResult
from train.run_files.checkpoint import WEIGHTS, load_weights
from train.run_files.progress import find_damage, read_progress

SAMPLE_TOKENS = 64


@dataclass(frozen=True)
class SamplingParams:
    """Settings of the random choice of the next token."""

    temperature: float = 0.8
    """Divisor of the logits; 0 to choose the most likely token."""
    top_k: int = 200
    """Number of most likely tokens to sample from; 0 for all."""
    seed: int = 0


def load_model(checkpoint: Path) -> tuple[Any, Tokenizer | None]:
    """Return the model of a checkpoint, in evaluation mode, and its tokenizer, if it has one."""
    progress = read_progress(checkpoint)
    config = config_from_json(progress.config, str(checkpoint))
    fault = find_damage(checkpoint, file_name=WEIGHTS)
    if fault:
        raise UserError(
            f"{checkpoint} is damaged: {fault}. Use the name of its run to load the newest intact checkpoint."
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build_inference_model(config.model, config.execution.mask_books).to(device)
    load_weights(checkpoint, model, device)
    return model, load_from(StorageDir.of(checkpoint), progress.tokenizer_sha256)


@torch.no_grad()
def sample(
    model: nn.Module,
    kind: ModelSpec,
    ids: list[int],
    count: int,
    sampling: SamplingParams,
) -> list[int]:
    """Return ``count`` token ids that follow ``ids``. A text longer than the model's context loses its beginning.

    Raises ``UserError`` when the model gives no probabilities.
    """
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(sampling.seed)
    tokens = torch.tensor([ids], device=device)
    for _ in range(count):
        logits = model(tokens[:, -kind.context_length :], None)[:, -1, : kind.vocab_size].float()
        if not torch.isfinite(logits.logsumexp(dim=-1)).all():
            raise UserError(
                "The model returns logits that are infinite or NaN in evaluation mode. Check its forward pass after "
                "model.eval(), or resume from a checkpoint before it diverged."
            )
        tokens = torch.cat([tokens, _choose(logits, sampling, generator)], dim=1)
    return tokens[0, len(ids) :].tolist()


def _choose(logits: Tensor, sampling: SamplingParams, generator: torch.Generator) -> Tensor:
    if sampling.temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    if sampling.top_k:
        threshold = logits.topk(min(sampling.top_k, logits.size(-1))).values[:, -1:]
        logits = logits.masked_fill(logits < threshold, float("-inf"))
    return torch.multinomial((logits / sampling.temperature).softmax(dim=-1), 1, generator=generator)


def closing_sample(trainer: Trainer, result: RunResult) -> str | None:
    """Return the text that a model writes at the end of its run; None if it is sharded, gives no logits, or has no
    tokenizer."""
    tokenizer, kind = trainer.data.tokenizer, trainer.config.model
    if result.outcome != "finished" or trainer.config.execution.fsdp or tokenizer is None or not kind.has_logits:
        return None
    model = build_inference_model(trainer.config.model, trainer.config.execution.mask_books, weights_of=trainer.model)
    return tokenizer.decode(sample(model, kind, [tokenizer.end_of_text], SAMPLE_TOKENS, SamplingParams()))
