"""Generate text with a model: load it from a checkpoint, and sample tokens one by one.

The whole context is recomputed for every token, which is fast enough for the few hundred tokens that check a training,
not for a service.
"""

import math
from dataclasses import dataclass, replace
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
from train.loop.validation import unigram_loss
from train.model_config import ModelSpec
from train.result import RunResult
from train.run_files.checkpoint import WEIGHTS, load_weights
from train.run_files.progress import find_damage, read_progress

SAMPLE_TOKENS = 64

SAMPLE_FRACTION = 0.85
"""Loss below which a model's text is shown, as a fraction of the entropy of the training data's token frequencies.

Above it, a model draws words by their frequency or worse, and text from a random vocabulary can be offensive. One
symbol of context lowers the entropy of English to 0.86 of it (Shannon 1951, table 1: 4.14 and 3.56 bits per letter), so
a model below the fraction uses the words before. A fraction also suits small vocabularies and bytes."""


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


def closing_sample(trainer: Trainer, result: RunResult) -> RunResult:
    """Return ``result`` with the text that the model writes at the end of its run, or with the reason why it is noise.

    There is neither if the run has not finished, the model is sharded or gives no logits, or there is no tokenizer.
    """
    data, kind = trainer.data, trainer.config.model
    if result.outcome != "finished" or trainer.config.execution.fsdp or data.tokenizer is None or not kind.has_logits:
        return result
    if reason := noise_reason(result, unigram_loss(data.count_ids(kind.vocab_size))):
        return replace(result, no_sample_reason=reason)
    model = build_inference_model(kind, trainer.config.execution.mask_books, weights_of=trainer.model)
    ids = sample(model, kind, [data.tokenizer.end_of_text], SAMPLE_TOKENS, SamplingParams())
    return replace(result, sample=data.tokenizer.decode(ids))


def noise_reason(result: RunResult, frequency_loss: float) -> str:
    """Return why a sample would be noise, as a part of a sentence; empty if the loss is well below ``frequency_loss``.

    ``frequency_loss`` is the entropy of the token frequencies of the training data.
    """
    loss = result.val_loss if result.val_loss is not None else result.train_loss
    needed = SAMPLE_FRACTION * frequency_loss
    if loss is None or not needed < loss < math.inf:  # Sampling describes a loss that is no number.
        return ""
    return f"the loss of {loss:.2f} is not yet below {needed:.2f}; token frequencies alone give {frequency_loss:.2f}"
