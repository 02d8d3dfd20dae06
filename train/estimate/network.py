"""What workers exchange in a step, and whether the network between them slows training down.

An exchange is bandwidth times bytes on the bus, each of which crosses it (n - 1) / n times in a gather or a scatter and
twice as often in an all-reduce, as NCCL's tests count.
"""

from typing import Any, NamedTuple

from infra.doctor.ceilings import matmul_rate_of, read_record
from train.config import TrainConfig
from train.estimate import flops


class Exchange(NamedTuple):
    """What one worker sends in a step, and the arithmetic during which it can do so."""

    what: str
    bytes: float
    """That cross the bus."""
    flops: float
    """Of this worker, while the exchange can go on."""
    beside: str


def exchange(config: TrainConfig) -> Exchange:
    """What a worker of ``config`` exchanges in a step; weights and gradients have 4 bytes per parameter."""
    passed = (config.workers - 1) / config.workers * 4 * flops.parameters(config)
    micro_batch = flops.per_token(config) * config.micro_batch * config.model.context_length
    if config.shard:
        return Exchange(
            "weights gathered twice per micro-batch, gradients scattered once (FSDP)",
            (2 * config.accumulation + 1) * passed,
            config.accumulation * micro_batch,
            "a whole step",
        )
    return Exchange(
        "gradients averaged once (DDP)", 2 * passed, 2 / 3 * micro_batch, "the backward pass of the last micro-batch"
    )


def network_rows(config: TrainConfig, measured: str) -> list[tuple[str, str]]:
    """How long a step's exchange takes by what the file ``measured`` holds, and what of it arithmetic cannot hide."""
    what, size, during, beside = exchange(config)
    rows = [("exchanged per step", f"{size / 1e9:.3g} GB on the bus: {what}")]
    found = _measured(measured)
    arithmetic = matmul_rate_of(found, config.precision) if found else None
    if not arithmetic:
        command = f"python -m infra.doctor --workers {config.workers}"
        return [*rows, ("bandwidth", f"not in {measured}: measure it with '{command}' (--address of the cluster)")]
    rate = max(found["bus_bytes_per_second"].values())
    seconds, hidden = size / rate, during / arithmetic
    rows += [
        ("bandwidth", f"{rate / 1e9:.3g} GB/s on the bus of {found['workers']} workers, {found['backend']}"),
        ("takes", f"{seconds:.3g} s; {beside} takes {hidden:.3g} s at the matmul rate of {found['device']}"),
    ]
    if seconds <= hidden:
        return [*rows, ("verdict", "not network-bound: the exchange can be hidden behind the arithmetic")]
    step = flops.per_token(config) * config.step_tokens / config.workers / arithmetic
    longer = (step + seconds - hidden) / step
    return [
        *rows,
        ("verdict", f"network-bound: a step takes {seconds - hidden:.3g} s longer, {longer:.3g} times as long"),
    ]


def _measured(file: str) -> dict[str, Any]:
    """What the doctor measured of several workers; empty where it has not."""
    reduced = (read_record(file, "--doctor") or {}).get("allreduce", {})
    return reduced if "matmul" in reduced else {}
