"""Entry: ``python -m train.generate`` continues a prompt with a trained model."""

from dataclasses import dataclass

from infra.cli import command
from infra.cli.console import console
from infra.cli.options import Checkpoint, Runs
from infra.cli.progress import status
from infra.errors import UserError
from train.config import config_from_json
from train.run_files.lookup import find_checkpoint
from train.run_files.progress import read_progress


@dataclass(frozen=True)
class GenerateConfig:
    """Continue a prompt with a trained model."""

    checkpoint: Checkpoint
    prompt: str = ""
    """Text to continue. By default the model starts a new book."""
    tokens: int = 100
    """Number of tokens to generate (at least 1)."""
    temperature: float = 0.8
    """Sampling temperature, by which logits are divided (0.000001 to 1000000, or 0: always the most likely token)."""
    top_k: int = 200
    """Number of most likely tokens to sample from (0: all)."""
    seed: int = 0
    """Seed of the sampling."""
    out: Runs = "runs"

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise UserError(f"--tokens {self.tokens} must be at least 1.")
        if self.temperature != 0 and not 1e-6 <= self.temperature <= 1e6:  # Other values make the logits overflow.
            raise UserError(f"--temperature {self.temperature} must be 0, or between 0.000001 and 1000000.")
        if self.top_k < 0:
            raise UserError(f"--top-k {self.top_k} must not be negative.")
        if abs(self.seed) >= 2**63:
            raise UserError(f"--seed {self.seed} must be below 2^63, the limit of torch's generators.")


def main() -> None:
    command.run(generate, GenerateConfig, module="train.generate")


def generate(config: GenerateConfig) -> int:
    """Print the continuation of a prompt, and return the exit code.

    torch is imported after the flags are checked, so that invalid flags are reported at once.
    """
    _, checkpoint = find_checkpoint(config.checkpoint, config.out)
    kind = config_from_json(read_progress(checkpoint).config, str(checkpoint)).model
    if not kind.has_logits:
        raise UserError(
            f"--checkpoint {config.checkpoint}: {kind.text} cannot generate text: forward(inputs, None) must "
            "return logits of shape (batch, time, vocab_size) for inputs of any length."
        )
    with status("loading the model"):
        from train.loop.sampling import SamplingParams, load_model, sample

        model, tokenizer = load_model(checkpoint)
    if tokenizer is None:
        raise UserError(
            f"--checkpoint {config.checkpoint} was trained on token ids without a tokenizer, so it cannot generate "
            "text. Train on shards of 'python -m pipeline.tokenize'."
        )
    # In training each book follows the end-of-text token of the previous one.
    ids = [tokenizer.end_of_text, *tokenizer.encode(config.prompt.encode(), "tiktoken").tolist()]
    with status("generating text"):
        sampling = SamplingParams(config.temperature, config.top_k, config.seed)
        generated = sample(model, kind, ids, config.tokens, sampling)
    console.print(config.prompt + tokenizer.decode(generated), markup=False)
    return 0


if __name__ == "__main__":
    main()
