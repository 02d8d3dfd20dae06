"""The cap that a memory limit sets on a card, by a stand-in for CUDA: what torch gets beside the process itself."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from infra.device import host
from infra.device.gpu import GpuState
from train.loop import memory, memory_limit
from train.loop.memory_limit import RESERVED_OUTSIDE_ALLOCATOR, MemoryLimit, cap_to_free_memory
from train.result import Memory

GB = 10**9
TOTAL = 80 * GB
IDLE = GpuState("H100", "570", TOTAL, 2 * GB, None, (), 1980, 700.0, 40, 0)
KERNELS = 64 * 2**20
"""What torch's allocator holds once its libraries have run."""


class Card:
    """A stand-in for CUDA: what was done in which order, and the share of the card that torch may take."""

    def __init__(self, context: int, *, hidden: bool = False, integrated: bool = False) -> None:
        self.did: list[str] = []
        self.context = context
        self.hidden = hidden
        self.fraction: float | None = None
        self.cuda = SimpleNamespace(
            init=lambda: self.did.append("init"),
            current_device=lambda: 0,
            max_memory_reserved=lambda device: KERNELS,
            get_device_properties=lambda device: SimpleNamespace(total_memory=TOTAL, is_integrated=integrated),
            mem_get_info=lambda device: (TOTAL // 4, TOTAL),
            memory_reserved=lambda device: 0,
            set_per_process_memory_fraction=self.cap,
        )
        self.device = torch.device

    def ones(self, *sizes: int, device: torch.device) -> None:
        self.did.append("ones")

    def mm(self, left: None, right: None) -> None:
        self.did.append("mm")

    def cap(self, fraction: float, device: torch.device) -> None:
        self.did.append("cap")
        self.fraction = fraction

    def state(self, device: int = 0) -> GpuState:
        """What NVML says of the whole card."""
        return replace(IDLE, memory_used=(IDLE.memory_used or 0) + (self.context + KERNELS if "mm" in self.did else 0))

    def peak(self, device: torch.device) -> Memory:
        """What this process took: NVML's word, or where it hides processes torch's own."""
        if self.hidden:
            return Memory(KERNELS, KERNELS, KERNELS, "reserved")
        self.did.append("measure")
        return Memory(KERNELS, KERNELS, self.context + KERNELS, "nvml")


@pytest.fixture
def insert_card(monkeypatch: pytest.MonkeyPatch) -> Callable[[Card], None]:
    """``insert_card(card)``: torch and NVML find this card in the machine."""

    def insert(card: Card) -> None:
        monkeypatch.setattr(memory_limit, "torch", card)
        monkeypatch.setattr(memory_limit, "read_gpu", card.state)
        monkeypatch.setattr(memory, "peak", card.peak)

    return insert


@pytest.mark.parametrize("hidden", [False, True])
def test_the_cap_leaves_room_for_what_torch_does_not_count(insert_card: Callable[[Card], None], hidden: bool) -> None:
    """The context and the libraries, measured when both are there; also where NVML tells the whole card alone."""
    card = Card(context=GB // 2, hidden=hidden)
    insert_card(card)
    imposed = MemoryLimit.apply(40 * GB, "cuda")
    assert card.fraction is not None
    assert card.fraction * TOTAL == pytest.approx(39.5 * GB - RESERVED_OUTSIDE_ALLOCATOR)
    assert [step for step in card.did if step != "measure"] == ["init", "ones", "mm", "cap"]
    used, source = imposed.used()
    assert used == GB // 2 + KERNELS
    assert source == ("device" if hidden else "nvml")


@pytest.mark.parametrize(("size", "fraction"), [(GB // 4, 0.0), (100 * GB, 1.0)])
def test_a_limit_below_the_context_or_above_the_card_is_still_a_share(
    insert_card: Callable[[Card], None], size: int, fraction: float
) -> None:
    card = Card(context=GB // 2)
    insert_card(card)
    MemoryLimit.apply(size, "cuda")
    assert card.fraction == fraction


def test_a_gpu_that_shares_the_hosts_memory_is_capped_without_a_limit(insert_card: Callable[[Card], None]) -> None:
    own = Card(0)
    insert_card(own)
    cap_to_free_memory("cuda")
    assert own.fraction is None
    shared = Card(0, integrated=True)
    insert_card(shared)
    cap_to_free_memory("cuda")
    assert shared.fraction is not None
    assert 0 < shared.fraction * TOTAL < host.available_memory() + GB
    MemoryLimit.apply(TOTAL, "cuda")
    assert 0 < shared.fraction < 1, "also with a limit that is larger"


@pytest.mark.gpu
def test_torch_gets_no_more_than_the_limit_leaves() -> None:
    imposed = MemoryLimit.apply(3 * GB, "cuda")
    try:
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(3 * GB, dtype=torch.uint8, device="cuda")
        taken = torch.empty(2 * GB, dtype=torch.uint8, device="cuda")
        assert 2 * GB < imposed.used()[0] <= 3 * GB
        del taken
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()
