"""What cannot be searched is one sentence, before Ray starts."""

from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.shards import read_manifest
from tune import search

MODEL = "tiny,layers=2,heads=2,width=32,context_length={length},vocab_size=257,padded_vocab_size=320"


@pytest.fixture
def flags(working_folder: Path, small_shards: Path) -> Callable[..., list[str]]:
    def flags(*knobs: str, length: int = 32) -> list[str]:
        return [
            "--objective", "loss", "--train-time", "2s", "--data", str(small_shards), "--device", "cpu",
            "--model", MODEL.format(length=length), "--global-batch", "4", "--knobs", *knobs,
        ]  # fmt: skip

    return flags


def test_data_without_a_held_out_window_are_named(
    refused: Callable[..., str], flags: Callable[..., list[str]], small_shards: Path
) -> None:
    longest = read_manifest(small_shards).longest_shard("val")
    text = refused(search.main, *flags("learning_rate=1e-3", length=longest))
    assert f"held-out window of {longest + 1:,} tokens" in text
    assert "--val-fraction" in text


@pytest.mark.parametrize(
    ("knob", "named"),
    [
        ("global_batch=100000000", "global-batch 100,000,000"),
        ("learning_rate=0", "learning-rate 0"),
        ("beta1=1.5", "beta1 1.5"),
        ("width=31", "width"),
        ("schedule=linear", "'linear'"),
    ],
)
def test_values_that_cannot_be_trained_are_named(
    refused: Callable[..., str], flags: Callable[..., list[str]], knob: str, named: str
) -> None:
    assert named in refused(search.main, *flags(knob))
