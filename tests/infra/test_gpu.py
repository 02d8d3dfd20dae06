"""What is kept of a GPU over a run: the worst of each reading, and nothing that the board did not tell."""

from dataclasses import replace

import pytest

from infra import gpu
from infra.gpu import GpuState, GpuWatch

CARD = GpuState("H200", "570", 140 * 10**9, 10**9, None, (), 1980, 700.0, 40, 0)


def seen(monkeypatch: pytest.MonkeyPatch, *states: GpuState | None) -> dict[str, float] | None:
    """What a watch has seen after these readings."""
    watch = GpuWatch()
    for state in states:
        monkeypatch.setattr(gpu, "read_gpu", lambda state=state: state)
        watch.look()
    return watch.seen


def test_the_worst_of_each_reading_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    hot = replace(CARD, sm_clock=1200, temperature=85, throttle_reasons=0x20)
    assert seen(monkeypatch, CARD, hot, replace(CARD, throttle_reasons=0x4)) == {
        "lowest_clock_mhz": 1200, "highest_celsius": 85, "throttle_reasons": 0x24, "power_limit_watts": 700.0,
    }  # fmt: skip


def test_values_that_are_not_reported_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    silent = replace(CARD, sm_clock=None, temperature=None, throttle_reasons=None, power_limit=None)
    assert seen(monkeypatch, silent) == {}
    assert seen(monkeypatch, silent, CARD, silent) == seen(monkeypatch, CARD)
    assert seen(monkeypatch, None) is None
