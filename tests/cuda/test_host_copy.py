"""Checkpoints of a GPU reach the host through two small pinned buffers, with the values of their step."""

import os
from pathlib import Path

import pytest
import torch

from infra.device.pinned import BUFFER_BYTES
from train.run_files import host_copy
from train.run_files.host_copy import PendingCopies, copy_to_host

pytestmark = pytest.mark.gpu


@pytest.fixture(params=[BUFFER_BYTES, 64, None], ids=["large", "small", "none"])
def buffers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers that hold everything, a few values, or that the system does not have."""
    size = request.param
    monkeypatch.setattr(host_copy, "BUFFER_BYTES", size or 64)
    pinned = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)] if size else []
    monkeypatch.setattr(host_copy, "pinned_buffers", lambda: pinned)


@pytest.mark.usefixtures("buffers")
def test_every_layout_and_type_arrives_unchanged() -> None:
    base = torch.arange(3 * 5 * 7, dtype=torch.float32).view(3, 5, 7)
    sources = [
        base, base.transpose(0, 2), base[:, 1:3], base[0, 0].expand(4, 7), torch.tensor(3.5), torch.empty(0, 4),
        base.to(torch.bfloat16), base.to(torch.int64)[1], base > 50,
    ]  # fmt: skip
    copies = PendingCopies()
    targets = [copies.add(source.cuda() if source.is_contiguous() else cuda_like(source)) for source in sources]
    copies.mark_ready()
    copies.run()
    copies.wait()
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(target, source)
        assert target.device.type == "cpu"
        assert not target.is_pinned()


def cuda_like(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the GPU with the strides of ``tensor``, which has no contiguous memory of its own."""
    whole = torch.empty(tensor.untyped_storage().nbytes() // tensor.element_size(), dtype=tensor.dtype)
    whole.set_(tensor.untyped_storage())
    return whole.cuda().as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def test_a_part_of_a_tensor_does_not_take_its_neighbors() -> None:
    """Its bytes begin at an offset."""
    whole = torch.arange(100, dtype=torch.float32, device="cuda")
    target = torch.empty(10)
    copy_to_host([(whole[20:30], target)])
    assert target.tolist() == list(range(20, 30))


@pytest.mark.skipif("PRETENDED_GPU" not in os.environ, reason="measures this machine's memory beside a pretended GPU's")
def test_a_save_needs_little_more_host_memory_than_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
    from checkpoint_memory import run_in_process  # type: ignore[import-not-found]

    measured = run_in_process(layers=2)
    assert measured["peak_bytes"] < measured["state_bytes"] + 200e6
    assert measured["mapped_file_bytes"] < 50e6
