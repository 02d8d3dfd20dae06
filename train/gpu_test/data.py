"""Token shards of random text, on which the GPU test trains without the user's data."""

from pathlib import Path

import numpy as np

from pipeline.shards import Manifest, ShardRow, write_shard
from train.config import ResolvedConfig
from train.data.source import TrainingData
from train.data.sources import source_of


def write_random_shards(folder: Path, vocab_size: int, tokens: int) -> None:
    """Write ``tokens`` of text whose frequencies fall as those of words do, by a fixed seed."""
    random = np.random.default_rng(0)
    text = np.minimum(random.zipf(1.2, tokens), vocab_size) - 1
    row = ShardRow("random", "Random tokens", None, "en", "made", "0" * 64, tokens, text.astype(np.uint16))
    shards = [write_shard(folder, "train/000000-000.arrow", "train", [row])]
    Manifest.of(shards, config={}, tokenizer_sha256="", inputs={}, report={}).write(folder)


def open_random_data(folder: Path, config: ResolvedConfig) -> TrainingData:
    """Write the data of all steps of ``config`` to ``folder``, which it names, and open it."""
    assert config.total_steps, "the test trains a number of steps"
    write_random_shards(folder, config.model.vocab_size, config.step_tokens * (config.total_steps + 1) + 1)
    return source_of(config.dataset).open(config.model, config.batch, config.duration.cycle)
