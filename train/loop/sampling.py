"""Text from a model: load the model of a checkpoint, and sample tokens one by one.

The whole context is recomputed for every token, which is fast enough for the few hundred tokens that check a training,
not for a service.
"""

from pathlib import Path

import torch
from torch import Tensor

from infra.errors import UserError
from infra.storage_dir import StorageDir
from pipeline.encoding import Vocabulary, vocabulary_at
from train.checkpoint.progress import damage, read_progress
from train.checkpoint.save import WEIGHTS, load_weights
from train.config import config_from_json
from train.loop.execution import plain
from train.loop.trainer import Trainer
from train.model.gpt import GPT
from train.result import RunResult

SAMPLE_TOKENS = 64


def load_model(checkpoint: Path) -> tuple[GPT, Vocabulary | None]:
    """The model of a checkpoint, in evaluation mode, and its vocabulary, if it has one."""
    progress = read_progress(checkpoint)
    config = config_from_json(progress.config, str(checkpoint))
    fault = damage(checkpoint, only=WEIGHTS)
    if fault:
        raise UserError(f"{checkpoint} is damaged: {fault}; name its run to use the newest intact checkpoint.")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = plain(config).to(device)
    load_weights(checkpoint, model, device)
    return model, vocabulary_at(StorageDir.of(checkpoint), progress.vocabulary_sha256)


@torch.no_grad()
def sample(
    model: GPT, ids: list[int], count: int, *, temperature: float = 0.8, top_k: int = 200, seed: int = 0
) -> list[int]:
    """``count`` token ids that follow ``ids``. A text longer than the model's context loses its beginning."""
    device = model.token_embedding.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    tokens = torch.tensor([ids], device=device)
    for _ in range(count):
        logits = model(tokens[:, -model.config.context_length :])[:, -1, : model.config.vocabulary].float()
        tokens = torch.cat([tokens, _choose(logits, temperature, top_k, generator)], dim=1)
    return tokens[0, len(ids) :].tolist()


def _choose(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> Tensor:
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    if top_k:
        least = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    return torch.multinomial((logits / temperature).softmax(dim=-1), 1, generator=generator)


def closing_sample(trainer: Trainer, result: RunResult) -> str | None:
    """Text that a model writes at the end of its run; None if it is sharded, or its ids have no vocabulary."""
    vocabulary = trainer.vocabulary
    if result.outcome != "finished" or trainer.config.shard or vocabulary is None:
        return None
    with torch.device("meta"):
        model = plain(trainer.config)
    model.load_state_dict(trainer.model.state_dict(), assign=True)  # the weights themselves, not a copy
    return vocabulary.decode(sample(model, [vocabulary.end_of_text], SAMPLE_TOKENS))
