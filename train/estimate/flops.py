"""FLOP/s of a run as a fraction of the device's peak and of its measured matmul rate, and the unit of its compute."""

from dataclasses import replace

from infra.ceilings import read_matmul_rate
from infra.storage.directory import StorageDir
from train.config import Precision
from train.result import RunResult

PF_DAY = 1e15 * 86400
"""FLOPs of a day at 10^15 FLOP/s, 8.64e19."""


def with_matmul_efficiency(result: RunResult, precision: Precision, workers: int, out: StorageDir) -> RunResult:
    """Return ``result`` with its FLOP/s as a fraction of the matmul rate in the doctor's file in ``out``."""
    rate = read_matmul_rate(out, result.device, precision, result.machine)
    if not rate or not result.flops_per_second:
        return result
    return replace(result, matmul_utilization=result.flops_per_second / (rate * workers))


def utilization(tokens_per_second: float, flops_per_token: float, peak: float | None, devices: int) -> float | None:
    """Return the fraction of ``peak`` (FLOP/s of one device) that training uses; None if the peak is unknown."""
    return tokens_per_second * flops_per_token / (peak * devices) if peak else None
