"""Optimizers: which parameters each has, what decays, what they all are told, and the schedule of a short run."""

from dataclasses import replace

import pytest
import torch

from train.config import TrainConfig
from train.model_config import ModelConfig
from train.models.gpt2 import GPT
from train.models.optimizer import learning_rate, make_optimizer, set_learning_rate

CONFIG = TrainConfig.of(learning_rate=1.0, weight_decay=0.25, beta1=0.8, beta2=0.9)


@pytest.fixture
def model(small_model: ModelConfig) -> GPT:
    return GPT(replace(small_model, tied=False))


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-fused", "adafactor", "muon"])
def test_matrices_decay_and_vectors_do_not(model: GPT, optimizer: str) -> None:
    made = make_optimizer(model, CONFIG.replace(optimizer=optimizer).optimization)
    decays = {id(p): group["weight_decay"] for group in made.param_groups for p in group["params"]}
    assert len(decays) == len(list(model.parameters())), "each is there, once"
    for name, parameter in model.named_parameters():
        assert decays[id(parameter)] == (0.25 if parameter.dim() == 2 else 0.0), name


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-fused", "muon"])
def test_adam_has_the_configs_betas(model: GPT, optimizer: str) -> None:
    made = make_optimizer(model, CONFIG.replace(optimizer=optimizer).optimization)
    assert {group["betas"] for group in made.param_groups if "betas" in group} == {(0.8, 0.9)}


def test_muon_has_the_blocks_matrices_alone(model: GPT) -> None:
    """Embeddings and the head are not what it is for (arXiv 2502.16982, section 2.2)."""
    muon = make_optimizer(model, CONFIG.replace(optimizer="muon").optimization).param_groups[0]
    mine = {id(p) for p in muon["params"]}
    assert mine == {id(p) for name, p in model.named_parameters() if name.startswith("blocks.") and p.dim() == 2}
    assert len(mine) == 2 * 4


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-fused", "adafactor", "muon"])
def test_every_parameter_moves_at_the_rate_that_was_set(model: GPT, optimizer: str) -> None:
    made = make_optimizer(model, CONFIG.replace(optimizer=optimizer, weight_decay=0.0).optimization)

    def moved(rate: float) -> dict[str, bool]:
        set_learning_rate(made, rate)
        initial_weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        made.step()
        made.zero_grad()
        assert all(parameter.grad is None for parameter in model.parameters())
        return {name: not torch.equal(p, initial_weights[name]) for name, p in model.named_parameters()}

    assert not any(moved(0.0).values())
    assert all(moved(0.125).values())
    assert {float(group["lr"]) for group in made.param_groups} == {0.125}


def test_a_tenth_of_a_short_run_warms_up() -> None:
    config = CONFIG.replace(warmup_steps=100, schedule="constant")
    assert [learning_rate(config.optimization, step, 40, step / 40) for step in range(6)] == [
        0.25,
        0.5,
        0.75,
        1.0,
        1.0,
        1.0,
    ]
    assert learning_rate(config.optimization, 0, 5, 0.0) == 1.0, "of fewer than ten steps none but the first"
    assert learning_rate(config.optimization, 0, 10_000, 0.0) == pytest.approx(0.01)
    assert learning_rate(config.replace(warmup_steps=0).optimization, 0, 40, 0.0) == 1.0
