"""Entry of ``python -m infra.doctor``, which checks whether this machine is ready and measures its maximum rates.

With ``--address`` it also checks and measures the machines of a Ray cluster. Runs and ladders compute their utilization
from the measured rates in ``runs/doctor.json``.
"""

import socket
import time
from dataclasses import asdict, dataclass
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from infra.cli import command
from infra.cli.console import console
from infra.cli.options import Switch, TrackingUri
from infra.cli.progress import IMPORTING_ACTIVITY, status
from infra.cli.table import Report, Table
from infra.cli.units import GB
from infra.device.first_run import SAMPLE_SECONDS, NextCommand
from infra.device.hardware import examine_device
from infra.doctor import allreduce
from infra.errors import UserError
from infra.storage.directory import StorageDir
from infra.storage.files import scratch

if TYPE_CHECKING:
    from infra.doctor import checks, nodes


@dataclass(frozen=True)
class DoctorOptions:
    """Check whether this machine is ready to train, and measure its maximum rates."""

    quick: Switch = False
    """Only check whether the machine is ready, without measurements."""
    gpu: Switch = False
    """Test this machine's GPU in about five minutes instead, and write gpu-report.json to --out: the driver and the
    memory, each attention kernel, compiled code, ten training steps, and the same steps of nanoGPT's model."""
    workers: int = 1
    """Number of Ray Train workers between which to measure all-reduce, on GPUs if available (1: not measured)."""
    out: Annotated[str, tyro.conf.arg(metavar="DIR")] = "runs"
    """Folder for doctor.json, local or in object storage (s3://bucket/runs, gs://, az://).
    The disk of this folder is measured. With object storage, the disk of temporary files is measured instead and, with
    --address, the speed between each machine and the storage."""
    tracking_uri: TrackingUri = None
    address: str | None = None
    """Address of a Ray cluster; its machines are checked and measured, too, and the all-reduce runs there.
    By default the all-reduce runs on the cluster in RAY_ADDRESS, or else on this machine."""

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise UserError(f"--workers {self.workers} must be at least 1.")
        if self.gpu and (self.quick or self.address or self.workers > 1):
            flag = "--quick" if self.quick else "--address" if self.address else "--workers"
            raise UserError(f"--gpu tests the GPU of this machine alone. Remove {flag}, or run it without --gpu.")


def main() -> None:
    command.run(examine, DoctorOptions, module="infra.doctor")


def examine(options: DoctorOptions) -> int:
    """Check and measure this machine and a cluster's machines; return 1 if a problem prevents training."""
    if options.gpu:  # It needs neither Ray nor MLflow.
        return test_gpu(options)
    with status(IMPORTING_ACTIVITY):  # inside the function, so that invalid flags are reported before the slow imports
        from infra import ceilings
        from infra.device import provenance
        from infra.doctor import checks, memory, nodes
        from infra.tracking.store import create_run
        from infra.tracking.tracker import Tracker

    started_at = time.perf_counter()
    state, info = examine_device()
    device, name = ceilings.select_device(use_gpu=not info.gpu_blocker)
    out = StorageDir.of(options.out)
    out.check_writable("--out")
    disk = out.local_path or scratch()
    disk.mkdir(parents=True, exist_ok=True)
    results = checks.run_checks(device, disk, state, info)
    record: dict[str, object] = {
        "device": name, "facts": asdict(info), "machine": socket.gethostname(),
        "checks": [asdict(check) for check in results],
    }  # fmt: skip
    metrics: dict[str, float] = {}
    tables = [checks_table(results)]
    tables[-1].show()
    problems = [f"{check.name}: {check.fix}" for check in results if check.fix]
    print_problems(problems)
    has_fatal_problem = any(check.prevents_training for check in results)
    if options.address:
        with status("checking the cluster's machines"):
            machines = nodes.examine(options.address, out, measure=not options.quick)
        record["nodes"] = [machine.to_json() for machine in machines]
        tables.append(nodes_table(machines))
        tables[-1].show()
        node_problems = [f"{machine.name}: {problem}" for machine in machines for problem in machine.problems]
        print_problems(node_problems)
        problems += node_problems
        has_fatal_problem = has_fatal_problem or any(
            fatal for machine in machines for fatal in machine.problems.values()
        )
    if not options.quick:
        with status("measuring matrix multiplication"):
            rates = {"matmul": ceilings.measure_matmul_rates(device)}
        with status("measuring memory copies"):
            rates["copy"] = ceilings.measure_copy_rates(device)
        try:
            with status("measuring disk reads"):
                rates["disk"] = {"reading": ceilings.measure_disk_rate(disk)}
        except OSError as failure:
            raise UserError(
                f"Cannot measure the disk of {disk}: {failure.strerror}. Free disk space, or use another --out or "
                "TMPDIR."
            ) from failure
        record |= rates
        tables.append(rates_table(rates))
        tables[-1].show()
        with status("measuring the memory of a CUDA context"):
            record["memory"] = memory.measure_memory(device)
        if record["memory"]:
            tables.append(memory_table(record["memory"]))
            tables[-1].show()
        metrics = {f"{group}/{run_ref}": rate for group, values in rates.items() for run_ref, rate in values.items()}
    if options.workers > 1:
        with status(f"measuring all-reduce between {options.workers} workers"):
            all_reduce = allreduce.measure(options.workers, options.address)
        record["allreduce"] = asdict(all_reduce)
        tables.append(allreduce_table(all_reduce))
        tables[-1].show()
        metrics |= {f"allreduce/{size}": rate for size, rate in all_reduce.bus_bytes_per_second.items()}
    outcome = "nothing measured (--quick); doctor.json unchanged"
    if not options.quick:
        out.write_json(ceilings.DOCTOR_FILE, record)
        outcome = f"saved in {out / ceilings.DOCTOR_FILE}"
        if options.workers > 1:
            outcome += f"; 'python -m train.plan --workers {options.workers}' uses it to predict the network's effect"
    key = create_run(
        "doctor", name, tracking_uri=options.tracking_uri, tags=provenance.collect_tags() | {"kind": "doctor"}
    )
    with Tracker(key) as tracker:
        tracker.log_metrics(metrics)
        tracker.log_json(record, "doctor.json")
        tracker.set_description(Report((), [*(f"✗ {problem}" for problem in problems), *tables]).markdown())
        tracker.finish()
    console.print(f"{outcome} ({time.perf_counter() - started_at:.0f} s)", markup=False)
    if not has_fatal_problem:
        Report([("Next", str(next_command()))]).show()
    return int(has_fatal_problem)


def next_command(data: Path = Path("data/tokens")) -> NextCommand:
    """Return the command for a machine that is ready: create the default data set, or show it if it exists.

    Showing it prints the command of a first run.
    """
    if data.exists():
        return NextCommand(f"python -m pipeline.inspect {data}", 5)
    return NextCommand(f"python -m pipeline.tokenize sample --out {data}", SAMPLE_SECONDS)


def test_gpu(options: DoctorOptions) -> int:
    """Test this machine's GPU, and write its report; return 1 if a step failed."""
    from infra.device.gpu_report import REPORT_FILE
    from infra.doctor.gpu_test import run_test, verdict

    out = StorageDir.of(options.out)
    out.check_writable("--out")
    report = run_test(out)
    console.print(verdict(report), markup=False)
    console.print(
        f"Report in {out / REPORT_FILE}: paste it into an issue, or plan from it with 'python -m train.plan --gpu "
        f"{out / REPORT_FILE}'",
        markup=False,
    )
    return int(not report.passed)


def print_problems(problems: list[str]) -> None:
    """Print each problem with its fix in red."""
    for problem in problems:
        console.print(f"✗ {problem}", markup=False, style="red")


def checks_table(results: "list[checks.Check]") -> Table:
    """Return the table of this machine's checks."""
    rows = [("✗" if check.fix else "✓", check.name, check.value) for check in results]
    return Table("", ("ok", "check", "value"), rows)


def nodes_table(machines: "list[nodes.NodeReport]") -> Table:
    """Return the table of the cluster's machines."""
    columns = (
        "machine", "cores", "load", "GPU", "memory (GB)", "Python", "Ray", "torch", "clock offset (s)",
        "free scratch (GB)", "storage upload, download (MB/s)", "matmul (TFLOP/s)",
    )  # fmt: skip
    rows: list[tuple[str, ...]] = []
    for report in machines:
        machine = report.machine
        cells = ("?",) * 8
        if machine:
            cells = (
                f"{machine.load:.1f}", ", ".join(machine.gpus) or "none", f"{machine.memory / 1e9:,.0f}",
                machine.python, machine.versions["ray"], machine.versions["torch"],
                "?" if report.clock is None else f"{report.clock:+.3f}", f"{machine.scratch_free / 1e9:,.0f}",
            )  # fmt: skip
        speeds = ", ".join(f"{rate / 1e6:,.0f}" for rate in report.storage.values())
        fastest = report.rates and max(report.rates.matmul.items(), key=itemgetter(1))
        matmul = f"{fastest[1] / 1e12:,.2f} ({fastest[0]})" if fastest else ""
        rows.append((report.name, str(report.cores), *cells, speeds, matmul))
    return Table("Machines of the cluster", columns, rows)


def rates_table(rates: dict[str, dict[str, float]]) -> Table:
    """Return the table of the maximum measured rates, in TFLOP/s and GB/s."""
    rows: list[tuple[str, str]] = []
    for group, values in rates.items():
        for key, rate in values.items():
            text = f"{rate / 1e12:,.2f} TFLOP/s" if "matmul" in group else f"{rate / 1e9:,.2f} GB/s"
            rows.append((f"{group}, {key}".replace("_", " "), text))
    return Table("Measured ceilings", ("operation", "rate"), rows)


def memory_table(sizes: dict[str, int]) -> Table:
    """Return the table of a process's memory on the GPU outside PyTorch's allocator."""
    names = {"context": "CUDA context", "kernels": "kernels of a step and their libraries"}
    rows = [(names[part], f"{size / GB:.2f}") for part, size in sizes.items()]
    total = ("total, which each process on the GPU needs", f"{sum(sizes.values()) / GB:.2f}")
    return Table("Memory outside PyTorch's allocator", ("part", "memory (GB)"), [*rows, total])


def allreduce_table(all_reduce: allreduce.AllReduceResult) -> Table:
    """Return the table of the bus bandwidth by size."""
    machines = ", ".join(dict.fromkeys(all_reduce.machines))
    speeds = all_reduce.bus_bytes_per_second.items()
    rows = [(f"{int(size) / 2**20:,.2f}", f"{rate / 1e9:,.3f}") for size, rate in speeds]
    title = f"All-reduce between {all_reduce.workers} workers on {machines} ({all_reduce.backend})"
    return Table(title, ("size (MiB)", "bus bandwidth (GB/s)"), rows)


if __name__ == "__main__":
    main()
