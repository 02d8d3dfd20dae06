"""Data that workers exchange in a step, and whether the network slows training down.

The bytes on the bus are counted as in NCCL's tests: each byte crosses it (n - 1) / n times in a gather or a scatter,
and twice as often in an all-reduce. The time of an exchange is these bytes divided by the bus bandwidth.
"""

from typing import Any, NamedTuple

from infra.ceilings import find_matmul_rate, read_record
from train.config import Batch, Execution
from train.model_config import ModelSpec


class Exchange(NamedTuple):
    """The data that one worker sends in a step, and the arithmetic that can overlap with sending them."""

    description: str
    """The exchanged tensors, and how often they are exchanged, as a text."""
    bytes: float
    """Bytes that cross the bus."""
    flops: float
    """FLOPs of this worker that can overlap with the exchange."""
    overlaps_with: str
    """Part of the step that can overlap with the exchange."""


def step_exchange(model: ModelSpec, batch: Batch, shard: bool) -> Exchange:
    """Return the exchange of a worker in a step, with 4 bytes for each weight and gradient."""
    crossing_bytes = (batch.workers - 1) / batch.workers * 4 * model.parameters
    micro_batch = model.flops_per_token * batch.micro_batch * model.context_length
    if shard:
        return Exchange(
            "weights gathered twice per micro-batch, gradients scattered once (FSDP)",
            (2 * batch.accumulation + 1) * crossing_bytes,
            batch.accumulation * micro_batch,
            "the whole step",
        )
    return Exchange(
        "gradients averaged once (DDP)",
        2 * crossing_bytes,
        2 / 3 * micro_batch,
        "the backward pass of the last micro-batch",
    )


def network_rows(model: ModelSpec, batch: Batch, execution: Execution, doctor_file: str) -> list[tuple[str, str]]:
    """Time of a step's exchange at the bandwidth in ``doctor_file``, and the part that arithmetic cannot hide."""
    description, size, overlapping_flops, overlaps_with = step_exchange(model, batch, execution.fsdp)
    rows = [("network", f"{size / 1e9:.3g} GB per step on the bus: {description}")]
    measured = _read_all_reduce(doctor_file)
    matmul_rate = find_matmul_rate(measured, execution.precision) if measured else None
    if not matmul_rate:
        command = f"python -m infra.doctor --workers {batch.workers}"
        unknown = f"not in {doctor_file}; '{command}' measures it"
        return [*rows, ("bandwidth", unknown)]
    bandwidth = max(measured["bus_bytes_per_second"].values())
    seconds, hidden = size / bandwidth, overlapping_flops / matmul_rate
    overlap = f"{overlaps_with} takes {hidden:.3g} s at the matmul rate of {measured['device']}"
    rows += [
        (
            "bandwidth",
            f"{bandwidth / 1e9:.3g} GB/s on the bus of {measured['workers']} workers ({measured['backend']})",
        ),
        ("exchange", f"{seconds:.3g} s; {overlap}"),
    ]
    if seconds <= hidden:
        return [*rows, ("verdict", "not network-bound: the exchange overlaps with arithmetic")]
    step = model.flops_per_token * batch.global_batch * model.context_length / batch.workers / matmul_rate
    slowdown = (step + seconds - hidden) / step
    verdict = f"network-bound: a step takes {seconds - hidden:.3g} s longer (x{slowdown:.3g})"
    return [*rows, ("verdict", verdict)]


def _read_all_reduce(file: str) -> dict[str, Any]:
    """Return the doctor's measurements of several workers in ``file``; empty if there are none."""
    all_reduce = (read_record(file, "--doctor-file") or {}).get("allreduce", {})
    return all_reduce if "matmul" in all_reduce else {}
