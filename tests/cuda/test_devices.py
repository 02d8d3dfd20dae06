"""On each device and with each fault a run trains on the GPU, with a line for every fallback, or ends in a sentence.

``make bench-devices`` runs all of them but the bare command, and records what each case printed (DEVICES_RECORD).
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from infra.device.cuda import read_driver
from infra.device.gpu import read_gpu
from infra.device.torch_support import torch_support

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("PRETENDED_GPU" not in os.environ, reason="needs the pretended GPU"),
]

SMALL = ("--model", "tiny", "--global-batch", "8", "--keep-checkpoints", "0")
"""Flags of a run that takes seconds instead of minutes; without a kernel that computes, the model does not matter."""

UNCOMPILED = ("--compile", "off")


@pytest.fixture(autouse=True)
def no_allocator_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training in this process has set it for its children, which would take it for the user's."""
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)


@dataclass(frozen=True)
class Case:
    """A device or a fault, and what the command prints there."""

    name: str
    expected: str
    """Regular expression for the line that names the fallback, or for the sentence."""
    gpu: str = "A100"
    fault: str = ""
    exit_code: int = 0
    flags: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)
    compiles: bool = False
    """Whether the line needs --compile auto in a small run, too."""
    is_slow: bool = False
    """Whether make test-cuda leaves it out, because it takes long and shows what another case shows, too."""


def trains(name: str, expected: str, **options) -> Case:
    return Case(name, expected, **options)


def ends(name: str, expected: str, **options) -> Case:
    return Case(name, expected, exit_code=2, **options)


CASES = (
    trains("A100", r"device cuda.*, precision bf16-activations \(auto\)", is_slow=True),
    trains("T4", r"precision: fp16 with loss scaling, because Tesla T4", gpu="T4"),
    trains("RTX 3060", r"device cuda.*, precision bf16-activations \(auto\)", gpu="RTX3060", is_slow=True),
    trains("RTX 4090", r"device cuda.*, precision bf16-activations \(auto\)", gpu="RTX4090", is_slow=True),
    trains("GB10", r"memory: at most the free .* because the GPU shares the host's memory", gpu="GB10"),
    trains("MIG slice", r"NVML: .*Insufficient Permissions", gpu="MIG", is_slow=True),
    trains("WSL2", r"memory: at most the free .* because WSL2", gpu="WSL2"),
    trains("NVML denied", r"NVML: .*Insufficient Permissions", fault="nvml-denied", is_slow=True),
    trains("NVML unsupported", r"NVML: .*Not Supported", fault="nvml-unsupported", is_slow=True),
    trains("NVML does not start", r"allocator: torch's default .* NVML", fault="nvml-init"),
    trains("NVML in another order", r"GPU \d+\.\d/42\.3 GB", fault="nvml-order", is_slow=True),
    trains("expandable segments refused", r"torch's default .* unknown error", fault="expandable", is_slow=True),
    trains("expandable segments not ready", r"torch's default .* device not ready", fault="not-ready", is_slow=True),
    trains("pinned memory exhausted", r"warning: host memory cannot be pinned", fault="pinned"),
    trains("FlashAttention fails", r"attention flash fails .* using efficient instead", fault="attention"),
    trains("NVML's assertion, memory suffices", r"device cuda", fault="oom-assertion", is_slow=True),
    trains(
        "no compiler", r"warning: torch.compile is off, .*install gcc", variables={"PATH": ""}, compiles=True,
        is_slow=True,
    ),
    ends("V100, no kernels in torch", r"no kernels .* 7\.0\. Install the build of torch for CUDA 12\.6", gpu="V100"),
    ends(
        "two cards, the first without kernels", r"no kernels .* or use NVIDIA A100-.* with CUDA_VISIBLE_DEVICES=GPU-",
        gpu="V100", variables={"PRETENDED_SECOND_GPU": "A100"},
    ),
    trains(
        "two cards, the second selected", r"device cuda.*, precision bf16-activations \(auto\)", gpu="V100",
        variables={"PRETENDED_SECOND_GPU": "A100", "CUDA_VISIBLE_DEVICES": "GPU-7365636f"}, is_slow=True,
    ),
    trains(
        "two cards, the first smaller", r"GPU: .* RTX 3060 with 12\.6 GB is used; CUDA_VISIBLE_DEVICES=GPU-",
        gpu="RTX3060", variables={"PRETENDED_SECOND_GPU": "A100"},
    ),
    ends("driver too old", r"needs a driver for CUDA 13\.0, .* Update the NVIDIA driver, or", fault="driver"),
    ends("CUDA does not start", r"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH \(803\)", fault="init"),
    ends(
        "CUDA does not start, --device cuda", r"SYSTEM_DRIVER_MISMATCH", fault="init", flags=("--device", "cuda"),
        is_slow=True,
    ),
    ends("no such GPU", r"CUDA_VISIBLE_DEVICES=7 names no GPU", variables={"CUDA_VISIBLE_DEVICES": "7"}, is_slow=True),
    ends(
        "--device cuda, hidden GPU", r"--device cuda: no GPU found, because CUDA_VISIBLE_DEVICES has no value",
        variables={"CUDA_VISIBLE_DEVICES": ""}, flags=("--device", "cuda"),
    ),
    ends(
        "the GPU vanishes", r"The GPU failed \(CUDA error: unspecified launch failure\)", fault="vanishes",
        flags=("--steps", "300"),
    ),
    ends(
        "the GPU of a Ray worker vanishes", r"The GPU of .* failed \(CUDA error: .*\)\. Ray restarts the workers",
        fault="vanishes", flags=("--steps", "300", "--address", "local"), is_slow=True,
    ),
    ends(
        "--allocator expandable, refused", r"--allocator expandable does not work on", fault="expandable",
        flags=("--allocator", "expandable"), is_slow=True,
    ),
)  # fmt: skip


def record(row: dict[str, str]) -> None:
    """Add a row to the record that DEVICES_RECORD names: (device or fault, command, outcome, line)."""
    if not (name := os.environ.get("DEVICES_RECORD")):
        return
    file = Path(name)
    about = {"versions": {"torch": torch.__version__, "CUDA": torch.version.cuda}, "rows": []}
    content = json.loads(file.read_text(encoding="utf-8")) if file.exists() else about
    content["rows"].append(row)
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def small_flags(case: Case) -> tuple[str, ...]:
    """Flags of a small run of ``case``."""
    return SMALL if case.compiles else (*SMALL, *UNCOMPILED)


def run(case: Case, data: Path, flags: tuple[str, ...], timeout: float) -> subprocess.CompletedProcess[str]:
    """Run ``python -m train.run`` as ``case`` has it."""
    variables = {"PRETENDED_GPU": case.gpu, "PRETENDED_FAULT": case.fault, **case.variables}
    command = [sys.executable, "-m", "train.run", "--data", str(data), "--steps", "2", *flags, *case.flags]
    return subprocess.run(
        [*command, "--name", "case"], env=os.environ | variables, capture_output=True, text=True, timeout=timeout
    )


def check(case: Case, done: subprocess.CompletedProcess[str], flags: tuple[str, ...]) -> None:
    """Check the exit code, the line, and that what trained did so on the GPU."""
    printed = done.stdout + done.stderr
    text = " ".join(printed.split())
    line = re.search(case.expected, text)
    outcome = f"exit code {done.returncode}"
    file, result = Path("runs/case/result.json"), None
    if file.exists():
        result = json.loads(file.read_text())
        outcome = f"{result['steps']} steps on {result['device']}"
    shown = next((part for part in printed.splitlines() if line and line[0][:30] in part), line[0] if line else "")
    settings = [f"PRETENDED_GPU={case.gpu}"] + [f"PRETENDED_FAULT={case.fault}"] * bool(case.fault)
    settings += [f"{name}={value}" for name, value in case.variables.items()]
    command = " ".join([*settings, "python -m train.run --data DIR --steps 2", *flags, *case.flags])
    record({"case": case.name, "command": command, "outcome": outcome, "line": shown.strip()})
    assert done.returncode == case.exit_code, printed
    assert line, printed
    assert "Traceback" not in printed
    if case.exit_code == 2 and case.fault in ("", "driver", "init"):
        assert not Path("runs/case").exists()
    if case.exit_code == 0:
        assert result
        assert result["steps"] == 2
        assert result["device"] != "cpu"


@pytest.mark.usefixtures("working_folder")
@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.name, marks=[pytest.mark.slow] * case.is_slow) for case in CASES]
)
def test_a_run_trains_on_the_gpu_or_ends_in_a_sentence(case: Case, small_shards: Path) -> None:
    flags = small_flags(case)
    check(case, run(case, small_shards, flags, 300), flags)


@pytest.mark.slow
@pytest.mark.usefixtures("working_folder")
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES if not case.flags])
def test_a_requested_gpu_trains_or_is_refused_in_a_sentence(case: Case, small_shards: Path) -> None:
    flags = (*small_flags(case), "--device", "cuda")
    check(case, run(case, small_shards, flags, 300), flags)


@pytest.mark.slow
@pytest.mark.timeout(1260)
@pytest.mark.usefixtures("working_folder")
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES if not case.flags])
def test_the_bare_command_trains_gpt2_or_ends_in_a_sentence(
    case: Case, make_shards: Callable[..., Path], tmp_path: Path
) -> None:
    """With --data and --steps alone: GPT-2 124M, compiled, which takes minutes, and 491,520 tokens per step."""
    check(case, run(case, make_shards(tmp_path / "tokens", tokens=100_000), (), 1200), ())


@pytest.mark.usefixtures("working_folder")
@pytest.mark.parametrize("fault", ["", pytest.param("oom-assertion", marks=pytest.mark.slow)])
def test_running_out_of_memory_is_an_outcome(small_shards: Path, fault: str) -> None:
    """Also where NVML is refused, which torch before 2.14 reports instead of the memory that ran out."""
    case = Case("out of memory", "out of memory while", gpu="MIG", fault=fault, exit_code=1)
    flags = ("--micro-batch", "40", "--global-batch", "40", "--compile", "off", "--keep-checkpoints", "0")
    check(case, run(case, small_shards, flags, 300), flags)
    assert json.loads(Path("runs/case/result.json").read_text())["outcome"] == "oom"


def test_what_little_memory_can_be_pinned_is_left_to_torch() -> None:
    """Which pins each number that it reads from a GPU, and fails if nothing is left."""
    code = """
import torch
from infra.device.pinned import pinned_like
numbers = [pinned_like(torch.empty(2**20, dtype=torch.uint8)) for _ in range(2)]
torch.empty(1, device="cuda").item()
print(*(number.is_pinned() for number in numbers))
"""
    variables = {"PRETENDED_FAULT": "pinned"}
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | variables, capture_output=True, text=True)
    assert done.stdout == "False False\n", done.stderr


def test_a_gpu_that_torch_uses_in_this_process_is_not_tried_in_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may allow one process only."""
    torch.cuda.init()
    monkeypatch.setenv("PRETENDED_FAULT", "expandable")
    (device,) = read_driver().devices
    support = torch_support(device, (13, 99))  # of a version that no other test has asked for
    assert not support.allocator_blocker
    assert support.free_memory
    assert 0 < support.free_memory < device.memory


def test_nvml_is_asked_for_the_device_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML counts a small card first."""
    monkeypatch.setenv("PRETENDED_FAULT", "nvml-order")
    state = read_gpu()
    assert state
    assert state.memory_used
    assert state.sm_clock
    assert state.memory_total > 40e9


@pytest.mark.parametrize(
    ("gpu", "visible", "is_visible"),
    [
        ("A100", "0", True),
        ("A100", "GPU-70726574", True),
        ("A100", "GPU-70726574-656e-6465-642d-646576696365", True),
        ("MIG", "MIG-70726574-656e-6465-642d-646576696365", True),
        ("A100", "GPU-ffff", False),
        ("A100", "MIG-70726574", False),
        ("A100", "", False),
        ("A100", "-1", False),
        ("A100", "3", False),
    ],
)
def test_cuda_visible_devices_is_what_cuda_makes_of_it(gpu: str, visible: str, *, is_visible: bool) -> None:
    read = (
        "from infra.device.gpu import read_gpu; state = read_gpu(); print(state and (state.name, state.nvml_failure))"
    )
    variables = {"PRETENDED_GPU": gpu, "CUDA_VISIBLE_DEVICES": visible}
    done = subprocess.run(
        [sys.executable, "-c", read], env=os.environ | variables, capture_output=True, text=True, check=True
    )
    assert ("A100" in done.stdout) is is_visible
    if not is_visible:
        assert done.stdout == "None\n"


def test_the_driver_tells_what_the_device_is() -> None:
    (device,) = read_driver().devices
    state = read_gpu()
    assert state
    assert (device.name, device.memory) == (state.name, state.memory_total)
