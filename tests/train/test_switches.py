"""Every switch changes how a step is executed and not what it computes; every combination trains or is refused."""

import dataclasses
import importlib.util
import itertools
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any, cast, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.utils import counters
from torch.nn.attention import SDPBackend
from trainers import make_trainer

from infra.device.hardware import cpu_info
from infra.errors import UserError
from train.config import (
    AUTO,
    EAGER_BACKENDS,
    Attention,
    Checkpointing,
    Cycle,
    Loss,
    Optimizer,
    Precision,
    ResolvedConfig,
    Schedule,
    TrainConfig,
)
from train.loop.execution import AUTOCAST, build_model, compile_model, configure_allocator, keep_compiled_attention
from train.loop.process import borrowed_process
from train.model_config import ModelConfig
from train.models.attention import book_numbers, by_kernels
from train.models.optimizer import learning_rate
from train.resolved import resolve
from train.result import CycleReport

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def config(small_shards: Path, small_model: ModelConfig) -> ResolvedConfig:
    return ResolvedConfig.of(
        data=str(small_shards), model=small_model, global_batch=4, micro_batch=4, steps=2, cycle=Cycle(2, 1),
        precision="fp32", device="cpu", compile="off", loss="plain",
    )  # fmt: skip


def cpu_model(config: ResolvedConfig) -> torch.nn.Module:
    """The model of ``config`` as a run on this CPU builds it."""
    execution = resolve(config, cpu_info()).execution
    return build_model(config.model, execution, config.optimization.optimizer, config.dataset.seed, CPU)


def gradients(config: ResolvedConfig, tokens: torch.Tensor) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss and gradients of one batch, from the same weights and the same random numbers."""
    model = cpu_model(config)
    torch.manual_seed(7)
    loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def batch_of(model: ModelConfig) -> torch.Tensor:
    tokens = torch.randint(0, model.vocab_size - 1, (4, model.context_length + 1))
    tokens[0, 10] = tokens[1, 3] = tokens[1, 20] = model.vocab_size - 1
    return tokens


@pytest.mark.parametrize(
    "change",
    [
        {"attention": "manual"},
        {"checkpointing": "full"},
        {"checkpointing": "selective"},
        {"loss_chunks": 8},
        {"loss": "fused"},
        {"checkpointing": "full", "loss_chunks": 4},
    ],
    ids=str,
)
def test_gradients_stay_the_same(config: ResolvedConfig, change: dict[str, Any]) -> None:
    dropouts = (0.0,) if "attention" in change else (0.0, 0.2)  # another kernel draws other random numbers
    for dropout, tied in itertools.product(dropouts, (True, False)):
        usual = config.replace(model=dataclasses.replace(config.model, dropout=dropout, tied=tied))
        tokens = batch_of(cast(ModelConfig, usual.model))
        expected, plain = gradients(usual, tokens)
        loss, changed = gradients(usual.replace(**change), tokens)
        assert loss == pytest.approx(expected, rel=1e-5)
        for name, gradient in plain.items():
            torch.testing.assert_close(changed[name], gradient, atol=1e-5, rtol=1e-4, msg=name)


def test_masked_attention_stays_within_a_book(config: ResolvedConfig) -> None:
    end = config.model.vocab_size - 1
    tokens = batch_of(cast(ModelConfig, config.model))[1:2, :-1]
    assert book_numbers(tokens, end)[0, [0, 3, 4, 20, 21]].tolist() == [0, 0, 1, 1, 2]
    for attention in ("sdpa", "manual"):
        masked = config.replace(mask_books=True, attention=attention)
        model = cpu_model(masked).eval()
        changed = tokens.clone()
        changed[0, 5] = (changed[0, 5] + 1) % end
        with torch.no_grad():
            initial, after = model(tokens), model(changed)
        torch.testing.assert_close(initial[:, 21:], after[:, 21:])
        assert not torch.allclose(initial[:, 5:21], after[:, 5:21])


def test_mask_books_is_the_same_in_both_attentions(config: ResolvedConfig) -> None:
    tokens = batch_of(cast(ModelConfig, config.model))
    masked = config.replace(mask_books=True)
    assert gradients(masked, tokens)[0] != gradients(config, tokens)[0]
    expected = gradients(masked.replace(attention="manual"), tokens)[0]
    assert gradients(masked.replace(attention="sdpa"), tokens)[0] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("compile", ["blocks", "whole"])
@pytest.mark.slow
def test_compiled_code_computes_the_same(config: ResolvedConfig, compile: str) -> None:
    """With the loss in pieces, validation included: without, all would be torch's own."""

    def losses(config: ResolvedConfig) -> list[float]:
        reports: list[CycleReport] = []
        make_trainer(config, on_cycle=reports.append).run()
        assert reports[0].val_loss is not None
        return [*reports[0].step_losses, reports[0].val_loss]

    config = config.replace(model=dataclasses.replace(config.model, layers=1), micro_batch=2)
    changed = config.replace(compile=compile, loss_chunks=2)
    assert losses(changed) == pytest.approx(losses(config), rel=1e-4)


@pytest.mark.parametrize("backend", EAGER_BACKENDS)
def test_backends_for_debugging_compute_the_same_without_a_compiler(
    config: ResolvedConfig, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inductor would need the compiler, which is not there."""
    monkeypatch.setenv("CXX", "/nowhere/c++")
    no_compiler = dataclasses.replace(cpu_info(), compile_blocker="no compiler")
    changed = resolve(config.replace(compile=backend, loss_chunks=2), no_compiler)
    graphs = counters["stats"]["unique_graphs"]
    expected, reports = [], []
    make_trainer(config.replace(loss_chunks=2), on_cycle=expected.append).run()
    make_trainer(changed, on_cycle=reports.append).run()
    assert reports[0].step_losses == pytest.approx(expected[0].step_losses, rel=1e-5)
    assert reports[0].val_loss == pytest.approx(expected[0].val_loss, rel=1e-5)
    assert counters["stats"]["unique_graphs"] > graphs, "the model has been traced"


def test_a_deterministic_run_rejects_other_algorithms_and_leaves_the_process_as_it_was(
    config: ResolvedConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with borrowed_process(config.execution):
        make_trainer(config)
        assert not torch.are_deterministic_algorithms_enabled()
        assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    deterministic, reports = config.replace(deterministic=True), []
    with borrowed_process(deterministic.execution):
        for _ in range(2):
            make_trainer(deterministic, on_cycle=reports.append).run()
        assert torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert reports[0].step_losses == reports[1].step_losses
    assert not torch.are_deterministic_algorithms_enabled()
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


@pytest.mark.parametrize("setting", [None, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_the_allocator_is_chosen_unless_the_user_has(
    setting: str | None, config: ResolvedConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    if setting:
        monkeypatch.setenv(setting, "max_split_size_mb:64")
    configure_allocator(config.replace(allocator="default").execution.allocator)
    assert "PYTORCH_ALLOC_CONF" not in os.environ or setting
    configure_allocator(config.replace(allocator="expandable").execution.allocator)
    expected = {None: "expandable_segments:True", "PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}.get(setting)
    assert os.environ.get("PYTORCH_ALLOC_CONF") == expected


GROWING = """
import sys, torch
from train.loop.execution import configure_allocator
configure_allocator(sys.argv[1])
kept = torch.zeros(1, device="cuda")
print(torch.cuda.memory_snapshot()[0]["is_expandable"])
"""


@pytest.mark.gpu
@pytest.mark.parametrize("allocator", ["default", "split", "expandable"])
def test_segments_grow_where_that_was_asked_for(allocator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)  # which training in this process has set
    done = subprocess.run([sys.executable, "-c", GROWING, allocator], capture_output=True, text=True)
    assert done.stdout.split() == [str(allocator == "expandable")], done.stderr


def test_a_new_process_finds_compiled_attention_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    keep_compiled_attention()
    attend = partial(by_kernels, [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
    x = torch.randn(1, 2, 8, 16, requires_grad=True)
    for outcome in ("autograd_cache_miss", "autograd_cache_hit"):
        torch.compiler.reset()
        counters.clear()
        torch.compile(lambda x: attend(x, x, x, 0.0), dynamic=False)(x).sum().backward()  # it keeps both or none
        assert counters["aot_autograd"][outcome] == 1, dict(counters["aot_autograd"])


@pytest.mark.slow
def test_what_was_compiled_for_one_precision_is_not_run_for_another(
    config: ResolvedConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by torch 2.11, whose own key does not have the type of autocast."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    layer: Any = torch.nn.Linear(8, 8)
    for precision, kind in AUTOCAST.items():
        torch.compiler.reset()
        counters.clear()
        chosen = config.replace(compile="whole", precision=precision, device="cuda")
        with torch.autocast("cpu", kind):
            compile_model(layer, chosen.execution)(torch.randn(8, 8)).float().sum().backward()
        counts = counters["aot_autograd"]
        assert (counts["autograd_cache_miss"], counts["autograd_cache_saved"]) == (1, 1), (precision, dict(counts))


OFTEN = {
    "precision": st.sampled_from([AUTO, *get_args(Precision)]),
    "attention": st.sampled_from(get_args(Attention)),
    "checkpointing": st.sampled_from(get_args(Checkpointing)),
    "loss": st.sampled_from([AUTO, *get_args(Loss)]),
    "optimizer": st.sampled_from(get_args(Optimizer)),
    "schedule": st.sampled_from(get_args(Schedule)),
    "loss_chunks": st.sampled_from([1, 2, 3]),
    "micro_batch": st.sampled_from([AUTO, 1, 2, 4]),
    "loader_threads": st.sampled_from([0, 2]),
    "clip_norm": st.sampled_from([0.0, 1.0]),
    "mask_books": st.booleans(),
    "fsdp": st.booleans(),
    "fp8": st.booleans(),
    "device": st.sampled_from(["auto", "cpu"]),
}
SHAPES = {
    "tied": st.booleans(),
    "bias": st.booleans(),
    "dropout": st.sampled_from([0.0, 0.1]),
    "heads": st.sampled_from([1, 2, 4]),
}


@settings(max_examples=80)
@given(changes=st.fixed_dictionaries({}, optional=OFTEN), shape=st.fixed_dictionaries({}, optional=SHAPES))
def test_every_combination_trains_or_is_refused(
    config: ResolvedConfig, changes: dict[str, Any], shape: dict[str, Any]
) -> None:
    try:
        settings = config.flat() | {"model": dataclasses.replace(config.model, **shape)} | changes
        trainer = make_trainer(resolve(TrainConfig.of(**settings), cpu_info()))
    except UserError as refusal:
        named = [name for name in changes if f"--{name.replace('_', '-')}" in str(refusal)]
        assert named, f"{refusal} names none of {changes}"  # noqa: PT017 most combinations are not refused
        return
    with torch.compiler.set_stance("force_eager"):  # torchao's optimizers compile their steps, each shape anew
        result = trainer.run()
    assert result.outcome == "finished"
    assert result.steps == 2


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-fused", "adafactor", "muon", "lion", "sgd"])
def test_every_optimizer_learns_and_resumes(config: ResolvedConfig, tmp_path: Path, optimizer: str) -> None:
    rate = {"adafactor": 0.2, "lion": 1e-3, "sgd": 0.3}.get(optimizer, 3e-3)
    config = config.replace(optimizer=optimizer, steps=40, learning_rate=rate)
    straight: list[CycleReport] = []
    make_trainer(config, on_cycle=straight.append).run()
    assert straight[-1].train_loss < straight[0].train_loss - 0.1
    halfway = config.replace(steps=20)
    first = make_trainer(halfway, checkpoints=tmp_path).run()
    assert first.checkpoint
    resumed: list[CycleReport] = []
    # The schedule of 20 steps is not that of 40, so the second half alone is compared.
    make_trainer(config.replace(schedule="constant"), checkpoints=tmp_path, resume=Path(first.checkpoint),
            on_cycle=resumed.append).run()  # fmt: skip
    assert resumed[0].step == 22
    assert resumed[-1].step == 40


@pytest.mark.parametrize("optimizer", ["adamw-8bit", "adamw-bf16"])
@pytest.mark.slow
def test_torchao_resumes_exactly_or_is_asked_for_by_name(
    config: ResolvedConfig, tmp_path: Path, optimizer: str
) -> None:
    precision = "bf16-activations" if optimizer == "adamw-bf16" else "fp32"
    config = config.replace(optimizer=optimizer, precision=precision, steps=8, cycle=Cycle(4, 1), checkpoint_every=4)
    if importlib.util.find_spec("torchao"):
        straight: list[CycleReport] = []
        make_trainer(config, checkpoints=tmp_path, on_cycle=straight.append).run()
        resumed: list[CycleReport] = []
        make_trainer(config, resume=tmp_path / "step-00000004", on_cycle=resumed.append).run()
        assert [report.step_losses for report in resumed] == [straight[1].step_losses]
        return
    with pytest.raises(UserError, match=f"--optimizer {optimizer} needs torchao.*pip install torchao"):
        make_trainer(config)


def test_the_schedules() -> None:
    config = ResolvedConfig.of(learning_rate=1.0, warmup_steps=10)

    def rates(schedule: str) -> list[float]:
        chosen = config.replace(schedule=schedule)
        return [learning_rate(chosen.optimization, step, 1000, step / 1000) for step in range(1001)]

    for schedule in ("cosine", "wsd", "constant"):
        assert rates(schedule)[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert rates("cosine")[1000] == pytest.approx(0.1)
    assert rates("wsd")[800] == pytest.approx(1.0)
    assert rates("wsd")[900] == pytest.approx(0.5)
    assert rates("wsd")[1000] == pytest.approx(0.0)
    assert set(rates("constant")[10:]) == {1.0}
    assert rates("cosine")[10] == pytest.approx(1.0), "the fall begins where the warm-up ends"
    assert all(a >= b for a, b in itertools.pairwise(rates("cosine")[10:]))


def test_a_tenth_of_a_short_time_warms_up() -> None:
    config = ResolvedConfig.of(learning_rate=1.0, warmup_steps=100, schedule="constant")
    assert [learning_rate(config.optimization, step, None, step / 20) for step in range(3)] == pytest.approx(
        [0.01, 0.5, 1.0]
    )


@pytest.mark.gpu
@pytest.mark.parametrize(
    "change",
    [
        {"attention": "flash"}, {"attention": "cudnn"}, {"attention": "efficient"}, {"attention": "flex"},
        {"mask_books": True}, {"precision": "bf16-activations"}, {"precision": "fp16"}, {"precision": "tf32"},
        {"compile": "whole"}, {"compile": "blocks"}, {"compile": "reduce-overhead"}, {"checkpointing": "alternate"},
        *(
            pytest.param({"compile": mode}, marks=pytest.mark.slow)
            for mode in ("coordinate-descent", "max-autotune", "max-autotune-graphs")
        ),
        {"compile": "whole", "checkpointing": "selective"}, {"fp8": True},
        {"loss": "fused"}, {"loss_chunks": 2, "compile": "whole"},
        {"optimizer": "adamw-8bit"}, {"optimizer": "adamw-bf16", "precision": "bf16-activations"},
        {"offload_optimizer": True}, {"deterministic": True},
    ],
    ids=str,
)  # fmt: skip
def test_the_gpu_computes_the_same(config: ResolvedConfig, change: dict[str, Any]) -> None:
    if "fp8" in change or change.get("optimizer", "").startswith("adamw-"):
        pytest.importorskip("torchao")
    if change == {"fp8": True} and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no 8-bit matmuls")
    model = dataclasses.replace(config.model, width=64, context_length=128)
    base = config.replace(model=model, device="cuda", precision="bf16", steps=10, cycle=Cycle(10, 1), micro_batch=2
    )  # fmt: skip
    expected: list[CycleReport] = []
    make_trainer(base, on_cycle=expected.append).run()
    reports: list[CycleReport] = []
    make_trainer(base.replace(**change), on_cycle=reports.append).run()
    if not base.execution.mask_books and "mask_books" not in change:
        assert reports[0].step_losses == pytest.approx(expected[0].step_losses, rel=2e-2)
