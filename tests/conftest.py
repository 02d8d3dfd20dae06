"""What tests of several packages share: small token shards that train fast on a CPU."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.shards import END_OF_TEXT, Manifest, ShardRow, write_shard
from train.config import ModelConfig

os.environ["RAY_AUTH_MODE"] = "token"  # before Ray is imported: what it does for a Ray of its own, but not to join one

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


@pytest.fixture(autouse=True)
def no_store_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow's fluent functions put their store into the environment, where the next test would find it."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")
    monkeypatch.delenv("MLFLOW_TRACKING_URI")


@pytest.fixture(scope="session")
def cluster() -> Iterator[str]:
    """The address of a Ray for tests to share whose point is not Ray's own start or end, which cost ten seconds."""
    hold = """
import sys, ray
from infra.cluster import connected
with connected(prestart=False):
    print(ray.get_runtime_context().gcs_address, flush=True)
    sys.stdin.read()
"""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    with subprocess.Popen(
        [sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as head:
        assert head.stdout is not None
        yield head.stdout.readline().strip()


@pytest.fixture
def shared_ray(cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands of this test, and what they start, join the shared Ray."""
    monkeypatch.setenv("RAY_ADDRESS", cluster)
