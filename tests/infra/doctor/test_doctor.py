"""The doctor: it measures the machine, reports problems with their fixes, and saves JSON that ladders read."""

import json
import os
import platform
import re
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch
from mlflow.tracking import MlflowClient

from infra import ceilings
from infra.device.gpu import GpuState
from infra.device.gpu_models import peak_flops
from infra.device.hardware import A100, cpu_info, gpu_info
from infra.device.torch_support import TorchSupport
from infra.doctor import __main__ as doctor
from infra.doctor import allreduce, checks, memory, nodes
from infra.storage.directory import StorageDir
from infra.tracking.store import store_uri

CPU = torch.device("cpu")
CARD = GpuState(
    name="NVIDIA A100-SXM4-40GB", driver="550.1", memory_total=40 * 2**30, memory_used=2**30, process_memory=None,
    other_processes=(), sm_clock=1410, power_limit=400.0, temperature=35, throttle_reasons=0, ecc=True,
)  # fmt: skip


def test_the_whole_examination(
    command: Callable[..., int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert command(doctor.main, "--out", "runs") == 0
    output = capfd.readouterr()
    assert "refuses" not in output.err
    found = json.loads(Path("runs/doctor.json").read_text())
    for rate, unit in ((found["matmul"]["fp32"] / 1e12, "TFLOP/s"), (found["copy"]["device_to_device"] / 1e9, "GB/s")):
        assert f"{rate:,.2f} {unit}" in output.out, "what is kept is what is shown"
    left, runs, here = Path("runs/doctor.json"), StorageDir.of("runs"), socket.gethostname()
    assert ceilings.read_matmul_rate(runs, found["device"], "fp32", here) == found["matmul"]["fp32"]
    assert ceilings.read_matmul_rate(runs, found["device"], "fp16", here) == found["matmul"].get("bf16")
    assert ceilings.read_matmul_rate(runs, "another", "fp32", here) is None
    assert ceilings.read_matmul_rate(runs, "cpu", "fp32", "another machine") is None
    assert ceilings.read_matmul_rate(StorageDir.of("nothing"), "cpu", "fp32", here) is None
    assert command(doctor.main, "--out", "runs", "--quick") == 0
    assert json.loads(left.read_text()) == found, "what was measured stays"
    left.write_text(json.dumps({"device": "cpu", "machine": here, "checks": []}))
    assert ceilings.read_matmul_rate(runs, "cpu", "fp32", here) is None
    client = MlflowClient(store_uri())
    (experiment,) = [e for e in client.search_experiments() if e.name == "doctor"]
    runs = client.search_runs([experiment.experiment_id])
    assert sorted("matmul/fp32" in run.data.metrics for run in runs) == [False, True], "the quick one measured nothing"


def test_only_problems_that_prevent_training_change_the_exit_code() -> None:
    def find_version(package: str) -> str:
        if package == "ray":
            raise PackageNotFoundError(package)
        return "1.0"

    busy, missing = wrong(checks.check_cpu(4, 9999.0)), wrong(checks.check_software(find_version=find_version))
    assert "9999.0 of 4 cores" in busy["load"]
    assert "pip install ray" in missing["ray"]
    assert not any(check.prevents_training for check in [*checks.check_cpu(4, 9999.0), *checks.check_software()])
    assert [check.name for check in checks.check_software(find_version=find_version) if check.prevents_training] == [
        "ray"
    ]


WITHOUT_RAY = """
import importlib.metadata
find_version = importlib.metadata.version

def version(package):
    if package == "ray":
        raise importlib.metadata.PackageNotFoundError(package)
    return find_version(package)

importlib.metadata.version = version
"""
"""What Python runs as it starts, so that a process finds no installed Ray."""


def test_a_problem_that_prevents_training_ends_the_command_with_code_1(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_RAY)
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(__file__).parents[3]}"}
    command = [sys.executable, "-m", "infra.doctor", "--quick", "--out", str(tmp_path / "runs")]
    command += ["--tracking-uri", f"sqlite:///{tmp_path}/mlflow.db"]
    process = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 1, process.stderr
    assert "ray: run 'pip install ray'" in process.stdout


def test_the_memory_of_a_context_is_what_is_used_beside_the_allocator() -> None:
    free, reserved = iter([100, 58, 40]), iter([2, 10])
    assert memory.subtract(lambda: next(free), lambda: next(reserved)) == {"context": 40, "kernels": 10}
    free, reserved = iter([100, 100, 100]), iter([2, 10])
    assert memory.subtract(lambda: next(free), lambda: next(reserved)) == {}, "the GPU does not show other processes"
    table = doctor.memory_table({"context": 400_000_000, "kernels": 110_000_000}).markdown()
    assert all(size in table for size in ("0.40", "0.11", "0.51"))
    assert memory.measure_memory(torch.device("cpu")) == {}


@pytest.mark.gpu
def test_the_memory_of_a_context_is_measured() -> None:
    sizes = memory.measure_memory(torch.device("cuda"))
    assert not sizes or 50e6 < sizes["context"] < 2e9


@pytest.mark.parametrize(("load", "busy"), [(2.0, False), (2.1, True)])
def test_a_machine_is_busy_when_other_work_takes_more_than_half_of_its_cores(load: float, busy: bool) -> None:
    assert ("load" in wrong(checks.check_cpu(4, load))) is busy


def test_a_full_disk_is_reported_in_one_sentence(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No file may grow beyond a megabyte, as on a full disk; the disk's speed takes one of 256."""
    monkeypatch.chdir(tmp_path)
    old, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, most))
    try:
        assert "--out" in refused(doctor.main, "--out", "runs")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (old, most))


def test_a_matrix_product_is_two_flops_for_each_multiplication() -> None:
    """Of 64 x 32 and 32 x 16: 32,768 multiplications and as many additions, here in half a second."""
    assert ceilings.measure_matmul_rate(64, 32, 16, "fp32", CPU, lambda work, device: 0.5) == 131_072


def test_a_copy_reads_and_writes_each_byte() -> None:
    """On a CPU 2^27 of them, here in half a second: 2 x 2^27 / 0.5."""
    assert ceilings.measure_copy_rates(CPU, lambda work, device: 0.5) == {"device_to_device": 2**29}


def test_the_best_of_several_repetitions_counts() -> None:
    """But not the first, which warms up."""
    now, times = [0.0], iter([0.001, 0.15, 0.05, 0.1])

    def work() -> None:
        now[0] += next(times)

    assert ceilings.measure_seconds(work, CPU, duration=0.0, clock=lambda: now[0]) == pytest.approx(0.05)
    assert list(times) == [], "three repetitions even where there is no time for them"


def wrong(checks: list[checks.Check]) -> dict[str, str]:
    """The fixes of the checks that found a problem, by the check's name."""
    return {check.name: check.fix for check in checks if check.fix}


def test_a_gpu_that_torch_cannot_use_is_fatal_and_none_is_not() -> None:
    assert not checks.check_missing_gpu(replace(cpu_info(), gpu_absence="no driver")).fix
    unusable = checks.check_missing_gpu(replace(A100, gpu_blocker="torch is a CPU build. Install torch for cu126"))
    assert "A100" in unusable.value
    assert "cu126" in unusable.fix
    assert unusable.prevents_training


def test_what_a_gpu_lacks_is_reported_with_what_is_used_instead() -> None:
    lacking = gpu_info(
        replace(CARD, name="Tesla T4", capability=(7, 5)),
        TorchSupport(allocator_blocker="device not ready", pinned_blocker="cannot pin"),
        is_wsl=False,
    )
    values = {check.name: check.value for check in checks.check_gpu_support(lacking)}
    assert "fp16" in values["bf16"]
    assert "device not ready" in values["expandable segments"]
    assert list(wrong(checks.check_gpu_support(lacking))) == ["pinned memory"]
    assert not wrong(checks.check_gpu_support(A100))


def test_each_problem_has_a_fix() -> None:
    assert wrong(checks.check_gpu(CARD)) == {}
    busy = replace(CARD, other_processes=(4711,), throttle_reasons=0x24)
    fixes = wrong(checks.check_gpu(busy))
    assert "kill 4711" in fixes["other processes on the GPU"]
    assert "power" in str(checks.check_gpu(busy))
    assert "nvidia-smi -pl" in fixes["throttling"]
    hidden = replace(CARD, memory_used=30 * 2**30)
    assert "memory in use" in wrong(checks.check_gpu(hidden))
    assert "MFU" in wrong(checks.check_gpu(replace(CARD, name="Mystery 9000")))["GPU"]
    denied = replace(CARD, driver=None, memory_used=None, nvml_failure="Insufficient Permissions")
    assert "nvidia-smi" in wrong(checks.check_gpu(denied))["NVML"]


def test_attention_that_runs_is_reported() -> None:
    (check,) = checks.check_attention_kernels(CPU)
    assert check.value == "available"


def test_a_mistake_is_refused(refused: Callable[..., str]) -> None:
    for flags in (["--workers", "0"], ["--out", "README.md/runs"]):
        assert flags[0] in refused(doctor.main, *flags)


@pytest.mark.usefixtures("shared_ray")
@pytest.mark.slow
def test_all_reduce_between_two_workers() -> None:
    reduced = allreduce.measure(2)
    assert reduced.backend == "gloo"
    assert reduced.machines == [socket.gethostname()] * 2
    assert reduced.matmul["fp32"] > 1e8
    assert set(reduced.bus_bytes_per_second) == {str(size) for size in allreduce.BUFFER_BYTES}
    assert all(rate > 1e5 for rate in reduced.bus_bytes_per_second.values())


def test_a_clock_is_compared_by_the_fastest_answer() -> None:
    """A slow one says little: the clock was read at any moment of it."""
    pauses = iter([0.5, 0.0, 0.5])

    def read_clock() -> float:
        node_time = nodes.read_clock() + 100
        time.sleep(next(pauses))
        return node_time

    assert nodes.measure_clock_offset(read_clock) == pytest.approx(100, abs=0.2)
    assert nodes.measure_clock_offset(lambda: None) is None


def test_every_precision_has_the_rate_of_its_matrix_products() -> None:
    measured = {"matmul": {"bf16": 756e12, "tf32": 378e12, "fp32": 51e12}}
    rates = {"fp32": 51e12, "tf32": 378e12, "fp16": 756e12, "bf16": 756e12, "bf16-activations": 756e12}
    assert {name: ceilings.find_matmul_rate(measured, name) for name in rates} == rates
    assert ceilings.find_matmul_rate({"matmul": {}}, "fp32") is None
    without_bf16 = {"matmul": {"fp16": 65e12, "fp32": 8e12}}
    assert ceilings.find_matmul_rate(without_bf16, "fp16") == 65e12
    assert ceilings.find_matmul_rate(without_bf16, "tf32") == 8e12


def test_the_peak_of_a_gpu_is_found_by_its_name_and_precision() -> None:
    named = {
        "NVIDIA H200": 989.4e12, "NVIDIA H200 NVL": 835.5e12, "NVIDIA H100 80GB HBM3": 989.4e12,
        "NVIDIA H100 PCIe": 756e12, "NVIDIA A100-SXM4-80GB": 312e12, "NVIDIA GH200 480GB": 989.4e12, "cpu": None,
        "NVIDIA B200": 2250e12, "Tesla T4": 65e12, "NVIDIA RTX A6000": 154.8e12, "NVIDIA GB10": None,
        "NVIDIA GeForce RTX 3060": 25.4e12, "NVIDIA GeForce RTX 4070 Ti SUPER": 88.2e12,
        "NVIDIA GeForce RTX 5090": 209.5e12,
    }  # fmt: skip
    assert {name: peak_flops(name) for name in named} == named
    peaks = {
        precision: peak_flops("NVIDIA A100-SXM4-40GB", precision) for precision in ("fp32", "tf32", "fp16", "bf16")
    }
    assert peaks == {"fp32": 19.5e12, "tf32": 156e12, "fp16": 312e12, "bf16": 312e12}
    assert peak_flops("Tesla V100-SXM2-16GB", "tf32") == peak_flops("Tesla V100-SXM2-16GB", "fp32") == 15.7e12
    assert peak_flops("cpu", "fp32") is None
    assert peak_flops("Tesla T4", "tf32") == peak_flops("Tesla T4", "fp32") == 8.1e12


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA GeForce RTX 3060 Laptop GPU", "NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 3050 Ti",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA H100 80GB HBM3 MIG 3g.40gb", "NVIDIA RTX A5000 Laptop GPU",
    ],
)  # fmt: skip
def test_a_gpu_that_only_resembles_a_known_one_has_no_peak(name: str) -> None:
    assert peak_flops(name) is None


@pytest.mark.gpu
def test_a_gpu_reaches_most_of_its_datasheet() -> None:
    device = torch.device("cuda", 0)
    rates = ceilings.measure_matmul_rates(device)
    peak = peak_flops(torch.cuda.get_device_name(device))
    assert rates["bf16"] > rates["tf32"] > rates["fp32"]
    assert peak is None or 0.4 < rates["bf16"] / peak < 1.05
    assert ceilings.measure_copy_rates(device)["host_to_device_pinned"] > 1e9


def test_the_machines_of_a_cluster_are_reported(
    command: Callable[..., int], cluster: str, working_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert command(doctor.main, "--quick", "--address", cluster) == 0
    assert re.search(rf"(?m)^{socket.gethostname()} +\d+ .*{platform.python_version()} ", capfd.readouterr().out)


def test_another_version_is_a_problem_and_fatal_where_ray_fails() -> None:
    own = nodes.describe_node()
    assert not nodes.compare_machines(replace(own, scratch_free=10**12), own)
    public = own.versions["torch"].partition("+")[0]
    assert not nodes.compare_machines(
        replace(own, scratch_free=10**12, versions=own.versions | {"torch": f"{public}+cu1"}), own
    )
    other = replace(own, python="3.1.0", versions={"ray": "1.0", "torch": f"{public}.1"})
    found = nodes.compare_machines(replace(other, scratch_free=10**9), own)
    assert list(found.values()) == [True, True, False, False]
    assert f"Python is 3.1.0, but {platform.python_version()} on this machine; install the same version" in found
    assert (
        next(reversed(found))
        == f"{own.scratch} has only 1.0 GB free; free disk space for data and checkpoints, or set TMPDIR"
    )


def test_a_machine_that_does_not_answer_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    silent = nodes.NodeReport("w2", 2, problems={"does not respond: no reply within 45 s": True})
    doctor.nodes_table(
        [nodes.NodeReport("w1", 2, nodes.describe_node(), 0.0012, {"up": 5e7, "down": 9e7}), silent]
    ).show()
    output = capfd.readouterr().out
    assert re.search(r"(?m)^w1 .* \+0\.001 .*50, 90", output)
    assert re.search(r"(?m)^w2 .*\?", output)
