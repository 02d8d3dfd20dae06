"""Entry: ``python -m infra.doctor`` checks whether this machine is ready, and measures how fast it is at best.

With ``--address`` it also checks and measures the machines of a Ray cluster. From ``runs/doctor.json``, which it
writes, runs and ladders compute which fraction of the best rates they reach.
"""

import socket
import time
from dataclasses import asdict, dataclass
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

from infra import command
from infra.console import console
from infra.doctor import allreduce
from infra.errors import UserError
from infra.hardware import device_facts
from infra.options import TrackingUri
from infra.progress import IMPORTING, doing
from infra.storage_dir import StorageDir, scratch
from infra.table import Part, Report

if TYPE_CHECKING:
    from infra.doctor import checks, nodes


@dataclass(frozen=True)
class DoctorOptions:
    """Check whether this machine is ready to train, and measure how fast it is at best."""

    workers: int = 1
    """At least 1. With two or more, also all-reduce between as many Ray Train workers, each with a GPU if there are."""
    out: str = "runs"
    """Folder that holds runs, for doctor.json; also the disk whose speed is measured.
    With s3://bucket/runs, gs://... that of scratch is, and with --address each machine's speed to and from there."""
    quick: bool = False
    """Only check whether the machine is ready, measure nothing."""
    tracking_uri: TrackingUri = None
    address: str | None = None
    """Ray cluster whose machines to check and measure, too.
    The all-reduce runs there; without it on RAY_ADDRESS, else on a Ray of its own here."""

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise UserError(f"--workers {self.workers} must be at least 1.")


def main() -> None:
    command.run(examine, DoctorOptions, module="infra.doctor")


def examine(options: DoctorOptions) -> int:
    """Check and measure; returns 1 when a problem prevents training.

    torch and MLflow are imported only now, when the flags are known to be valid.
    """
    with doing(IMPORTING):
        from infra import provenance
        from infra.doctor import ceilings, checks, nodes
        from infra.tracking.store import create_run
        from infra.tracking.tracker import Tracker

    began = time.perf_counter()
    device, name = ceilings.first_device()
    out = StorageDir.of(options.out)
    out.refuse_unusable("--out")
    disk = scratch() if out.remote else Path(options.out)
    results = checks.checks(device, disk)
    found: dict[str, object] = {
        "device": name, "facts": asdict(device_facts()), "machine": socket.gethostname(),
        "checks": [asdict(check) for check in results],
    }  # fmt: skip
    metrics: dict[str, float] = {}
    parts = [checks_part(results)]
    parts[-1].show()
    problems = [f"{check.name}: {check.fix}" for check in results if check.fix]
    print_problems(problems)
    failing = any(check.fix and check.fatal for check in results)
    if options.address:
        with doing("asking the machines of the cluster"):
            machines = nodes.examine(options.address, out if out.remote else None, measure=not options.quick)
        found["nodes"] = [machine.to_json() for machine in machines]
        parts.append(nodes_part(machines))
        parts[-1].show()
        lacking = [f"{machine.name}: {problem}" for machine in machines for problem in machine.problems]
        print_problems(lacking)
        problems += lacking
        failing = failing or any(fatal for machine in machines for fatal in machine.problems.values())
    if not options.quick:
        with doing("measuring matrix products"):
            rates = {"matmul": ceilings.matmul_rates(device)}
        with doing("measuring copies"):
            rates["copy"] = ceilings.copy_rates(device)
        try:
            with doing("measuring the disk"):
                rates["disk"] = {"reading": ceilings.disk_rate(disk)}
        except OSError as failure:
            where = f"TMPDIR {disk}" if out.remote else f"--out {disk}"
            raise UserError(
                f"the disk of {where} cannot be measured: {failure.strerror}; make room there, or name another."
            ) from failure
        found |= rates
        parts.append(rates_part(rates))
        parts[-1].show()
        metrics = {
            f"{group}/{key.replace(',', '')}": rate for group, known in rates.items() for key, rate in known.items()
        }
    if options.workers > 1:
        with doing(f"measuring all-reduce between {options.workers} workers"):
            reduced = allreduce.measure(options.workers, options.address)
        found["allreduce"] = asdict(reduced)
        parts.append(allreduce_part(reduced))
        parts[-1].show()
        metrics |= {f"allreduce/{size}": rate for size, rate in reduced.bus_bytes_per_second.items()}
    saved = "nothing was measured; an earlier doctor.json is left as it is"
    if not options.quick:
        out.write_json(ceilings.FILE, found)
        saved = f"saved in {Path(options.out) / ceilings.FILE if not out.remote else out / ceilings.FILE}"
        if options.workers > 1:
            saved += f", from which 'python -m train.plan --workers {options.workers}' estimates the network's effect"
    key = create_run("doctor", name, tracking_uri=options.tracking_uri, tags=provenance.collect() | {"kind": "doctor"})
    with Tracker(key) as tracker:
        tracker.metrics(metrics)
        tracker.json(found, "doctor.json")
        tracker.note(Report((), [*(f"✗ {problem}" for problem in problems), *parts]).markdown())
        tracker.finish()
    console.print(f"{saved}; {time.perf_counter() - began:.0f} s")
    return int(failing)


def print_problems(problems: list[str]) -> None:
    for problem in problems:
        console.print(f"✗ {problem}", markup=False, style="red")


def checks_part(results: "list[checks.Check]") -> Part:
    return Part("", ("", "", ""), [("✗" if check.fix else "✓", check.name, check.value) for check in results])


def nodes_part(machines: "list[nodes.Report]") -> Part:
    heading = (
        "machine", "cores", "load", "GPU", "memory", "Python", "Ray", "torch", "clock", "scratch", "storage up, down",
        "matmul",
    )  # fmt: skip
    lines: list[tuple[str, ...]] = []
    for report in machines:
        machine = report.machine
        cells = ("?",) * 8
        if machine:
            cells = (
                f"{machine.load:.1f}", ", ".join(machine.gpus) or "none", f"{machine.memory / 1e9:,.0f} GB",
                machine.python, machine.versions["ray"], machine.versions["torch"],
                "?" if report.clock is None else f"{report.clock:+.3f} s", f"{machine.scratch_free / 1e9:,.0f} GB",
            )  # fmt: skip
        speeds = ", ".join(f"{rate / 1e6:,.0f} MB/s" for rate in report.storage.values())
        best = report.rates and max(report.rates.matmul.items(), key=itemgetter(1))
        matmul = f"{best[1] / 1e12:,.2f} TFLOP/s {best[0]}" if best else ""
        lines.append((report.name, str(report.cores), *cells, speeds, matmul))
    return Part("Machines of the cluster", heading, lines)


def rates_part(rates: dict[str, dict[str, float]]) -> Part:
    """The best measured rates, in TFLOP/s and GB/s."""
    lines: list[tuple[str, str]] = []
    for group, known in rates.items():
        for key, rate in known.items():
            text = f"{rate / 1e12:,.2f} TFLOP/s" if "matmul" in group else f"{rate / 1e9:,.2f} GB/s"
            lines.append((f"{group.replace('_', ' ')}, {key}", text))
    return Part("Measured ceilings", ("", ""), lines)


def allreduce_part(reduced: allreduce.Reduced) -> Part:
    machines = ", ".join(dict.fromkeys(reduced.machines))
    speeds = reduced.bus_bytes_per_second.items()
    lines = [(f"{int(size) / 2**20:,.2f} MiB", f"{rate / 1e9:,.3f} GB/s") for size, rate in speeds]
    return Part(f"All-reduce, {reduced.workers} workers on {machines}, {reduced.backend}", ("", ""), lines)


if __name__ == "__main__":
    main()
