"""Where trials run, and what is refused before. The reading of a GPU is made up; the process that uses it is real."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from infra.device.gpu import GpuState
from infra.device.hardware import cpu_info, gpu_info
from infra.errors import UserError
from train.estimate.memory import predict_peak
from train.resolved import resolve
from tune.config import SearchConfig
from tune.experiment import machines as device
from tune.experiment.machines import trial_resources

IDLE = GpuState("H200", "570", 140 * 10**9, 10**9, None, (), 1980, 700.0, 40, 0)


@pytest.fixture
def neighbor() -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", "input('their training')"], stdin=subprocess.PIPE) as process:
        yield process.pid
        process.kill()


def search(kind: str) -> SearchConfig:
    return replace(SearchConfig(), training=SearchConfig().training.replace(device=kind))


def machines(config: SearchConfig, state: GpuState | None) -> tuple[device.Machine, ...]:
    """The machines for the trials of ``config`` where NVML reports ``state``."""
    return device.trial_machines(
        config.training.dataset, config.training.execution, "", cluster=config.cluster,
        parallel=config.max_concurrent_trials, examine=lambda: (state, gpu_info(state) if state else cpu_info()),
    )  # fmt: skip


def kind(config: SearchConfig, state: GpuState | None) -> str:
    (machine,) = machines(config, state)
    return machine.device.kind


def test_a_gpu_in_use_is_refused_with_its_process(neighbor: int) -> None:
    with pytest.raises(UserError, match="CUDA_VISIBLE_DEVICES") as refusal:
        machines(search("auto"), replace(IDLE, other_processes=(neighbor,)))
    assert f"H200 is in use by process {neighbor} (" in str(refusal.value)
    assert "their training" in str(refusal.value)


def test_a_parent_process_does_not_count_as_another_user_of_the_gpu() -> None:
    assert kind(search("auto"), replace(IDLE, other_processes=(os.getppid(),))) == "cuda"


def test_weights_gradients_and_optimizer_must_fit() -> None:
    """GPT-2 124M has 16 bytes a parameter of them: 2 GB."""
    training = resolve(search("cpu").training, cpu_info())
    smallest, model = predict_peak(training.step.replace(micro_batch=1)), training.model.text
    with pytest.raises(UserError, match=r"less than the 1\.99 GB"):
        device.choose_memory_limit(19 * 10**8, 10**12, smallest, model)
    assert device.choose_memory_limit(2 * 10**9, 10**12, smallest, model) == 2 * 10**9
    assert device.choose_memory_limit(None, 3 * 10**9, smallest, model) == 3 * 10**9
    limit = device.choose_memory_limit(3 * 10**9, 25 * 10**8, smallest, model)
    assert limit == 3 * 10**9, "as requested, on whichever machine"


def test_a_trial_gets_what_the_largest_node_has() -> None:
    nodes = [{"CPU": 16.0, "GPU": 4.0}, {"CPU": 6.0, "GPU": 2.0}, {"CPU": 8.0}, {"CPU": 0.0, "memory": 1.0}]
    training = search("auto").training
    assert trial_resources(nodes, training.dataset, training.execution, use_gpu=False) == {"CPU": 16.0}
    with_gpu = trial_resources(nodes, training.dataset, training.execution, use_gpu=True)
    assert with_gpu == {"CPU": 4.0, "GPU": 1}, "a GPU's share of its machine"


def test_a_process_that_cannot_be_seen_is_named_by_its_number() -> None:
    with pytest.raises(UserError, match="in use by process 4194305, which"):
        machines(search("cuda"), replace(IDLE, other_processes=(2**22 + 1,)))


def test_what_trials_run_on() -> None:
    assert kind(search("auto"), IDLE) == "cuda"
    assert kind(search("cpu"), IDLE) == "cpu"
    assert kind(search("auto"), None) == "cpu"
    with pytest.raises(UserError, match=r"--device cuda.* --device cpu"):
        machines(search("cuda"), None)
    with pytest.raises(UserError, match="--max-concurrent-trials 2"):
        machines(replace(search("cpu"), max_concurrent_trials=2), None)


def test_a_cluster_without_a_core_is_refused() -> None:
    training = search("cpu").training
    with pytest.raises(UserError, match="no CPU cores for trials"):
        trial_resources([{"memory": 1.0}], training.dataset, training.execution, use_gpu=False)
