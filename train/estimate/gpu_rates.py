"""A GPU to plan for, which need not be in this machine: its properties and its rates."""

from collections.abc import Mapping
from dataclasses import dataclass

from infra.ceilings import matmul_rate_of, read_record
from infra.device.hardware import CARDS, DeviceFacts, peak_flops
from infra.errors import UserError
from infra.schema import from_json

BANDWIDTH = {"A100": 1.555e12, "H100": 3.35e12, "H200": 4.8e12}
"""Bytes/s of a GPU's memory, by NVIDIA's datasheets (A100 with 40 GB, H100 and H200 SXM)."""

REACHED = 271 / 312
"""Fraction of the datasheet's rates that large matrix products and copies reach, from TFLOP/s on an A100 SXM."""


@dataclass(frozen=True)
class Card:
    """A GPU with the rates of its large matrix products and copies."""

    facts: DeviceFacts
    matmul: Mapping[str, float]
    """FLOP/s by precision, with infra.doctor's names: bf16, tf32 and fp32."""
    bandwidth: float
    """Bytes/s read and written within the GPU's memory."""
    source: str
    """Origin of the rates as a text."""

    def products(self, precision: str) -> float | None:
        """FLOP/s of matrix products in a resolved ``precision``; None if it is unknown."""
        return matmul_rate_of({"matmul": self.matmul}, precision)


def planned(gpu: str) -> Card:
    """The GPU of ``--gpu``. Raises ``UserError`` if it is neither a known name nor a file of the doctor."""
    if gpu in CARDS:
        peaks = {kind: peak_flops(gpu, kind) for kind in ("bf16", "tf32", "fp32")}
        matmul = {kind: REACHED * peak for kind, peak in peaks.items() if peak}
        return Card(CARDS[gpu], matmul, REACHED * BANDWIDTH[gpu], f"{REACHED:.0%} of the datasheet's rates")
    record = read_record(gpu, "--gpu")
    if record is None:
        raise UserError(
            f"--gpu {gpu} is neither a file nor a known GPU. Use {', '.join(CARDS)}, or the runs/doctor.json that "
            "'python -m infra.doctor' writes on a machine with the GPU."
        )
    try:
        facts = from_json(DeviceFacts, record["facts"], f"--gpu {gpu}")
        if facts.kind == "cuda":
            return Card(facts, record["matmul"], record["copy"]["within the device"], f"the rates measured in {gpu}")
    except (KeyError, TypeError):
        pass
    raise UserError(
        f"--gpu {gpu} contains no measured GPU rates. Run 'python -m infra.doctor' on a machine with that GPU."
    )
