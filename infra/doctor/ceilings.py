"""The best rates that this machine reaches: matrix products by precision, copies, and reading from disk.

A datasheet's peak assumes clocks and cooling that a machine may not have, so a run is also compared with what a bare
matrix product reached here. Each rate, in FLOP/s or bytes/s, is that of the fastest of several repetitions: a ceiling,
not an average.
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
from infra.storage_dir import StorageDir

FILE = "doctor.json"
"""What the doctor saves where runs are kept."""
SECONDS = 0.4
"""Time for each rate; all of them together take well under a minute."""
LAUNCHES = 8
"""Repetitions in a row on a GPU, so that the launch of the first one is shared by all."""


def first_device() -> tuple[torch.device, str]:
    """This machine's first GPU and its name as torch has it, or the processor and ``cpu``."""
    if not torch.cuda.is_available():
        return torch.device("cpu"), "cpu"
    device = torch.device("cuda", 0)
    return device, torch.cuda.get_device_name(device)


def best_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest repetition of ``work`` within ``SECONDS``, of at least three, after one to warm up."""
    work()
    best = float("inf")
    until = time.perf_counter() + SECONDS
    repeated = 0
    while repeated < 3 or time.perf_counter() < until:
        if device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(LAUNCHES):
                work()
            end.record()
            end.synchronize()
            best = min(best, start.elapsed_time(end) / 1000 / LAUNCHES)
        else:
            began = time.perf_counter()
            work()
            best = min(best, time.perf_counter() - began)
        repeated += 1
    return best


def matmul_rate(rows: int, inner: int, columns: int, precision: str, device: torch.device) -> float:
    """FLOP/s of one matrix product. ``precision`` is fp32, tf32 or bf16."""
    kind = torch.bfloat16 if precision == "bf16" else torch.float32
    left = torch.randn(rows, inner, device=device, dtype=kind)
    right = torch.randn(inner, columns, device=device, dtype=kind)
    out = torch.empty(rows, columns, device=device, dtype=kind)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        seconds = best_seconds(lambda: torch.mm(left, right, out=out), device)
    finally:
        torch.set_float32_matmul_precision(before)
    return 2 * rows * inner * columns / seconds


def matmul_rates(device: torch.device) -> dict[str, float]:
    """FLOP/s of a large square product by precision; on a CPU fp32 only, since the others may be emulated."""
    if device.type != "cuda":
        return {"fp32": matmul_rate(2048, 2048, 2048, "fp32", device)}
    return {precision: matmul_rate(8192, 8192, 8192, precision, device) for precision in ("bf16", "tf32", "fp32")}


def copy_rates(device: torch.device) -> dict[str, float]:
    """Bytes/s read and written by a copy within the device, and copied to a GPU from pinned and pageable memory."""
    size = 2**30 if device.type == "cuda" else 2**27
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    rates = {"within the device": 2 * size / best_seconds(lambda: target.copy_(source), device)}
    if device.type == "cuda":
        for name, pinned in (("host to device, pinned", True), ("host to device, pageable", False)):
            host = torch.ones(2**28, dtype=torch.uint8, pin_memory=pinned)
            there = target[: 2**28]
            seconds = best_seconds(lambda there=there, host=host: there.copy_(host, non_blocking=True), device)
            rates[name] = 2**28 / seconds
    return rates


DISK_BYTES = 2**28


def disk_rate(folder: Path) -> float:
    """Bytes/s of reading a new file in ``folder`` after the page cache was asked to drop it.

    Where the kernel keeps it anyway (tmpfs), this is the speed of memory. Raises ``OSError`` on a full disk.
    """
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".disk-") as file:
        block = os.urandom(2**22)
        for _ in range(DISK_BYTES // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        began = time.perf_counter()
        with Path(file.name).open("rb", buffering=0) as reader:
            while reader.read(2**22):
                pass
        return DISK_BYTES / (time.perf_counter() - began)


def read_record(file: str, option: str) -> dict[str, Any] | None:
    """What the doctor saved in ``file``; None where there is no such file.

    Raises ``UserError`` that names ``option``, with which it was given, where it is no JSON.
    """
    place = StorageDir.of(file)
    try:
        found = json.loads(place.parent.read(place.name))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as damage:
        raise UserError(f"{option} {file} cannot be read as JSON: {damage}; run infra.doctor again.") from damage
    return found if isinstance(found, dict) else {}


def read_matmul_rate(out: StorageDir, device: str, precision: str, machine: str) -> float | None:
    """FLOP/s of a matrix product in ``precision`` on ``device`` from the doctor's file in ``out``; None if not known.

    A GPU's name says how fast it is. A processor has none here: ``machine`` must be one that was measured.
    """
    try:
        found = json.loads(out.read(FILE))
    except (OSError, ValueError, UserError):  # a run that has ended is kept without it
        return None
    for measured in (found, *(rates for node in found.get("nodes", []) if (rates := node.get("rates")))):
        if measured.get("device") == device and (device != "cpu" or measured.get("machine") == machine):
            return matmul_rate_of(measured, precision)
    return None


def matmul_rate_of(found: Mapping[str, Any], precision: str) -> float | None:
    """FLOP/s of a matrix product in a resolved ``precision`` on the device of which ``found`` has what was measured."""
    kind = precision if precision in ("fp32", "tf32") else "bf16"  # fp16 runs at bf16's rate
    return found.get("matmul", {}).get(kind)
