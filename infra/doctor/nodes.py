"""The machines of a Ray cluster, each as a process on it reports itself, compared with the driver's."""

import os
import platform
import shutil
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from infra import host
from infra.cluster import connected
from infra.errors import UserError, first_line
from infra.gpu import read_gpu
from infra.machines import ask_nodes
from infra.storage import TEMPORARY
from infra.storage_dir import StorageDir, scratch
from infra.units import GB

ANSWER_SECONDS = 45.0
"""How long a machine may take to report itself: a process must start there."""
STORAGE_SECONDS = 60.0
"""How long it may take to reach the storage; its requests are repeated where they fail."""
STORAGE_BYTES = 4 << 20
SPARE = 20 * 10**9
"""Free scratch space below which copies of data sets and runs are in danger."""
MEASURE_SECONDS = 120.0
"""How long it may take to start a process with torch and to measure its matrix products."""
CLOCK_PATIENCE = 5.0
"""How long a machine may take to tell its clock's time."""
CLOCK_SECONDS = 1.0
"""Difference of clocks above which the times of a run and of its machine's logs cannot be compared."""


@dataclass(frozen=True)
class MachineReport:
    """What a machine reports about itself. Memory in bytes."""

    python: str
    versions: dict[str, str]
    gpus: list[str]
    memory: int
    load: float
    scratch: str
    scratch_free: int


@dataclass(frozen=True)
class Rates:
    """How fast a machine multiplies matrices: FLOP/s by precision, on one GPU or, without one, on all cores."""

    machine: str
    device: str
    """The GPU as torch names it, or cpu."""
    matmul: dict[str, float]


@dataclass
class Report:
    """One machine of the cluster."""

    name: str
    cores: int
    machine: MachineReport | None = None
    """None when it did not answer."""
    clock: float | None = None
    """Seconds that its clock is ahead of the driver's."""
    storage: dict[str, float] = field(default_factory=dict)
    """Bytes/s written and read, by ``up`` and ``down``."""
    rates: Rates | None = None
    """None where nothing was measured."""
    problems: dict[str, bool] = field(default_factory=dict)
    """Sentences, each with whether training would fail."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def reach(place: StorageDir) -> dict[str, float]:
    """Bytes/s of writing and reading a file of a few MB at ``place``."""
    name = f"{TEMPORARY}{socket.gethostname()}-{os.getpid()}"
    content = os.urandom(STORAGE_BYTES)
    began = time.perf_counter()
    place.write(name, content)
    written = time.perf_counter()
    try:
        if place.read(name) != content:
            raise UserError(f"{place / name} reads differently from what was written")
        return {"up": STORAGE_BYTES / (written - began), "down": STORAGE_BYTES / (time.perf_counter() - written)}
    finally:
        place.remove([name])


def clock() -> float:
    return time.time()


def describe() -> MachineReport:
    hidden = os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # Ray hides all GPUs from what asked for none
    try:
        cards = [state for index in range(16) if (state := read_gpu(index))]
    finally:
        if hidden is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = hidden
    found = {}
    for package in ("ray", "torch"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "missing"
    folder = scratch()
    return MachineReport(
        platform.python_version(), found, [f"{card.name} {card.memory_total / GB:.0f} GB" for card in cards],
        host.total_memory(), os.getloadavg()[0], str(folder), shutil.disk_usage(folder).free,
    )  # fmt: skip


def rates() -> Rates:
    from infra.doctor import ceilings

    device, name = ceilings.first_device()
    return Rates(socket.gethostname(), name, ceilings.matmul_rates(device))


def examine(address: str, storage: StorageDir | None = None, *, measure: bool = False) -> list[Report]:
    """A report for each live machine of the cluster at ``address``. Raises ``UserError`` when nothing answers there.

    Each reaches for ``storage``, and where ``measure`` multiplies matrices on a free GPU, or on all its cores.
    """
    with connected(address):
        import ray

        nodes = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
        reports = {
            node: Report(found["NodeManagerHostname"], int(found["Resources"].get("CPU", 0)))
            for node, found in sorted(nodes.items(), key=lambda item: item[1]["NodeManagerHostname"])
        }
        own, answers = describe(), ask_nodes(list(reports), describe, seconds=ANSWER_SECONDS)
        for node, report in reports.items():
            if isinstance(answer := answers.get(node), MachineReport):
                report.machine = answer
                report.problems |= compare(answer, own)
            else:
                report.problems[f"does not answer: {_why(answer, ANSWER_SECONDS)}"] = True
        there = {node: report for node, report in reports.items() if report.machine}
        for node, report in there.items():
            report.clock = _clock_difference(node)
            if report.clock is not None and abs(report.clock) > CLOCK_SECONDS:
                problem = f"its clock is {report.clock:+.1f} s off this machine's: set it by NTP"
                report.problems[problem] = False
        answers = ask_nodes(list(there), reach, storage, seconds=STORAGE_SECONDS) if storage else {}
        for node, report in there.items() if storage else ():
            if isinstance(answer := answers.get(node), dict):
                report.storage = answer
            else:
                report.problems[f"cannot use {storage}: {_why(answer, STORAGE_SECONDS)}"] = True
        if measure:
            _measure(there, {node: "GPU" in nodes[node]["Resources"] for node in there})
        return list(reports.values())


def _measure(reports: Mapping[str, Report], has_gpu: Mapping[str, bool]) -> None:
    """Measure the matrix products of those machines, by their node ids, that have a GPU or cores."""
    needs = {
        node: {"num_gpus": 1} if has_gpu[node] else {"num_cpus": report.cores}
        for node, report in reports.items()
        if has_gpu[node] or report.cores
    }
    answers = ask_nodes(list(needs), rates, seconds=MEASURE_SECONDS, needs=needs)
    for node in needs:
        if isinstance(answer := answers.get(node), Rates):
            reports[node].rates = answer
        else:
            why = _why(answer, MEASURE_SECONDS)
            problem = f"its matrix products were not measured ({why}): other work has its GPU or cores"
            reports[node].problems[problem] = False


def compare(machine: MachineReport, own: MachineReport) -> dict[str, bool]:
    """The problems of ``machine``, given the driver's ``own``: each with whether Ray or training would fail."""
    found = {}
    for name, theirs, ours in [
        ("Python", machine.python, own.python),
        *((name, machine.versions[name], own.versions[name]) for name in own.versions),
    ]:
        if theirs.partition("+")[0] != ours.partition("+")[0]:  # a build for CUDA and one for the CPU work together
            fatal = name == "ray" or theirs == "missing" or theirs.split(".")[:2] != ours.split(".")[:2]
            found[f"{name} is {theirs} and here {ours}: install the same version"] = fatal
    if machine.scratch_free < SPARE:
        free = machine.scratch_free / 1e9
        found[f"{machine.scratch} has {free:.1f} GB free: make room for data and checkpoints, or set TMPDIR"] = False
    return found


def _why(answer: Exception | None, seconds: float) -> str:
    """Why a machine has not answered as it should, within ``seconds``."""
    return first_line(getattr(answer, "cause", answer)) if answer else f"nothing within {seconds:.0f} s"


def _clock_difference(node: str) -> float | None:
    """Seconds that the clock of a machine is ahead of ours, by the fastest of three questions."""
    best: tuple[float, float] | None = None
    for _ in range(3):
        asked = time.time()
        there = ask_nodes([node], clock, seconds=CLOCK_PATIENCE).get(node)
        answered = time.time()
        if not isinstance(there, float):
            break
        took = answered - asked
        if best is None or took < best[0]:
            best = (took, there - (asked + answered) / 2)
    return best and best[1]
