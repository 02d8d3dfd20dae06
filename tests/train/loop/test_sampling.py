"""Text from a model: what is sampled, and the sample that closes a run."""

import dataclasses
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from trainers import make_trainer

from infra.errors import UserError
from pipeline.encoding.tokenizer import GPT2_SHA256, gpt2
from pipeline.shards import Shard
from train.config import Cycle, ResolvedConfig
from train.data.windows import MAX_COUNTED_TOKENS, count_ids
from train.loop.execution import build_inference_model
from train.loop.sampling import SAMPLE_TOKENS, SamplingParams, closing_sample, load_model, noise_reason, sample
from train.loop.validation import unigram_loss
from train.model_config import ModelConfig
from train.models.gpt2 import GPT
from train.result import RunResult


@pytest.fixture(scope="module")
def gpt2_shards(small_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small shards as if their ids were GPT-2's, of which they hold the first 256."""
    folder = Path(shutil.copytree(small_shards, tmp_path_factory.mktemp("gpt2") / "tokens"))
    manifest = folder / "manifest.json"
    text = manifest.read_text()
    assert '"tokenizer_sha256": "small"' in text
    manifest.write_text(text.replace('"tokenizer_sha256": "small"', f'"tokenizer_sha256": "{GPT2_SHA256}"'))
    return folder


@pytest.fixture
def config(gpt2_shards: Path) -> ResolvedConfig:
    model = ModelConfig(layers=1, heads=1, width=16, context_length=32, dropout=0.1)
    return ResolvedConfig.of(
        data=str(gpt2_shards), model=model, global_batch=2, micro_batch=2, steps=3, cycle=Cycle(3, 0), precision="fp32",
        device="cpu", learning_rate=1e-2, warmup_steps=0,
    )  # fmt: skip


def test_a_finished_run_writes_the_beginning_of_a_book(config: ResolvedConfig, tmp_path: Path) -> None:
    """By its own last weights, which another process finds in its checkpoint, and without dropout."""
    trainer = make_trainer(config, checkpoints=tmp_path)
    result = trainer.run()
    initial_weights = {name: value.data_ptr() for name, value in trainer.model.state_dict().items()}
    result = replace(result, train_loss=0.0)
    written = closing_sample(trainer, result).sample
    assert result.checkpoint
    model, _ = load_model(Path(result.checkpoint))
    assert written == gpt2().decode(
        sample(model.cpu(), model.config, [gpt2().end_of_text], SAMPLE_TOKENS, SamplingParams())
    )
    untrained = build_inference_model(config.model, config.execution.mask_books)
    assert written != gpt2().decode(
        sample(untrained, untrained.config, [gpt2().end_of_text], SAMPLE_TOKENS, SamplingParams())
    )
    assert trainer.model.training, "the trained model stays as it is"
    assert {name: value.data_ptr() for name, value in trainer.model.state_dict().items()} == initial_weights


def test_a_model_that_has_learnt_a_sentence_closes_with_it(config: ResolvedConfig) -> None:
    """A model made by hand, whose head gives at each position the next token of a text."""
    sentence = gpt2().tiktoken.encode_ordinary("It was the best of times, it was the worst of times")
    ids = (sentence * SAMPLE_TOKENS)[:SAMPLE_TOKENS]
    config = config.replace(model=dataclasses.replace(config.model, tied=False, width=64, context_length=64), steps=1)
    trainer = make_trainer(config)
    result = trainer.run()
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.zero_()
        trainer.model.norm.weight.fill_(1.0)
        trainer.model.position_embedding.weight.copy_(torch.eye(64))
        for position, token in enumerate(ids):
            trainer.model.head.weight[token, position] += 10.0
    assert closing_sample(trainer, replace(result, train_loss=0.0)).sample == gpt2().decode(ids)


def test_a_run_that_cannot_write_has_no_sample(
    config: ResolvedConfig, small_shards: Path, small_model: ModelConfig
) -> None:
    stopped = make_trainer(config, should_stop=lambda: True)
    result = stopped.run()
    assert closing_sample(stopped, result) == result
    foreign = make_trainer(config.replace(data=str(small_shards), model=small_model))
    result = foreign.run()
    assert closing_sample(foreign, result) == result
    sharded = make_trainer(config)
    result = sharded.run()
    sharded.config = config.replace(workers=2, micro_batch=1, fsdp=True)
    assert closing_sample(sharded, result) == result


@pytest.mark.parametrize("ids", [2, 50, 256])
def test_text_is_only_shown_once_the_loss_is_well_below_that_of_frequencies(
    config: ResolvedConfig, make_result: Callable[..., RunResult], ids: int
) -> None:
    """Whatever the number of ids; equally frequent ones have the logarithm of their number as loss."""
    frequency_loss = unigram_loss(count_ids([np.arange(ids).repeat(10)], 257))
    assert frequency_loss == pytest.approx(math.log(ids))
    assert noise_reason(make_result(val_loss=0.84 * frequency_loss), frequency_loss) == ""
    reason = noise_reason(make_result(val_loss=0.87 * frequency_loss), frequency_loss)
    assert f"{0.85 * frequency_loss:.2f}" in reason
    assert f"{frequency_loss:.2f}" in reason
    assert noise_reason(make_result(val_loss=None, train_loss=0.84 * frequency_loss), frequency_loss) == ""
    assert noise_reason(make_result(val_loss=None, train_loss=0.87 * frequency_loss), frequency_loss)
    trainer = make_trainer(config)
    result = trainer.run()
    tokens = [shard.tokens for shard in map(Shard, Path(config.dataset.data).glob("train/*.arrow"))]
    expected = unigram_loss(np.bincount(np.concatenate(tokens)))
    noise = closing_sample(trainer, replace(result, train_loss=0.9 * expected))
    assert noise.sample is None
    assert f"{expected:.2f}" in noise.no_sample_reason
    assert closing_sample(trainer, replace(result, train_loss=0.8 * expected)).sample


def test_frequencies_of_large_data_are_those_of_blocks_of_every_part() -> None:
    """Each of the four quarters has an id of its own, and more tokens than are counted in all."""
    quarter = MAX_COUNTED_TOKENS // 2
    streams = [np.full(quarter, number, np.uint16) for number in range(4)]
    counts = count_ids([np.concatenate(streams[:2]), *streams[2:]], 5)
    assert counts.sum() <= MAX_COUNTED_TOKENS
    assert counts.tolist() == [quarter // 2] * 4 + [0]


@pytest.fixture
def by_hand(small_model: ModelConfig) -> GPT:
    """A model whose logits are those of its head's first column: 8 for the padding, 3 for id 5, 2 for 6, 1 for 7."""
    model = GPT(dataclasses.replace(small_model, tied=False)).eval()
    with torch.no_grad():
        model.norm.weight.zero_()
        model.norm.bias.zero_()
        model.norm.bias[0] = 1.0
        model.head.weight.zero_()
        for row, value in ((5, 3.0), (6, 2.0), (7, 1.0), (slice(257, 320), 8.0)):
            model.head.weight[row, 0] = value
    return model


def test_the_likeliest_ids_are_sampled_and_none_of_the_padding(by_hand: GPT) -> None:
    assert sample(by_hand, by_hand.config, [0], 5, SamplingParams(temperature=0)) == [5] * 5
    drawn = sample(by_hand, by_hand.config, [0], 600, SamplingParams(temperature=1.0, top_k=2))
    assert set(drawn) == {5, 6}
    assert drawn.count(5) / 600 == pytest.approx(0.73, abs=0.06), "e to 3 against e to 2"
    assert set(sample(by_hand, by_hand.config, [0], 300, SamplingParams(temperature=0.05))) == {5}, "colder is surer"
    everything = sample(by_hand, by_hand.config, [0], 600, SamplingParams(temperature=1.0, top_k=0))
    assert len(set(everything)) > 100
    assert max(everything) < 257


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_model_without_numbers_in_evaluation_mode_is_refused(by_hand: GPT, value: float) -> None:
    """Also where the likeliest is taken, which NaN would be. One id without a chance is no fault."""
    with torch.no_grad():
        by_hand.head.weight[5, 0] = float("-inf")
        assert sample(by_hand, by_hand.config, [0], 3, SamplingParams(temperature=0)) == [6] * 3
        by_hand.head.weight[5, 0] = value
    for temperature in (0.0, 1.0):
        with pytest.raises(UserError, match=r"evaluation mode.*model\.eval\(\)"):
            sample(by_hand, by_hand.config, [0], 3, SamplingParams(temperature=temperature))


def test_the_likeliest_of_more_ids_than_there_are_is_any_of_them(by_hand: GPT) -> None:
    assert sample(by_hand, by_hand.config, [0], 20, SamplingParams(top_k=50_000)) == sample(
        by_hand, by_hand.config, [0], 20, SamplingParams(top_k=0)
    )


def test_only_the_end_of_a_long_text_is_looked_at(small_model: ModelConfig) -> None:
    torch.manual_seed(0)
    model = GPT(small_model).eval()
    ids = torch.randint(0, 257, (50,)).tolist()
    assert sample(model, model.config, ids, 1, SamplingParams(temperature=0)) == sample(
        model, model.config, ids[-32:], 1, SamplingParams(temperature=0)
    )
    whole = sample(model, model.config, ids[-4:], 40, SamplingParams(seed=3))
    assert len(whole) == 40
    assert whole[:10] == sample(model, model.config, ids[-4:], 10, SamplingParams(seed=3))


def test_the_same_seed_draws_the_same(small_model: ModelConfig) -> None:
    model = GPT(small_model).eval()
    once, again, other = (sample(model, model.config, [256], 20, SamplingParams(seed=seed)) for seed in (1, 1, 2))
    assert once == again != other
