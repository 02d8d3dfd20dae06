"""Activations that are computed again are the first ones, also behind kernels that draw random numbers of their own."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from infra.device.hardware import A100
from train.config import Cycle, TrainConfig
from train.loop.execution import autocast_context, build_model
from train.model_config import ModelConfig
from train.models import recompute
from train.models.gpt2 import GPT
from train.resolved import resolve


@torch.library.custom_op("throughline_test::mixed", mutates_args=())
def mixed(values: Tensor, dropout: float) -> tuple[Tensor, Tensor]:
    """A stand-in for a GPU's attention kernel, which draws its dropout inside: the values that are kept, and where."""
    keep = (torch.rand_like(values) >= dropout) / (1 - dropout)
    return values * keep, keep


def _backward(context: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor, None]:
    return gradient * context.saved_tensors[0], None


mixed.register_autograd(
    _backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output[1])
)  # fmt: skip


def kernel(q: Tensor, k: Tensor, v: Tensor, dropout: float, mask: Any = None) -> Tensor:
    return mixed(v + q * k, dropout)[0]


def gradients(model: GPT) -> dict[str, Tensor]:
    """Of one batch, from the same weights and the same random numbers."""
    torch.manual_seed(7)
    tokens = torch.randint(0, model.config.vocab_size, (2, model.config.context_length + 1))
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_every_second_block_is_run_again(small_model: ModelConfig) -> None:
    runs = [0] * 5
    model = GPT(replace(small_model, layers=5), checkpointing="alternate")
    for number, block in enumerate(model.blocks):

        def count(module: object, inputs: object, number: int = number) -> None:
            runs[number] += 1

        block.register_forward_pre_hook(count)
    gradients(model)
    assert runs == [2, 1, 2, 1, 2]


@pytest.mark.parametrize("kind", ["full", "alternate", "selective"])
def test_a_kernel_that_draws_random_numbers_is_run_again_with_dropout(
    small_model: ModelConfig, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    """Kept, it would leave its random numbers to the dropout behind it."""
    monkeypatch.setattr(recompute, "_ATTENTION", {torch.ops.throughline_test.mixed.default})

    def made(checkpointing: Any) -> GPT:
        torch.manual_seed(0)
        return GPT(replace(small_model, dropout=0.3), attention=kernel, checkpointing=checkpointing)

    expected, actual_gradients = gradients(made("none")), gradients(made(kind))
    for name, gradient in expected.items():
        torch.testing.assert_close(actual_gradients[name], gradient, msg=name)


@pytest.mark.skipif(not hasattr(torch.autograd.graph, "region_activation_memory_budget"), reason="needs torch 2.13")
@pytest.mark.slow
def test_compiled_code_keeps_to_a_budget_and_computes_the_same(small_model: ModelConfig) -> None:
    tokens = torch.randint(0, 257, (2, small_model.context_length + 1))

    def found(kind: Any) -> tuple[dict[str, Tensor], int]:
        torch.compiler.reset()
        torch.manual_seed(0)
        model, saved_sizes = GPT(replace(small_model, layers=1), checkpointing=kind), dict[int, int]()

        def keep(tensor: Tensor) -> Tensor:
            saved_sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = torch.compile(model, dynamic=False)(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        return gradients, sum(size for position, size in saved_sizes.items() if position not in weights)

    expected, all_of_it = found("none")
    sizes = [all_of_it]
    for kind in ("budget-75", "budget", "budget-25"):
        gradients, size = found(kind)
        sizes.append(size)
        for name, gradient in expected.items():
            torch.testing.assert_close(gradients[name], gradient, msg=name)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[2] < 0.9 * all_of_it


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["flash", "efficient", "sdpa"])
@pytest.mark.parametrize("kind", ["full", "selective"])
def test_a_gpu_repeats_its_dropout(kind: Any, attention: Any) -> None:
    model = ModelConfig(layers=2, heads=2, width=128, context_length=128, vocab_size=257, padded_vocab_size=320,
                        dropout=0.3)  # fmt: skip
    cuda = torch.device("cuda", torch.cuda.current_device())

    def found(checkpointing: Any) -> dict[str, Tensor]:
        config = resolve(
            TrainConfig.of(model=model, micro_batch=4, global_batch=4, steps=1, cycle=Cycle(1, 0), precision="bf16",
                        device="cuda", attention=attention, checkpointing=checkpointing),
            A100,
        )  # fmt: skip
        made = build_model(config.model, config.execution, config.optimization.optimizer, config.dataset.seed, cuda)
        torch.manual_seed(7)
        tokens = torch.randint(0, 257, (4, 129), device=cuda)
        with autocast_context(config.execution):
            loss = made(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        return {name: p.grad for name, p in made.named_parameters() if p.grad is not None}

    expected = found("none")
    for name, gradient in found(kind).items():
        assert (gradient - expected[name]).norm() <= 0.02 * expected[name].norm(), name
