"""Optimizers: which parameters each has, what decays, what they all are told, and the schedule of a short run."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from train.config import TrainConfig
from train.config.optimization import OFFLOADED_OPTIMIZERS
from train.model_config import ModelConfig
from train.models.gpt2 import GPT
from train.models.optimizer import learning_rate, make_optimizer, set_learning_rate

CONFIG = TrainConfig.of(learning_rate=1.0, weight_decay=0.25, beta1=0.8, beta2=0.9)


@pytest.fixture
def model(small_model: ModelConfig) -> GPT:
    return GPT(replace(small_model, tied=False))


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-fused", "adafactor", "muon", "lion", "sgd"])
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


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-fused", "adafactor", "muon", "lion", "sgd"])
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


def test_lion_is_the_published_formula() -> None:
    """Program 1 of arXiv 2302.06675, in numpy, with other numbers in each of three steps."""
    config = CONFIG.replace(optimizer="lion").optimization
    layer = torch.nn.Linear(3, 2, dtype=torch.float64)
    made = make_optimizer(layer, config)
    expected = {name: parameter.detach().numpy().copy() for name, parameter in layer.named_parameters()}
    momenta = {name: np.zeros_like(value) for name, value in expected.items()}
    generator = np.random.default_rng(0)
    for rate in (0.5, 0.25, 0.125):
        set_learning_rate(made, rate)
        for name, parameter in layer.named_parameters():
            gradient = generator.normal(size=parameter.shape)
            parameter.grad = torch.from_numpy(gradient.copy())
            update = np.sign(0.8 * momenta[name] + 0.2 * gradient)
            momenta[name] = 0.9 * momenta[name] + 0.1 * gradient
            expected[name] -= rate * (update + (0.25 if parameter.dim() == 2 else 0.0) * expected[name])
        made.step()
        for name, parameter in layer.named_parameters():
            assert parameter.detach().numpy() == pytest.approx(expected[name], rel=1e-12), (rate, name)


def test_sgds_momentum_is_beta1(model: GPT) -> None:
    made = make_optimizer(model, CONFIG.replace(optimizer="sgd").optimization)
    assert {group["momentum"] for group in made.param_groups} == {0.8}


@pytest.mark.parametrize("optimizer", OFFLOADED_OPTIMIZERS)
def test_an_offloaded_optimizer_is_the_same_bit_for_bit_and_resumes(model: GPT, optimizer: str) -> None:
    """The state of a checkpoint is that of an optimizer on the device, so that a resumed run may change the switch."""
    config = CONFIG.replace(optimizer=optimizer, learning_rate=0.01).optimization
    offloaded_model, resumed_model = copy.deepcopy(model), copy.deepcopy(model)
    made, offloaded = make_optimizer(model, config), make_optimizer(offloaded_model, config, offload=True)

    def step(optimizer: torch.optim.Optimizer, model: GPT, seed: int) -> None:
        torch.manual_seed(seed)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        set_learning_rate(optimizer, 0.01 / (seed + 1))
        optimizer.step()
        optimizer.zero_grad()
        assert all(parameter.grad is None for parameter in model.parameters())

    def assert_equal(model: GPT) -> None:
        for (name, weight), value in zip(model.named_parameters(), offloaded_model.parameters(), strict=True):
            assert torch.equal(weight, value), name

    for seed in range(3):
        step(made, model, seed)
        step(offloaded, offloaded_model, seed)
        assert_equal(model)
    resumed = make_optimizer(resumed_model, config, offload=True)
    resumed_model.load_state_dict(offloaded_model.state_dict())
    resumed.load_state_dict(copy.deepcopy(made.state_dict()))
    step(resumed, resumed_model, 3)
    step(offloaded, offloaded_model, 3)
    assert_equal(resumed_model)
    weights = {p.data_ptr() for p in offloaded_model.parameters()}
    assert not weights & {p.data_ptr() for group in offloaded.param_groups for p in group["params"]}
    for parameter in offloaded_model.parameters():
        parameter.grad = torch.ones_like(parameter)
    offloaded.zero_grad(set_to_none=False)
    assert not any(parameter.grad.any() for parameter in offloaded_model.parameters() if parameter.grad is not None)


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
