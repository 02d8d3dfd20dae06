"""The lines about the length of a run, before it begins."""

from pathlib import Path

import pytest

from pipeline.shards import Manifest, read_manifest
from train.config import Cycle, ResolvedConfig
from train.reporting.duration import duration_lines


@pytest.fixture
def manifest(small_shards: Path) -> Manifest:
    return read_manifest(small_shards)


@pytest.mark.parametrize(
    ("settings", "expected_texts"),
    [
        ({"time_budget": 90.0}, ("1m30s", "validation", "checkpoints", "every 20s", "a tenth")),
        ({"steps": 8, "cycle": Cycle(4, 1)}, ("8 steps", "every 4 steps", "1 batch")),
        ({"steps": 8, "cycle": Cycle(None, 0, 60.0)}, ("every 1m", "without validation")),
        ({}, ("one epoch",)),
    ],
)  # fmt: skip
def test_the_length_says_what_is_in_it(
    small_shards: Path, manifest: Manifest, settings: dict[str, object], expected_texts: tuple[str, ...]
) -> None:
    config = ResolvedConfig.of(data=str(small_shards), micro_batch=1, global_batch=8, device="cpu", **settings)
    (line,) = duration_lines(config, manifest)
    assert all(text in line for text in expected_texts), line


def test_steps_of_many_epochs_are_announced(small_shards: Path, manifest: Manifest) -> None:
    config = ResolvedConfig.of(data=str(small_shards), micro_batch=1, global_batch=8, device="cpu")
    steps = 1 + 10 * manifest.splits["train"]["tokens"] // config.step_tokens
    length, warning = duration_lines(config.replace(steps=steps), manifest)
    assert "10 epochs" in length
    assert "10 epochs" in warning
