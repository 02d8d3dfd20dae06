"""The machines of a Ray cluster, each as a process on it reports itself, compared with the driver's.

In: an address, and storage that all of them must reach. Out: a report for each machine, also for one that does not
answer, with its problems and their fixes.
"""

import os
import platform
import shutil
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import psutil

from infra.cluster import connected
from infra.errors import UserError, first_line
from infra.gpu import read_gpu
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
        """The report as JSON values."""
        return asdict(self)


class Probe:
    """An actor on a machine, which describes it."""

    def describe(self) -> MachineReport:
        """This machine."""
        return describe()

    def clock(self) -> float:
        """The time of this machine's clock, in seconds since the epoch."""
        return time.time()

    def storage(self, place: StorageDir) -> dict[str, float]:
        """Bytes/s of writing and reading a file of a few MB at ``place``. Raises ``UserError``."""
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


def describe() -> MachineReport:
    """This machine."""
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
        psutil.virtual_memory().total, os.getloadavg()[0], str(folder), shutil.disk_usage(folder).free,
    )  # fmt: skip


def rates() -> Rates:
    """Measure this machine."""
    from infra.doctor import ceilings

    device, name = ceilings.first_device()
    return Rates(socket.gethostname(), name, ceilings.matmul_rates(device))


def examine(address: str, storage: StorageDir | None = None, *, measure: bool = False) -> list[Report]:
    """A report for each live machine of the cluster at ``address``. Raises ``UserError`` when nothing answers there.

    Each reaches for ``storage``, and where ``measure`` multiplies matrices on a free GPU, or on all its cores.
    """
    with connected(address):
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        actor: Any = ray.remote(num_cpus=0)(Probe)
        nodes = sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: node["NodeManagerHostname"])
        reports = [Report(node["NodeManagerHostname"], int(node["Resources"].get("CPU", 0))) for node in nodes]
        probes = [
            actor.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote()
            for node in nodes
        ]
        own = describe()
        for report, answer in zip(
            reports, _answers([p.describe.remote() for p in probes], ANSWER_SECONDS), strict=True
        ):
            if isinstance(answer, MachineReport):
                report.machine = answer
                report.problems |= compare(answer, own)
            else:
                report.problems[f"does not answer: {answer}"] = True
        there = [(report, probe) for report, probe in zip(reports, probes, strict=True) if report.machine]
        for report, probe in there:
            report.clock = _clock_difference(probe)
            if report.clock is not None and abs(report.clock) > CLOCK_SECONDS:
                problem = f"its clock is {report.clock:+.1f} s off this machine's: set it by NTP"
                report.problems[problem] = False
        if storage:
            asked = [probe.storage.remote(storage) for _, probe in there]
            for (report, _), answer in zip(there, _answers(asked, STORAGE_SECONDS), strict=True):
                if isinstance(answer, dict):
                    report.storage = answer
                else:
                    report.problems[f"cannot use {storage}: {answer}"] = True
        if measure:
            _measure([(report, node) for report, node in zip(reports, nodes, strict=True) if report.machine])
        return reports


def _measure(machines: "list[tuple[Report, dict[str, Any]]]") -> None:
    """Measure the matrix products of those of ``machines``, with Ray's description of each, that have what computes."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    able = [(report, node) for report, node in machines if report.cores or node["Resources"].get("GPU")]
    asked = [
        ray.remote(num_cpus=0 if node["Resources"].get("GPU") else report.cores)(rates)
        .options(
            num_gpus=min(1, node["Resources"].get("GPU", 0)),
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
        )
        .remote()
        for report, node in able
    ]
    for (report, _), task, answer in zip(able, asked, _answers(asked, MEASURE_SECONDS), strict=True):
        if isinstance(answer, Rates):
            report.rates = answer
        else:
            ray.cancel(task, force=True)
            problem = f"its matrix products were not measured ({answer}): other work has its GPU or cores"
            report.problems[problem] = False


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


def _answers(asked: Sequence[Any], seconds: float) -> list[Any]:
    """What each of ``asked`` returned within ``seconds``, or a sentence why it did not."""
    import ray
    from ray.exceptions import RayTaskError

    done, _ = ray.wait(list(asked), num_returns=len(asked), timeout=seconds) if asked else ([], [])
    answers: list[Any] = []
    for answer in asked:
        try:
            answers.append(ray.get(answer) if answer in done else f"nothing within {seconds:.0f} s")
        except RayTaskError as failure:
            answers.append(first_line(failure.cause))
        except Exception as failure:  # noqa: BLE001 whatever happened to its process
            answers.append(first_line(failure))
    return answers


def _clock_difference(probe: Any) -> float | None:
    """Seconds that the clock of a ``probe``'s machine is ahead of ours, by the fastest of three questions."""
    import ray
    from ray.exceptions import RayError

    best: tuple[float, float] | None = None
    for _ in range(3):
        asked = time.time()
        try:
            there: Any = ray.get(probe.clock.remote(), timeout=5)
        except RayError:
            break
        answered = time.time()
        took = answered - asked
        if best is None or took < best[0]:
            best = (took, there - (asked + answered) / 2)
    return best and best[1]
