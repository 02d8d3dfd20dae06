"""What tests of several packages share: small token shards that train fast on a CPU."""

from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.shards import END_OF_TEXT, Manifest, ShardRow, write_shard
from train.config import ModelConfig

SMALL_VOCABULARY = 257
"""GPT-2's own 50,257 make the head 97% of a small model's work; tests of the loop do without."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def write_small_shards(folder: Path, *, books: int = 12, tokens: int = 4000, seed: int = 0) -> Path:
    """A data set of ``books`` books of repetitive text over 256 ids, in two training shards and one for validation."""
    random = np.random.default_rng(seed)
    rows = []
    for number in range(books):
        words = [random.integers(0, 256, 5) for _ in range(20)]
        text = np.concatenate([words[i] for i in random.integers(0, len(words), tokens // 5)])
        stream = np.append(text, SMALL_VOCABULARY - 1).astype(np.uint16)
        rows.append(ShardRow(f"book-{number}", f"Book {number}", None, "en", "made", "0" * 64, len(text), stream))
    assert END_OF_TEXT >= SMALL_VOCABULARY
    shards = [
        write_shard(folder, "train/00000.arrow", "train", rows[: books // 2]),
        write_shard(folder, "train/00001.arrow", "train", rows[books // 2 : -1]),
        write_shard(folder, "val/00000.arrow", "val", rows[-1:]),
    ]
    Manifest.of(shards, config={}, vocabulary_sha256="small", inputs={}, report={}).write(folder)
    return folder


@pytest.fixture(scope="session")
def small_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token shards for :data:`small_model`."""
    return write_small_shards(tmp_path_factory.mktemp("small-shards"))


@pytest.fixture(scope="session")
def small_model() -> ModelConfig:
    """A two-layer model whose step takes milliseconds on a CPU."""
    return ModelConfig(
        layers=2, heads=2, width=32, context_length=32, vocabulary=SMALL_VOCABULARY, padded_vocabulary=320
    )
