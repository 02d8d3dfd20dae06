"""Checks of the machines of a Ray cluster: a process on each describes it, for comparison with the driver's machine."""

import os
import platform
import shutil
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from infra.device import host
from infra.device.gpu import list_gpus
from infra.errors import UserError, first_line
from infra.ray.cluster import ray_session
from infra.ray.machines import run_on_nodes
from infra.storage.directory import StorageDir
from infra.storage.files import TEMPORARY_PREFIX, scratch

RESPONSE_TIMEOUT_SECONDS = 45.0
"""Time limit for a machine to start a process and describe itself."""
STORAGE_TIMEOUT_SECONDS = 60.0
"""Time limit for a machine to write to and read from the storage, including retries."""
STORAGE_FILE_BYTES = 4 << 20
"""Size of the file with which the storage is measured."""
MIN_FREE_BYTES = 20 * 10**9
"""Minimum free scratch space in bytes for copies of data sets and runs."""
MATMUL_TIMEOUT_SECONDS = 120.0
"""Time limit for a machine to start a process with torch and to measure its matrix products."""
CLOCK_TIMEOUT_SECONDS = 5.0
"""Time limit for a machine to return the time of its clock."""
MAX_CLOCK_OFFSET_SECONDS = 1.0
"""Maximum offset of a clock; beyond it, times of a run do not match the logs of the machine."""


@dataclass(frozen=True)
class MachineReport:
    """Description of a machine by a process on it. Memory and free scratch space are in bytes."""

    python: str
    versions: dict[str, str]
    gpus: list[str]
    memory: int
    load: float
    scratch: str
    scratch_free: int


@dataclass(frozen=True)
class Rates:
    """Measured rates of matrix products of a machine, on one GPU or, without a GPU, on all cores."""

    machine: str
    device: str
    """Name of the GPU in torch, or cpu."""
    matmul: dict[str, float]
    """FLOP/s of matrix products by precision."""


@dataclass
class NodeReport:
    """Results of the checks and measurements of one machine of the cluster."""

    name: str
    cores: int
    machine: MachineReport | None = None
    """Description of the machine; None if the machine did not respond."""
    clock: float | None = None
    """Seconds by which the machine's clock is ahead of the driver's; None if it was not measured."""
    storage: dict[str, float] = field(default_factory=dict)
    """Speed of the storage in bytes/s, for writing (``up``) and reading (``down``)."""
    rates: Rates | None = None
    """Rates of matrix products; None if they were not measured."""
    problems: dict[str, bool] = field(default_factory=dict)
    """Problems of the machine, each with whether it prevents training."""

    def to_json(self) -> dict[str, Any]:
        """Convert the report to JSON values for doctor.json."""
        return asdict(self)


def measure_storage(directory: StorageDir) -> dict[str, float]:
    """Measure the bytes/s of writing and reading a file of a few MB in ``directory``."""
    name = f"{TEMPORARY_PREFIX}{socket.gethostname()}-{os.getpid()}"
    content = os.urandom(STORAGE_FILE_BYTES)
    started_at = time.perf_counter()
    directory.write(name, content)
    written_at = time.perf_counter()
    try:
        if directory.read(name) != content:
            raise UserError(f"{directory / name} differs from the content that was written. Check the storage.")
        read_seconds = time.perf_counter() - written_at
        return {"up": STORAGE_FILE_BYTES / (written_at - started_at), "down": STORAGE_FILE_BYTES / read_seconds}
    finally:
        directory.remove([name])


def read_clock() -> float:
    """Return the time of this machine's clock."""
    return time.time()


def describe_node() -> MachineReport:
    """Describe this machine."""
    versions = {}
    for package in ("ray", "torch"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "missing"
    folder = scratch()
    return MachineReport(
        platform.python_version(), versions, list_gpus(), host.total_memory(), os.getloadavg()[0], str(folder),
        shutil.disk_usage(folder).free,
    )  # fmt: skip


def measure_rates() -> Rates:
    """Measure this machine's matrix products."""
    from infra import ceilings

    device, name = ceilings.select_device()
    return Rates(socket.gethostname(), name, ceilings.measure_matmul_rates(device))


def examine(address: str, out: StorageDir, *, measure: bool = False) -> list[NodeReport]:
    """Check each live machine of the cluster at ``address`` and, if ``out`` is object storage, its access to it.

    With ``measure``, each machine also measures matrix products on a free GPU, or on all its cores. Raises
    ``UserError`` if no cluster responds.
    """
    with ray_session(address):
        import ray

        nodes = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
        reports = {
            node: NodeReport(entry["NodeManagerHostname"], int(entry["Resources"].get("CPU", 0)))
            for node, entry in sorted(nodes.items(), key=lambda item: item[1]["NodeManagerHostname"])
        }
        driver = describe_node()
        responses = run_on_nodes(list(reports), describe_node, seconds=RESPONSE_TIMEOUT_SECONDS)
        for node, report in reports.items():
            if isinstance(response := responses.get(node), MachineReport):
                report.machine = response
                report.problems |= compare_machines(response, driver)
            else:
                report.problems[f"does not respond: {_failure_reason(response, RESPONSE_TIMEOUT_SECONDS)}"] = True
        reachable = {node: report for node, report in reports.items() if report.machine}
        for node, report in reachable.items():
            report.clock = measure_clock_offset(
                lambda node=node: run_on_nodes([node], read_clock, seconds=CLOCK_TIMEOUT_SECONDS).get(node)
            )
            if report.clock is not None and abs(report.clock) > MAX_CLOCK_OFFSET_SECONDS:
                problem = f"its clock differs from this machine's by {report.clock:+.1f} s; synchronize it with NTP"
                report.problems[problem] = False
        if out.local_path is None:
            responses = run_on_nodes(list(reachable), measure_storage, out, seconds=STORAGE_TIMEOUT_SECONDS)
            for node, report in reachable.items():
                if isinstance(response := responses.get(node), dict):
                    report.storage = response
                else:
                    report.problems[f"cannot use {out}: {_failure_reason(response, STORAGE_TIMEOUT_SECONDS)}"] = True
        if measure:
            _measure_matmul(reachable, {node: "GPU" in nodes[node]["Resources"] for node in reachable})
        return list(reports.values())


def _measure_matmul(reports: Mapping[str, NodeReport], has_gpu: Mapping[str, bool]) -> None:
    """Measure matrix products on the machines, by node id, that have a GPU or cores."""
    needs = {
        node: {"num_gpus": 1} if has_gpu[node] else {"num_cpus": report.cores}
        for node, report in reports.items()
        if has_gpu[node] or report.cores
    }
    responses = run_on_nodes(list(needs), measure_rates, seconds=MATMUL_TIMEOUT_SECONDS, needs=needs)
    for node in needs:
        if isinstance(response := responses.get(node), Rates):
            reports[node].rates = response
        else:
            reason = _failure_reason(response, MATMUL_TIMEOUT_SECONDS)
            problem = f"matmul rate not measured ({reason}); its GPU or cores may be in use"
            reports[node].problems[problem] = False


def compare_machines(machine: MachineReport, driver: MachineReport) -> dict[str, bool]:
    """Return problems of ``machine`` compared with the ``driver``'s machine, each with whether it prevents training."""
    problems = {}
    for name, node_version, driver_version in [
        ("Python", machine.python, driver.python),
        *((name, machine.versions[name], driver.versions[name]) for name in driver.versions),
    ]:
        # The part after "+" is the build; builds for CUDA and for the CPU work together.
        if node_version.partition("+")[0] != driver_version.partition("+")[0]:
            is_same_minor = node_version.split(".")[:2] == driver_version.split(".")[:2]
            is_fatal = name == "ray" or node_version == "missing" or not is_same_minor
            problems[f"{name} is {node_version}, but {driver_version} on this machine; install the same version"] = (
                is_fatal
            )
    if machine.scratch_free < MIN_FREE_BYTES:
        free_gb = machine.scratch_free / 1e9
        advice = "free disk space for data and checkpoints, or set TMPDIR"
        problems[f"{machine.scratch} has only {free_gb:.1f} GB free; {advice}"] = False
    return problems


def _failure_reason(response: Exception | None, seconds: float) -> str:
    """Return the error of a machine, or a text that it did not reply within ``seconds``."""
    return first_line(getattr(response, "cause", response)) if response else f"no reply within {seconds:.0f} s"


def measure_clock_offset(read_clock: Callable[[], Any]) -> float | None:
    """Return the seconds by which another machine's clock is ahead of this one's, by the fastest of three readings.

    Returns None if ``read_clock``, which reads the other clock, does not return a time.
    """
    best: tuple[float, float] | None = None
    for _ in range(3):
        sent_at = time.time()
        node_time = read_clock()
        received_at = time.time()
        if not isinstance(node_time, float):
            break
        round_trip = received_at - sent_at
        if best is None or round_trip < best[0]:
            best = (round_trip, node_time - (sent_at + received_at) / 2)
    return best and best[1]
