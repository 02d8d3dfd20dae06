"""Validation: every held-out window once, at any micro-batch and number of workers."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trainers import make_trainer

from pipeline.encoding.tokenizer import GPT2_SHA256, gpt2
from pipeline.shards import Manifest, ShardRow, Split, write_shard
from train.config import Cycle, ResolvedConfig
from train.data.loader import BatchLoader, WorkerShare
from train.data.windows import Windows
from train.loop.validation import Text, ValidationPasses, bits_per, id_counts, mean_loss, unigram_loss
from train.model_config import ModelConfig

CPU = torch.device("cpu")


@settings(max_examples=200, deadline=None)
@given(count=st.integers(1, 200), micro=st.sampled_from([1, 2, 3, 7, 8, 12, 60, 64]), workers=st.integers(1, 4))
def test_each_window_counts_once(count: int, micro: int, workers: int) -> None:
    """With the loss of a window its number, as a batch loader reads it, which begins to read one batch too many."""
    windows = Windows([np.arange(4 * count + 1, dtype=np.uint16)], 4, seed=3)
    passes = ValidationPasses(windows, count, micro, workers)
    totals, seen = np.zeros(len(passes)), np.zeros(count)
    for rank in range(workers):
        loader = BatchLoader(passes, WorkerShare(passes.batch, rank=rank), CPU)
        for index, weight in enumerate(passes.weights(rank)):
            numbers = loader.next()[0][:, 0].numpy() // 4
            assert len(numbers) == micro
            totals[index] += weight * numbers.mean() / workers
            seen += weight * np.bincount(numbers, minlength=count)
    assert seen == pytest.approx(np.ones(count))
    config = ResolvedConfig.of(micro_batch=micro, global_batch=micro * workers, workers=workers)
    assert mean_loss(totals.tolist(), count, config.batch) == pytest.approx((count - 1) / 2)


def test_few_passes_read_what_does_not_fill_a_batch() -> None:
    """53 windows at micro-batches that divide often: the rest of them is in as few sizes as their divisors allow."""
    windows = Windows([np.zeros(4 * 53 + 1, dtype=np.uint16)], 4, seed=0)
    assert {micro: len(ValidationPasses(windows, 53, micro, 1)) for micro in (1, 8, 60, 53)} == {
        1: 53,
        8: 8,
        60: 3,
        53: 1,
    }


@pytest.fixture
def config(make_shards: Callable[..., Path], small_model: ModelConfig, tmp_path: Path) -> ResolvedConfig:
    """The validation split has 53 windows of 32 tokens, which no micro-batch but 1 and 53 divides."""
    return ResolvedConfig.of(
        data=str(make_shards(tmp_path / "tokens", books=3, tokens=53 * 32 + 4)), model=small_model, micro_batch=4,
        global_batch=60, precision="fp32", device="cpu", steps=1, cycle=Cycle(1, 10), keep_checkpoints=0,
    )  # fmt: skip


def test_the_loss_is_that_of_the_whole_split_whatever_the_micro_batch(config: ResolvedConfig) -> None:
    """The plain and the fused loss, and a second run with another seed's order of the training windows."""
    trainers = [
        make_trainer(config.replace(micro_batch=micro, loss=loss))
        for micro, loss in ((1, "plain"), (4, "plain"), (60, "plain"), (20, "fused"))
    ]
    results = [trainer.run() for trainer in trainers]
    assert [result.val_tokens for result in results] == [53 * 32] * 4
    losses = [result.val_loss for result in results]
    assert losses == pytest.approx([losses[0]] * 4, abs=2e-6)
    windows = trainers[0].data.validation
    assert windows
    rows = np.empty((53, 33), np.int64)
    windows.read(np.arange(53), rows)
    batch = torch.from_numpy(rows)
    with torch.no_grad():
        expected = trainers[0].model.eval()(batch[:, :-1], batch[:, 1:]).item()
    assert losses[0] == pytest.approx(expected, abs=2e-6)


def test_runs_with_different_seeds_validate_on_the_same_windows(config: ResolvedConfig) -> None:
    def windows(seed: int) -> list[int]:
        held_out = make_trainer(
            config.replace(seed=seed, cycle=Cycle(1, 1), micro_batch=10, global_batch=10)
        ).data.validation
        assert held_out
        return held_out.window_ids(np.arange(10)).tolist()

    assert windows(0) == windows(1)


def test_bits_are_of_the_text_that_was_read() -> None:
    """Tokens of one and of several bytes, a letter in two tokens, and the end of a book, which is no text."""
    tokenizer = gpt2()
    ids = tokenizer.encode("Once upon a time, 🦜 naïve".encode())
    stream = np.concatenate([ids[:1], ids, [tokenizer.end_of_text], ids]).astype(np.uint16)
    windows = Windows([stream], len(ids) + 1, seed=0)
    text = "Once upon a time, 🦜 naïve"
    counts = id_counts(windows, 1, len(tokenizer))
    assert Text.of(counts, tokenizer) == Text(len(ids) + 1, len(text.encode()), len(text))
    assert unigram_loss(np.array([2, 0, 1, 1])) == pytest.approx(1.5 * math.log(2))
    assert bits_per(2.0, 10, 4) == pytest.approx(2 * 1.442695 * 10 / 4)
    assert bits_per(2.0, 10, 0) is None


def test_bits_are_those_of_the_validation_split_and_not_of_the_training_split(
    small_model: ModelConfig, tmp_path: Path
) -> None:
    """Training text has long tokens, and the held-out text, a tenth as much of it, letters of one and of two bytes."""
    tokenizer = gpt2()
    held_out = " x q z é j ü" * 32
    texts: dict[Split, str] = {"train": " government international development" * 300, "val": held_out}
    shards = []
    for split, text in texts.items():
        ids = np.append(tokenizer.encode(text.encode()), tokenizer.end_of_text).astype(np.uint16)
        row = ShardRow(split, split, None, "en", "made", "0" * 64, len(text), ids)
        shards.append(write_shard(tmp_path, f"{split}/000000-000.arrow", split, [row]))
    Manifest.of(shards, config={}, tokenizer_sha256=GPT2_SHA256, inputs={}, report={}).write(tmp_path)
    model = replace(small_model, context_length=8, vocab_size=50257, padded_vocab_size=50257)
    result = make_trainer(
        ResolvedConfig.of(
            data=str(tmp_path),
            model=model,
            micro_batch=4,
            global_batch=4,
            precision="fp32",
            device="cpu",
            steps=1,
            cycle=Cycle(1, 100),
            keep_checkpoints=0,
        )
    ).run()
    tokens = len(tokenizer.encode(held_out.encode()))
    assert tokens % 8 == 0, "so that all but the first are predicted, and the end of the book"
    assert result.val_tokens == tokens
    assert result.val_loss
    bits, text = result.val_loss / math.log(2) * tokens, held_out.removeprefix(" x")
    assert result.val_bits_per_byte == pytest.approx(bits / len(text.encode()), rel=1e-6)
    assert result.val_bits_per_character == pytest.approx(bits / len(text), rel=1e-6)
    counts = np.unique(np.append(tokenizer.encode(held_out.encode()), tokenizer.end_of_text)[1:], return_counts=True)[1]
    assert result.unigram_loss == pytest.approx(-(counts / tokens * np.log(counts / tokens)).sum())


def test_a_split_of_one_window_is_validated_on_once(
    config: ResolvedConfig, make_shards: Callable[..., Path], tmp_path: Path
) -> None:
    """35 tokens in each shard, of which 33 are a window, at a batch of two."""
    data = make_shards(tmp_path / "one", books=3, tokens=35)
    trainer = make_trainer(config.replace(data=str(data), micro_batch=2, global_batch=2))
    assert trainer.data.validation
    assert trainer.data.validation.count == 1
    result = trainer.run()
    assert result.val_tokens == 32
    rows = np.empty((1, 33), np.int64)
    trainer.data.validation.read(np.arange(1), rows)
    batch = torch.from_numpy(rows)
    with torch.no_grad():
        expected = trainer.model.eval()(batch[:, :-1], batch[:, 1:]).item()
    assert result.val_loss == pytest.approx(expected, rel=1e-6)
