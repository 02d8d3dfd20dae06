"""The steps of the GPU test on a CPU with a small model: what they compare, and what they say about a fault."""

from pathlib import Path
from typing import Any

import pytest
import torch

from infra.device.hardware import A100, cpu_info
from train.config import Cycle, TrainConfig
from train.gpu_test import steps
from train.gpu_test.data import open_random_data
from train.gpu_test.nanogpt import NanoGPT, load_initial_weights
from train.gpu_test.peer import largest_fitting, train_nanogpt
from train.gpu_test.steps import Setup
from train.loop.trainer import Trainer
from train.model_config import parse_model
from train.models.builders import builder_of
from train.resolved import resolve

SMALL = "tiny,layers=2,width=32,heads=2,context_length=32,vocab_size=257,padded_vocab_size=320"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    requested = TrainConfig.of(
        data=str(tmp_path_factory.mktemp("random")), model=parse_model(SMALL), steps=5, cycle=Cycle(5, 0),
        micro_batch=4, global_batch=4, keep_checkpoints=0, device="cpu", learning_rate=3e-3, warmup_steps=1,
    )  # fmt: skip
    return resolve(requested, cpu_info())


def test_nanogpt_learns_what_ours_learns(config: Any) -> None:
    """From the same weights, batches and learning rates; GELU is exact in one and approximated in the other."""
    data = open_random_data(Path(config.dataset.data), config)
    trainer = Trainer(config, data)
    trainer.run()
    ours = [loss for report in trainer.times.reports for loss in report.step_losses]
    seconds, losses = train_nanogpt(config, open_random_data(Path(config.dataset.data), config), CPU)
    assert len(seconds) == len(losses) == 5
    assert losses == pytest.approx(ours, abs=1e-3)
    assert losses[-1] < losses[0] - 0.1, "the random text has words that are more frequent"


def test_accumulation_does_not_change_what_nanogpt_learns(config: Any) -> None:
    """Where it does not fit at the micro-batch of ours, which stores no logits."""
    folder = Path(config.dataset.data)
    _, losses = train_nanogpt(config, open_random_data(folder, config), CPU)
    half = config.replace(micro_batch=2)
    _, accumulated = train_nanogpt(half, open_random_data(folder, half), CPU)
    assert accumulated == pytest.approx(losses, abs=1e-4)


def test_nanogpt_gets_the_micro_batch_that_fits() -> None:
    config = Setup("gpt2-124m", A100).automatic_config()
    chosen = largest_fitting(config, A100.memory)
    assert chosen.batch.global_batch == config.batch.global_batch
    assert chosen.batch.micro_batch < config.batch.micro_batch
    assert largest_fitting(config, 200 * 10**9).batch.micro_batch == config.batch.micro_batch
    assert largest_fitting(config, 1).batch.micro_batch == 1


def test_nanogpt_has_the_names_and_the_size_of_the_published_model(config: Any) -> None:
    model = NanoGPT(config.model)
    assert sum(p.numel() for p in model.parameters()) == config.model.parameters
    assert {"wte.weight", "wpe.weight", "h.0.attn.c_attn.bias", "h.1.mlp.c_proj.weight", "ln_f.bias"} <= set(
        model.state_dict()
    )
    ours = builder_of(config.model).build(config.execution)
    load_initial_weights(model, ours)
    tokens = torch.arange(64).view(2, 32)
    assert model(tokens, tokens).item() == pytest.approx(ours(tokens, tokens).item(), abs=1e-4)


def test_the_steps_run_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes what it needs from those before."""
    monkeypatch.setattr("infra.ceilings.MEASUREMENT_SECONDS", 0.0)
    values: dict[str, Any] = {}
    for name, step in steps.STEPS.items():
        result = step(Setup(SMALL, cpu_info(), values))
        assert result["outcome"] == "passed", result
        values[name] = result["values"]
    assert values["attention"]["kernels"]["sdpa"]["error"] < 1e-4
    assert values["compile"]["largest_gradient_error"] < 1e-5
    assert values["train"]["predicted_bytes"] > 0
    assert len(values["train"]["losses"]) == steps.TRAIN_STEPS
    assert values["nanogpt"]["largest_loss_difference"] < 1e-3
    texts = str(values)
    assert str(Path.home()) not in texts
    assert "/tmp" not in texts, "a report can be published"  # noqa: S108


def test_other_losses_than_nanogpts_fail() -> None:
    config = Setup(SMALL, cpu_info()).automatic_config()
    settings = {"micro_batch": 4, "precision": config.execution.precision}
    ours = {"outcome": "finished", "config": settings, "losses": [1.0] * steps.TRAIN_STEPS, "tokens_per_second": None}
    result = steps.compare_with_nanogpt(Setup(SMALL, cpu_info(), {"train": ours}))
    assert result["outcome"] == "failed"
    assert "losses" in result["advice"]
    values = {"train": ours, "device": {"simulated": True}}
    simulated = steps.compare_with_nanogpt(Setup(SMALL, cpu_info(), values))
    assert simulated["outcome"] == "not compared"


def test_a_compiled_gradient_with_another_sign_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    compute, calls = steps._loss_and_gradients, []

    def wrong(config: Any, device: torch.device) -> tuple[float, dict[str, torch.Tensor]]:
        calls.append(config)
        loss, gradients = compute(config, device)
        name = "blocks.0.norm_1.bias"
        return loss, gradients | ({name: -gradients[name]} if len(calls) == 2 else {})

    monkeypatch.setattr(steps, "_loss_and_gradients", wrong)
    result = steps.check_compiled(Setup(SMALL, cpu_info()))
    assert result["outcome"] == "failed"
    assert "blocks.0.norm_1.bias" in result["summary"]
    assert "--compile off" in result["advice"]


def test_the_config_is_what_a_run_would_choose() -> None:
    config = Setup("gpt2-124m", A100).automatic_config()
    assert (config.execution.precision, config.execution.compile) == ("bf16-activations", "whole")
    assert config.batch.accumulation == 1
    assert config.batch.micro_batch >= 32
