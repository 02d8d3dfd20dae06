"""Entry: ``python -m train.generate`` continues a prompt with a trained model.

In: a checkpoint and a prompt. Out: text, sampled token by token. The whole context is computed again for
every token: a few hundred tokens are a check of a training, not a service.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from infra import command
from infra.command import UserError, console
from train.checkpoint import load_weights
from train.config import config_from_json
from train.execution import pick_device, plain
from train.folder import find_run
from train.loop import Trainer
from train.model import GPT
from train.progress import newest, read_progress
from train.result import RunResult
from train.text import is_gpt2, to_ids, to_text

SAMPLE_TOKENS = 64


@dataclass(frozen=True)
class GenerateConfig:
    """What to continue, and how."""

    checkpoint: str
    """A run's name, its folder, or one of its checkpoints' folders."""
    prompt: str = ""
    """Text to continue; without it a new book begins."""
    tokens: int = 100
    """Tokens to write."""
    temperature: float = 0.8
    """Divides the logits before sampling; 0 takes the likeliest token each time."""
    top_k: int = 200
    """Sample among this many likeliest tokens; 0 is all."""
    seed: int = 0
    """Seed of the sampling."""
    out: Path = Path("runs")
    """Folder that holds runs."""

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise UserError(f"--tokens {self.tokens} must be at least 1.")
        if not self.temperature >= 0:
            raise UserError(f"--temperature {self.temperature} must not be negative.")
        if self.top_k < 0:
            raise UserError(f"--top-k {self.top_k} must not be negative.")


def main() -> None:
    """Parse, generate, print, exit."""
    command.run(
        generate, GenerateConfig, module="train.generate", description="Continue a prompt with a trained model."
    )


def generate(config: GenerateConfig) -> int:
    """Print the continuation; returns the exit code."""
    model, vocabulary = load_model(find_checkpoint(config.checkpoint, config.out))
    if not is_gpt2(vocabulary):
        raise UserError(
            f"--checkpoint {config.checkpoint} was trained on ids that are not GPT-2's, so it writes no text."
        )
    ids = [model.config.vocabulary - 1, *to_ids(config.prompt)]  # a book begins behind the end of another
    written = sample(
        model, ids, config.tokens, temperature=config.temperature, top_k=config.top_k, seed=config.seed
    )  # fmt: skip
    console.print(config.prompt + to_text(written), markup=False)
    return 0


def find_checkpoint(text: str, out: Path) -> Path:
    """The checkpoint that ``--checkpoint`` names: itself, or a run's newest. Raises ``UserError``."""
    if (Path(text) / "progress.json").is_file():
        return Path(text)
    found = newest(find_run(text, out, flag="--checkpoint").checkpoints)
    if found is None:
        raise UserError(f"--checkpoint {text} has no checkpoint.")
    return found


def load_model(checkpoint: Path) -> tuple[GPT, str]:
    """The model of a checkpoint, ready to be asked, and its vocabulary's hash. Raises ``UserError``."""
    progress = read_progress(checkpoint)
    config = config_from_json(progress.config, str(checkpoint))
    device = pick_device(replace(config, device="auto"))
    model = plain(config).to(device)
    load_weights(checkpoint, model, device)
    return model, progress.vocabulary_sha256


@torch.no_grad()
def sample(
    model: GPT, ids: list[int], count: int, *, temperature: float = 0.8, top_k: int = 200, seed: int = 0
) -> list[int]:
    """``count`` token ids that follow ``ids``. Windows longer than the model's context lose their beginning."""
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
    """What a model writes at the end of its run; None where it cannot (shards of a model, ids that are no text)."""
    if result.outcome != "finished" or trainer.config.shard or not is_gpt2(trainer.data.manifest.vocabulary_sha256):
        return None
    with torch.device("meta"):
        model = plain(trainer.config)
    model.load_state_dict(trainer.model.state_dict(), assign=True)  # the weights themselves, not a copy
    return to_text(sample(model, [trainer.config.model.vocabulary - 1], SAMPLE_TOKENS))


if __name__ == "__main__":
    main()
