"""How a config is executed here: its process, its collector, and the model that is asked after training."""

import gc
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from infra.device.hardware import cpu_info
from train.config import ResolvedConfig, TrainConfig
from train.loop.execution import build_inference_model, build_model, compile_model, gc_disabled
from train.model_config import ModelConfig
from train.resolved import resolve


@pytest.mark.parametrize(
    "entry", ["enable_large_pages(config.execution)", "(block := borrowed_process(config.execution)).__enter__()"]
)
def test_a_cpus_large_tensors_are_in_large_pages_unless_told_otherwise(entry: str) -> None:
    """Counted in page faults of a process that allocates 64 MB ten times: 16,384 small pages or 32 large ones each.

    A trial's process chooses its pages itself, and a run in the command's process does so as it borrows that.
    """
    program = (
        "import resource, torch; from train.config import ResolvedConfig; from train.loop.execution import "
        "enable_large_pages\n"
        "from train.loop.process import borrowed_process\n"
        "config = ResolvedConfig.of(device='cpu', ablate={})\n"
        f"entered = {entry}\n"
        "faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "before = faults()\n"
        "for _ in range(10): torch.ones(2**24)\n"
        "print(faults() - before)"
    )
    small, large = (
        int(subprocess.run([sys.executable, "-c", program.format(left_out)], capture_output=True, check=True).stdout)
        for left_out in (("large-pages",), ())
    )
    assert small > 10 * 16_384
    assert large < small / 5


@pytest.mark.parametrize(
    ("kind", "requests"),
    [
        ("whole", {"mode": None, "options": None}),
        ("max-autotune", {"mode": "max-autotune-no-cudagraphs", "options": None}),
        ("max-autotune-graphs", {"mode": "max-autotune", "options": None}),
        ("coordinate-descent", {"mode": None, "options": {"coordinate_descent_tuning": True}}),
    ],
)
def test_torch_is_asked_for_the_kind_of_compilation(
    kind: Any, requests: dict[str, object], small_model: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch refuses a mode or an option that it does not know; nothing is compiled before the first call."""
    actual: list[dict[str, object]] = []
    compile_it = torch.compile

    def recording(model: Any, **options: Any) -> Any:
        actual.append(options)
        return compile_it(model, **options)

    monkeypatch.setattr(torch, "compile", recording)
    config = resolve(TrainConfig.of(model=small_model, device="cpu", compile=kind), cpu_info())
    compile_model(
        build_model(
            config.model, config.execution, config.optimization.optimizer, config.dataset.seed, torch.device("cpu")
        ),
        config.execution,
    )
    assert actual == [{"dynamic": False} | requests]


@pytest.mark.parametrize("ablate", [(), ("gc-pause",)])
def test_nothing_is_collected_in_a_step_and_all_again_behind_the_run(ablate: tuple[str, ...]) -> None:
    config = ResolvedConfig.of(ablate=ablate, device="cpu")  # type: ignore[arg-type]
    with suppress(KeyError), gc_disabled(config.execution):
        assert gc.isenabled() is bool(ablate)
        raise KeyError
    assert gc.isenabled()


def test_the_model_is_asked_as_it_was_trained_and_without_dropout(small_model: ModelConfig, tmp_path: Path) -> None:
    """Within books where it was trained so, also one token at a time."""
    config = ResolvedConfig.of(
        data=str(tmp_path), model=replace(small_model, dropout=0.5), mask_books=True, micro_batch=4, global_batch=4
    )
    trained, requested = (
        build_model(
            config.model, config.execution, config.optimization.optimizer, config.dataset.seed, torch.device("cpu")
        ),
        build_inference_model(config.model, config.execution.mask_books),
    )
    requested.load_state_dict(trained.state_dict())
    tokens = torch.randint(0, 256, (2, 32))
    tokens[:, 15] = 256
    with torch.no_grad():
        torch.testing.assert_close(requested(tokens), trained.eval()(tokens))
        torch.testing.assert_close(
            requested(tokens)[:, 16:], requested(tokens.clone().index_fill_(1, torch.arange(15), 0))[:, 16:]
        )
        assert requested(tokens[:, :1]).shape == (2, 1, 320)


def test_weights_follow_from_the_seed(small_model: ModelConfig) -> None:
    def head(seed: int) -> torch.Tensor:
        execution = resolve(TrainConfig.of(micro_batch=1, global_batch=1, device="cpu"), cpu_info()).execution
        return build_model(small_model, execution, "adamw", seed, torch.device("cpu")).head.weight

    assert torch.equal(head(3), head(3))
    assert not torch.equal(head(3), head(4))


def test_the_seed_decides_the_weights(small_model: ModelConfig) -> None:
    """Whatever has been drawn before."""

    def weights(seed: int) -> bytes:
        config = resolve(TrainConfig.of(model=small_model, seed=seed, device="cpu"), cpu_info())
        return (
            build_model(
                config.model, config.execution, config.optimization.optimizer, config.dataset.seed, torch.device("cpu")
            )
            .token_embedding.weight.detach()
            .numpy()
            .tobytes()
        )

    actual = [weights(seed) for seed in (0, 1, 0, 1)]
    assert actual[:2] == actual[2:]
    assert actual[0] != actual[1]
