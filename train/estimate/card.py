"""A GPU that is planned for and need not be here: what it is, and the rates that it reaches."""

from collections.abc import Mapping
from dataclasses import dataclass

from infra.doctor.ceilings import matmul_rate_of, read_record
from infra.errors import UserError
from infra.hardware import CARDS, DeviceFacts, peak_flops
from infra.schema import from_json

BANDWIDTH = {"A100": 1.555e12, "H100": 3.35e12, "H200": 4.8e12}
"""Bytes/s of a card's memory, by NVIDIA's datasheets (A100 with 40 GB, H100 and H200 SXM)."""

REACHED = 271 / 312
"""Share of its datasheet that a card's large matrix products and copies reach, such as TFLOP/s on an A100 SXM."""


@dataclass(frozen=True)
class Card:
    """A GPU, and the rates of its large matrix products and copies."""

    facts: DeviceFacts
    matmul: Mapping[str, float]
    """FLOP/s, as infra.doctor names precisions: bf16, tf32 and fp32."""
    bandwidth: float
    """Bytes/s read and written within the GPU's memory."""
    source: str
    """Where the rates come from, in words."""

    def products(self, precision: str) -> float | None:
        """FLOP/s of matrix products in a resolved ``precision``; None where that is not known."""
        return matmul_rate_of({"matmul": self.matmul}, precision)


def planned(gpu: str) -> Card:
    """The card that ``--gpu`` names. Raises ``UserError`` where it names neither a known one nor a doctor's file."""
    if gpu in CARDS:
        peaks = {kind: peak_flops(gpu, kind) for kind in ("bf16", "tf32", "fp32")}
        matmul = {kind: REACHED * peak for kind, peak in peaks.items() if peak}
        return Card(CARDS[gpu], matmul, REACHED * BANDWIDTH[gpu], f"{REACHED:.0%} of the datasheet's rates")
    found = read_record(gpu, "--gpu")
    if found is None:
        raise UserError(
            f"--gpu {gpu} is neither {', '.join(CARDS)} nor a file: 'python -m infra.doctor' on a machine with a GPU "
            "saves its rates in runs/doctor.json, which can be given here."
        )
    try:
        facts = from_json(DeviceFacts, found["facts"], f"--gpu {gpu}")
        if facts.kind == "cuda":
            return Card(facts, found["matmul"], found["copy"]["within the device"], f"the rates measured in {gpu}")
    except (KeyError, TypeError):
        pass
    raise UserError(
        f"--gpu {gpu} has no rates of a GPU: run 'python -m infra.doctor' anew, on the machine to plan for."
    )
