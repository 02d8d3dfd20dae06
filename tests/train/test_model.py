"""The model is GPT-2: the same numbers as Hugging Face's, the published sizes, a sane start."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from train.config import PRESETS, ModelConfig
from train.model import GPT, parameter_count

CONFIG = ModelConfig(layers=3, heads=4, width=48, context_length=40, vocabulary=211, padded_vocabulary=211)

NAMES = {
    "token_embedding": "transformer.wte",
    "position_embedding": "transformer.wpe",
    "norm.": "transformer.ln_f.",
    "blocks.": "transformer.h.",
    "norm_1": "ln_1",
    "norm_2": "ln_2",
    "attention.qkv": "attn.c_attn",
    "attention.projection": "attn.c_proj",
    "feed_forward.up": "mlp.c_fc",
    "feed_forward.projection": "mlp.c_proj",
    "head": "lm_head",
}


def reference(config: ModelConfig) -> GPT2LMHeadModel:
    """transformers' GPT-2 of the same shape with random weights and biases, none of them at a trivial value."""
    model = GPT2LMHeadModel(
        GPT2Config(
            n_layer=config.layers, n_head=config.heads, n_embd=config.width, n_positions=config.context_length,
            vocab_size=config.vocabulary, tie_word_embeddings=config.tied,
            attn_pdrop=0, embd_pdrop=0, resid_pdrop=0,
        )
    )  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def theirs(name: str, values: dict[str, Tensor]) -> Tensor:
    """The tensor of transformers' model that our parameter ``name`` corresponds to, in our orientation."""
    wanted = name
    for ours, other in NAMES.items():
        wanted = wanted.replace(ours, other, 1) if ours != "norm." or name.startswith("norm.") else wanted
    value = values[wanted]
    is_conv = ("c_" in wanted) and wanted.endswith("weight")  # transformers stores these (in, out)
    return value.T if is_conv else value


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("attention", ["manual", "sdpa"])
def test_logits_and_gradients_equal_transformers(tied: bool, attention: str) -> None:
    from train.attention import ATTENTION

    torch.manual_seed(1)
    config = dataclasses.replace(CONFIG, tied=tied)
    other = reference(config)
    ours = GPT(config, attention=ATTENTION[attention])
    weights = dict(other.state_dict())
    ours.load_state_dict({name: theirs(name, weights) for name in ours.state_dict()})
    tokens = torch.randint(0, config.vocabulary, (3, config.context_length + 1))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]

    torch.testing.assert_close(ours(inputs), other(inputs).logits, atol=1e-5, rtol=1e-5)

    loss = ours(inputs, targets)
    expected = torch.nn.functional.cross_entropy(other(inputs).logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)
    loss.backward()
    expected.backward()
    gradients = {name: p.grad for name, p in other.named_parameters() if p.grad is not None}
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, theirs(name, gradients), atol=1e-5, rtol=1e-5, msg=name)


@pytest.mark.parametrize(
    ("preset", "published"),
    [
        ("gpt2-124m", 124_439_808),
        ("gpt2-355m", 354_823_168),
        ("gpt2-774m", 774_030_080),
        ("gpt2-1558m", 1_557_611_200),
    ],
)
def test_sizes_are_the_published_ones(preset: str, published: int) -> None:
    assert parameter_count(dataclasses.replace(PRESETS[preset], padded_vocabulary=50257)) == published


@pytest.mark.parametrize("change", [{}, {"tied": False}, {"bias": False}, {"padded_vocabulary": 50304, "layers": 1}])
def test_parameters_are_those_of_the_model(change: dict[str, Any]) -> None:
    config = dataclasses.replace(PRESETS["tiny"], **change)
    assert parameter_count(config) == sum(p.numel() for p in GPT(config).parameters())


@pytest.mark.parametrize("tied", [True, False])
def test_the_first_loss_is_that_of_guessing(tied: bool) -> None:
    torch.manual_seed(0)
    config = ModelConfig(
        layers=2, heads=2, width=64, context_length=64, vocabulary=50257, padded_vocabulary=50304, tied=tied
    )
    model = GPT(config)
    tokens = torch.randint(0, config.vocabulary, (2, 65))
    with torch.no_grad():
        loss = model(tokens[:, :-1], tokens[:, 1:]).item()
    assert loss == pytest.approx(math.log(config.padded_vocabulary), abs=0.1)


def test_attention_never_looks_ahead(small_model: ModelConfig) -> None:
    model = GPT(small_model).eval()
    tokens = torch.randint(0, 256, (1, 32))
    changed = tokens.clone()
    changed[0, 20] = (changed[0, 20] + 1) % 256
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :20], after[:, :20])
    assert not torch.allclose(before[:, 20:], after[:, 20:])
