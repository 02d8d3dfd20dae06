"""The step that Inductor makes for a GPU is the recorded one: as many kernels, moving as many bytes.

A change that costs the GPU a pass over the logits, or a cast per weight, is seen here without a GPU. Where the change
is meant, ``make bench-kernels`` records the step anew.
"""

import json
from importlib.metadata import version
from pathlib import Path

import pytest

RECORD = Path(__file__).parents[1] / "benchmarks" / "records" / "kernels.json"

TOLERANCE = 0.02

SHARED = {"sm80": 163 * 2**10, "sm90": 227 * 2**10}
"""Bytes of shared memory that a kernel may take, by the CUDA C++ Programming Guide."""


@pytest.mark.gpu
@pytest.mark.timeout(600)  # two models are lowered
@pytest.mark.parametrize("name", ["bf16-activations, plain loss", "bf16-activations"])
def test_the_step_moves_the_recorded_bytes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    from kernels import STEPS, step  # type: ignore[import-not-found]

    record = json.loads(RECORD.read_text())
    if record["versions"]["torch"].partition("+")[0] != version("torch").partition("+")[0]:
        pytest.skip(f"recorded with torch {record['versions']['torch']}; this is {version('torch')}")
    before, now = record["steps"][name], step(STEPS[name])
    for number in ("kernels", "gigabytes", "of matrix products", "of attention", "of other kernels"):
        assert now[number] == pytest.approx(before[number], rel=TOLERANCE), number


@pytest.mark.gpu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("gpu", ["A100", "H100"])
def test_no_kernel_of_triton_spills_or_exceeds_shared_memory(gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    from kernels import STEPS, resources  # type: ignore[import-not-found]

    found = resources(STEPS["bf16-activations"], gpu)
    assert len({kernel["name"] for kernel in found}) > 20
    assert {kernel["arch"] for kernel in found} <= SHARED.keys()
    assert [kernel for kernel in found if kernel["spilled"] or kernel["shared"] > SHARED[kernel["arch"]]] == []
