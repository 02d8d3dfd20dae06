"""The maximum rates of this machine: matrix products by precision, memory copies, and disk reads.

A datasheet's peak assumes clocks and cooling that a machine may not have, so runs are also compared with the measured
rate of matrix products. Each rate, in FLOP/s or bytes/s, is the fastest of several repetitions: a ceiling, not an
average.
"""

import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from infra.errors import UserError
from infra.storage.directory import StorageDir

DOCTOR_FILE = "doctor.json"
"""Name of the file in the folder of runs that has the measured rates."""
MEASUREMENT_SECONDS = 0.4
"""Duration of the measurement of one rate; all measurements together take well under a minute."""
REPETITIONS_PER_TIMING = 8
"""Repetitions of the work on a GPU between two timing events, so that the launch adds little time to each."""

Measure = Callable[[Callable[[], object], torch.device], float]
"""Function that runs work on a device and returns the seconds that it took."""


def select_device(*, use_gpu: bool = True) -> tuple[torch.device, str]:
    """Return (this machine's first GPU, its name in torch), or (the CPU, ``cpu``)."""
    if not use_gpu or not torch.cuda.is_available():
        return torch.device("cpu"), "cpu"
    device = torch.device("cuda", 0)
    return device, torch.cuda.get_device_name(device)


def measure_seconds(
    work: Callable[[], object],
    device: torch.device,
    *,
    duration: float = MEASUREMENT_SECONDS,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the seconds of the fastest repetition of ``work``, of at least three in ``duration`` after a warm-up."""
    work()
    best = float("inf")
    end_time = clock() + duration
    repetitions = 0
    while repetitions < 3 or clock() < end_time:
        if device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(REPETITIONS_PER_TIMING):
                work()
            end.record()
            end.synchronize()
            best = min(best, start.elapsed_time(end) / 1000 / REPETITIONS_PER_TIMING)
        else:
            started_at = clock()
            work()
            best = min(best, clock() - started_at)
        repetitions += 1
    return best


def measure_matmul_rate(
    rows: int, inner: int, columns: int, precision: str, device: torch.device, measure: Measure = measure_seconds
) -> float:
    """Measure the FLOP/s of one matrix product. ``precision`` is fp32, tf32, fp16 or bf16."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    first_factor = torch.randn(rows, inner, device=device, dtype=dtype)
    second_factor = torch.randn(inner, columns, device=device, dtype=dtype)
    out = torch.empty(rows, columns, device=device, dtype=dtype)
    previous_precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        seconds = measure(lambda: torch.mm(first_factor, second_factor, out=out), device)
    finally:
        torch.set_float32_matmul_precision(previous_precision)
    return 2 * rows * inner * columns / seconds


def measure_matmul_rates(device: torch.device) -> dict[str, float]:
    """Measure the FLOP/s of a large square matrix product by precision.

    A CPU is only measured in fp32, because it may emulate the other precisions, as a GPU before Ampere emulates bf16.
    """
    if device.type != "cuda":
        return {"fp32": measure_matmul_rate(2048, 2048, 2048, "fp32", device)}
    has_bf16 = torch.cuda.get_device_capability(device) >= (8, 0)
    precisions = ("bf16", "tf32", "fp32") if has_bf16 else ("fp16", "fp32")
    return {precision: measure_matmul_rate(8192, 8192, 8192, precision, device) for precision in precisions}


def measure_copy_rates(device: torch.device, measure: Measure = measure_seconds) -> dict[str, float]:
    """Measure memory copies by name, in bytes/s.

    A copy within the device counts bytes read and written; a GPU also has copies from pinned and pageable host memory.
    """
    size = 2**30 if device.type == "cuda" else 2**27
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    rates = {"device_to_device": 2 * size / measure(lambda: target.copy_(source), device)}
    if device.type == "cuda":
        for name, pinned in (("host_to_device_pinned", True), ("host_to_device_pageable", False)):
            host = torch.ones(2**28, dtype=torch.uint8, pin_memory=pinned)
            on_device = target[: 2**28]
            seconds = measure(lambda to=on_device, host=host: to.copy_(host, non_blocking=True), device)
            rates[name] = 2**28 / seconds
    return rates


DISK_FILE_BYTES = 2**28
"""Size of the file with which disk reads are measured."""


def measure_disk_rate(folder: Path) -> float:
    """Measure the bytes/s of reading a new file in ``folder`` after the kernel was advised to uncache it.

    If the kernel keeps the file in memory (tmpfs), the result is the memory's speed. Raises ``OSError`` on a full disk.
    """
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".disk-") as file:
        block = os.urandom(2**22)
        for _ in range(DISK_FILE_BYTES // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        started_at = time.perf_counter()
        with Path(file.name).open("rb", buffering=0) as reader:
            while reader.read(2**22):
                pass
        return DISK_FILE_BYTES / (time.perf_counter() - started_at)


def read_record(file: str, option: str) -> dict[str, Any] | None:
    """Read the measured rates in the doctor's ``file``; return None if the file does not exist.

    If the file is not JSON, raises a ``UserError`` that begins with ``option``, the flag that names the file.
    """
    path = StorageDir.of(file)
    try:
        record = json.loads(path.parent.read(path.name))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as damage:
        raise UserError(
            f"{option} {file} cannot be read as JSON: {damage}. Run 'python -m infra.doctor' again."
        ) from damage
    return record if isinstance(record, dict) else {}


def read_matmul_rate(out: StorageDir, device: str, precision: str, machine: str) -> float | None:
    """Read the FLOP/s of a matrix product in ``precision`` on ``device`` from the doctor's file in ``out``.

    Returns None if it was not measured. A GPU is identified by its name; CPUs share one name, so a CPU's rate must have
    been measured on ``machine``.
    """
    try:
        record = json.loads(out.read(DOCTOR_FILE))
    except (OSError, ValueError, UserError):  # A finished run must be saved even without the doctor's file.
        return None
    for measured in (record, *(rates for node in record.get("nodes", []) if (rates := node.get("rates")))):
        if measured.get("device") == device and (device != "cpu" or measured.get("machine") == machine):
            return find_matmul_rate(measured, precision)
    return None


def find_matmul_rate(record: Mapping[str, Any], precision: str) -> float | None:
    """Return the FLOP/s of a matrix product in ``precision`` from a device's measured rates; None if unknown."""
    rates: Mapping[str, float] = record.get("matmul", {})
    # fp16 has the same rate as bf16, and a GPU without TF32 computes it in fp32.
    measured = ("fp32",) if precision == "fp32" else ("tf32", "fp32") if precision == "tf32" else ("bf16", "fp16")
    return next((rates[name] for name in measured if name in rates), None)
