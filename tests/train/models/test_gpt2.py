"""The model is GPT-2: the same numbers as Hugging Face's, the published sizes, a sane start."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from train.config import Loss
from train.model_config import PRESETS, ModelConfig
from train.models import recompute
from train.models.gpt2 import GPT
from train.models.loss import loss_function

CONFIG = ModelConfig(layers=3, heads=4, width=48, context_length=40, vocab_size=211, padded_vocab_size=211)

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
            vocab_size=config.vocab_size, tie_word_embeddings=config.tied,
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
    from train.models.attention import ATTENTION

    torch.manual_seed(1)
    config = replace(CONFIG, tied=tied)
    other = reference(config)
    ours = GPT(config, attention=ATTENTION[attention])
    weights = dict(other.state_dict())
    ours.load_state_dict({name: theirs(name, weights) for name in ours.state_dict()})
    tokens = torch.randint(0, config.vocab_size, (3, config.context_length + 1))
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


def test_sizes_are_the_published_ones() -> None:
    published = {
        "gpt2-124m": 124_439_808, "gpt2-355m": 354_823_168, "gpt2-774m": 774_030_080, "gpt2-1558m": 1_557_611_200
    }  # fmt: skip
    sizes = {name: replace(PRESETS[name], padded_vocab_size=50257) for name in published}
    assert {name: config.parameters for name, config in sizes.items()} == published


@pytest.mark.parametrize("change", [{}, {"tied": False}, {"bias": False}, {"padded_vocab_size": 50304, "layers": 1}])
def test_parameters_are_those_of_the_model(change: dict[str, Any]) -> None:
    config = replace(PRESETS["tiny"], **change)
    assert config.parameters == sum(p.numel() for p in GPT(config).parameters())


@pytest.mark.parametrize("tied", [True, False])
def test_the_first_loss_is_that_of_guessing(tied: bool) -> None:
    torch.manual_seed(0)
    config = ModelConfig(
        layers=2, heads=2, width=64, context_length=64, vocab_size=50257, padded_vocab_size=50304, tied=tied
    )
    model = GPT(config)
    tokens = torch.randint(0, config.vocab_size, (2, 65))
    with torch.no_grad():
        loss = model(tokens[:, :-1], tokens[:, 1:]).item()
    assert loss == pytest.approx(math.log(config.padded_vocab_size), abs=0.1)


@pytest.mark.parametrize("loss", ["plain", "fused"])
def test_the_loss_of_evaluation_is_that_of_the_model_without_padding(loss: Loss) -> None:
    torch.manual_seed(0)
    config = ModelConfig(layers=1, heads=2, width=16, context_length=16, vocab_size=211, padded_vocab_size=256)
    model = GPT(config, loss=loss_function(loss, 1))
    tokens = torch.randint(0, config.vocab_size, (2, 17))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    with torch.no_grad():
        logits = model(inputs).flatten(0, 1)
        for mode, ids in ((model.train, 256), (model.eval, 211)):
            mode()
            right = torch.nn.functional.cross_entropy(logits[:, :ids], targets.flatten())
            torch.testing.assert_close(model(inputs, targets), right)


def test_residual_layers_start_smaller_the_deeper_the_model(small_model: ModelConfig) -> None:
    """GPT-2, section 2.3: by one over the square root of their number, two a block."""
    torch.manual_seed(0)
    model = GPT(replace(small_model, layers=8, width=64))
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            expected = 0.02 / 4 if name.endswith("projection.weight") else 0.02
            assert parameter.std().item() == pytest.approx(expected, rel=0.1), name


def test_dropout_is_where_gpt2_has_it(small_model: ModelConfig) -> None:
    """Behind the embeddings and both layers of every block, and on the weights of attention; nowhere in ``eval``."""
    torch.manual_seed(0)
    requests: list[float] = []

    def attention(q: Tensor, k: Tensor, v: Tensor, dropout: float, mask: Any) -> Tensor:
        requests.append(dropout)
        return v

    model = GPT(replace(small_model, dropout=0.25), attention=attention)
    zeros: list[float] = []
    model.blocks[0].register_forward_pre_hook(lambda _, inputs: zeros.append((inputs[0] == 0).float().mean().item()))
    for block in model.blocks:
        for part in (block.attention, block.feed_forward):
            assert isinstance(part, nn.Module)
            part.register_forward_hook(lambda *passed: zeros.append((passed[-1] == 0).float().mean().item()))
    model(torch.randint(0, 257, (16, 32)))
    assert zeros == pytest.approx([0.25] * 5, abs=0.02)
    assert requests == [0.25, 0.25]
    zeros.clear()
    requests.clear()
    model.eval()(torch.randint(0, 257, (16, 32)))
    assert zeros == pytest.approx([0.0] * 5, abs=1e-3)
    assert requests == [0.0, 0.0]


def test_activations_have_the_type_that_is_asked_for(small_model: ModelConfig) -> None:
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    for requested, actual in ((torch.bfloat16, torch.bfloat16), (None, torch.float32)):
        model = GPT(small_model, activations=requested)
        assert model.hidden_states(tokens, model.token_embedding(tokens)).dtype == actual
        assert model(tokens, tokens).dtype == torch.float32


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_only_training_computes_again(small_model: ModelConfig, monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    calls: list[str] = []

    def watched(name: str) -> Callable[..., Tensor]:
        again = getattr(recompute, name)

        def run(*arguments: Any, **named: Any) -> Tensor:
            calls.append(name)
            return again(*arguments, **named)

        return run

    for name in ("full", "selective"):
        monkeypatch.setattr(recompute, name, watched(name))
    model, tokens = GPT(small_model, checkpointing=kind), torch.zeros(1, 8, dtype=torch.int64)
    model.eval()(tokens)
    assert calls == []
    model.train()(tokens)
    assert calls == [kind] * small_model.layers
