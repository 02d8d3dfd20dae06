"""A GPU to plan for, which need not be in this machine: its properties and its rates."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from infra.ceilings import find_matmul_rate, read_record
from infra.cli.units import GB, format_size
from infra.device.gpu_models import find_gpu_model
from infra.device.gpu_report import is_gpu_report, parse_report
from infra.device.hardware import KNOWN_GPUS, DeviceInfo
from infra.errors import UserError
from infra.schema import from_json
from train.config import ALL_GPUS

ACHIEVABLE_FRACTION = 271 / 312
"""Fraction of the datasheet's rates that large matrix products and copies reach, from TFLOP/s on an A100 SXM."""


@dataclass(frozen=True)
class GpuRates:
    """A GPU with the rates of its large matrix products and copies."""

    device_info: DeviceInfo
    """Properties of the GPU."""
    matmul: Mapping[str, float]
    """FLOP/s by precision, with infra.doctor's names: bf16, tf32 and fp32."""
    bandwidth: float
    """Bytes/s read and written within the GPU's memory."""
    source: str
    """Origin of the rates as a text."""

    def matmul_rate(self, precision: str) -> float | None:
        """Return the FLOP/s of matrix products in a resolved ``precision``; None if it is unknown."""
        return find_matmul_rate({"matmul": self.matmul}, precision)

    def with_memory_limit(self, limit: int | None) -> "GpuRates":
        """Return the GPU for a process that may use ``limit`` bytes; None means all of its memory.

        Raises ``UserError`` if the GPU has less memory.
        """
        memory = self.device_info.memory
        if limit is not None and limit > memory:
            raise UserError(
                f"--memory-limit {format_size(limit)} is above the {memory / GB:.1f} GB of {self.device_info.name}. "
                "Use less, or remove --memory-limit."
            )
        return replace(self, device_info=self.device_info.with_memory_limit(limit))


def published_rates(device_info: DeviceInfo) -> GpuRates | None:
    """Return the rates to expect of a GPU by its datasheet; None if they are unknown."""
    model = find_gpu_model(device_info.name)
    if model is None:
        return None
    matmul = {kind: ACHIEVABLE_FRACTION * model.peak(kind) for kind in ("bf16", "tf32", "fp32")}
    source = f"{ACHIEVABLE_FRACTION:.0%} of the datasheet's rates"
    return GpuRates(device_info, matmul, ACHIEVABLE_FRACTION * model.memory_bandwidth, source)


def load_gpu_rates(gpu: str) -> GpuRates:
    """Return the GPU of ``--gpu``. Raises ``UserError`` if it is neither a known name nor a file of the doctor."""
    if gpu == ALL_GPUS:
        raise UserError(f"--gpu {ALL_GPUS} is only supported by train.plan. Use one GPU, such as --gpu A100.")
    if gpu in KNOWN_GPUS and (gpu_rates := published_rates(KNOWN_GPUS[gpu])):
        return gpu_rates
    record = read_record(gpu, "--gpu")
    if record is None:
        raise UserError(
            f"--gpu {gpu} is neither a file nor a known GPU. Use {', '.join(KNOWN_GPUS)}, or the runs/doctor.json that "
            "'python -m infra.doctor' writes on a machine with the GPU."
        )
    if is_gpu_report(record) and parse_report(record, f"--gpu {gpu}").simulated:
        raise UserError(
            f"--gpu {gpu} is the report of a simulated GPU, which has no rates. Use the report of a real one."
        )
    try:
        device_info = from_json(DeviceInfo, record["facts"], f"--gpu {gpu}")
        if device_info.kind == "cuda":
            return GpuRates(
                device_info, record["matmul"], record["copy"]["device_to_device"], f"the rates measured in {gpu}"
            )
    except (KeyError, TypeError):
        pass
    raise UserError(
        f"--gpu {gpu} contains no measured GPU rates. Run 'python -m infra.doctor' on a machine with that GPU."
    )
