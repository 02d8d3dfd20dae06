"""Do the main job and the tests of what uses a library pass with the oldest and the newest version of it?

    python -P tests/benchmarks/versions.py --environments FOLDER --record FILE.json [--only NAME ...]

Each end of the ranges in pyproject.toml has an environment of its own, FOLDER/NAME, which is made if it is missing,
with all other packages as constraints.txt has them; ``python3.12`` and ``python3.13`` must be on the path. The newest
Ray and MLflow are those of constraints.txt, with which the whole suite is run. A row is recorded once it is known.
"""

import argparse
import json
import os
import re
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).parents[2]
TINY = "--data data/tokens --model tiny --device cpu"
MAIN_JOB = (
    "pipeline.tokenize --out data/tokens",
    f"train.run {TINY} --name run --micro-batch 8 --global-batch 8 --steps 10 --cycle 5+1",
    f"tune.search {TINY} --name search --global-batch 4 --memory-limit 4GB --trial-steps 8 --trial-time 5s "
    "--confirm-rounds 1",
)
VERSIONS = """
import importlib.metadata as m, json, platform
names = ("ray", "torch", "mlflow", "pyarrow")
print(json.dumps({"python": platform.python_version()} | {name: m.version(name) for name in names}))
"""


@dataclass(frozen=True)
class End:
    """One end of a range: its environment, and the tests of what uses the library."""

    name: str
    python: str
    requirement: str
    tests: tuple[str, ...]


RAY = (
    "tests/infra/ray/test_local_ray.py", "tests/infra/ray/test_cluster.py", "tests/pipeline/job/test_ray_data.py",
    "tests/pipeline/job/test_cluster.py", "tests/train/launch", "tests/tune/experiment/test_ray_tune.py",
)  # fmt: skip
MLFLOW = ("tests/infra/tracking", "tests/tune/experiment/test_tracking.py", "tests/train/test_page.py")
TORCH = (
    "tests/train/models", "tests/train/loop", "tests/train/run_files", "tests/train/test_switches.py",
    "tests/train/test_export.py", "tests/train/loop/test_sampling.py", "tests/train/profile",
)  # fmt: skip
ENDS = (
    End("ray-2.55", "python3.11", "ray==2.55.0", ()),
    End("ray-2.58", "python3.11", "ray==2.58.0", ("tests/infra/ray/test_local_ray.py",)),
    End("ray-2.59", "python3.11", "ray==2.59.0", RAY),
    End("mlflow-3.17", "python3.11", "mlflow==3.17.0", MLFLOW),
    End("torch-2.11", "python3.11", "torch==2.11.0", TORCH),
    End("python-3.12-torch-2.15", "python3.12", "torch==2.15.0", TORCH),
    End("python-3.13-torch-2.14", "python3.13", "torch==2.14.1", TORCH),
)


def main() -> None:
    """Run the ends, print each row as it is known, and record them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--environments", type=Path, required=True)
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=[end.name for end in ENDS], default=[end.name for end in ENDS])
    options = parser.parse_args()
    rows: dict[str, Any] = json.loads(options.record.read_text())["rows"] if options.record.exists() else {}
    for end in ENDS:
        if end.name not in options.only:
            continue
        rows[end.name] = row = measured(end, options.environments.resolve() / end.name)
        print(end.name, row, flush=True)
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=PROJECT, capture_output=True, text=True)
        row["commit"] = commit.stdout.strip()
        command = "python -P tests/benchmarks/versions.py --environments FOLDER --record FILE"
        about = {"command": command, "main_job": [f"python -m {line}" for line in MAIN_JOB]}
        options.record.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


def measured(end: End, environment: Path) -> dict[str, Any]:
    """The outcome of the main job and the tests."""
    python = environment / "bin" / "python"
    if not python.exists() and (failed := install(end, environment)):
        return {"requirement": end.requirement, "installed": failed}
    row: dict[str, Any] = {
        "versions": json.loads(subprocess.run([python, "-c", VERSIONS], capture_output=True, check=True).stdout),
        "main_job": "passed",
        "load": os.getloadavg()[0],
    }
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        with_this = os.environ | {"PYTHONPATH": str(PROJECT)}
        for line in MAIN_JOB:
            done = ran([python, "-m", *line.split()], folder, with_this, 600)
            if done.returncode:
                row["main_job"] = f"{line.split()[0]} failed: {last_line(done.stdout)}"
                break
        row["main_job_seconds"] = round(time.monotonic() - began)
        if end.tests and row["main_job"] == "passed":
            tests = ["-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={folder}/tests", *end.tests]
            done = ran([python, *tests], PROJECT, with_this, 3000)
            row["tests"], row["in"] = summary(done.stdout), list(end.tests)
            row["failed"] = re.findall(r"(?m)^(?:FAILED|ERROR) (\S+)", done.stdout)
    return row


def install(end: End, environment: Path) -> str | None:
    """Make the environment; returns why that failed."""
    package = end.requirement.partition("==")[0]
    lines = (PROJECT / "constraints.txt").read_text().splitlines(keepends=True)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as others:
        others.write("".join(line for line in lines if not re.match(rf"{package}\b", line)))
        others.flush()
        subprocess.run([end.python, "-m", "venv", environment], check=True)
        pip = [environment / "bin" / "pip", "install", "--quiet", "--no-compile", "--constraint", others.name]
        done = ran([*pip, end.requirement, f"{PROJECT}[dev]"], PROJECT, os.environ, 3000)
    return last_line(done.stdout) if done.returncode else None


def ran(command: list[Any], folder: Path | str, environment: Any, seconds: float) -> subprocess.CompletedProcess[str]:
    """The command when it has ended, with all of its output."""
    return subprocess.run(
        command, cwd=folder, env=environment, timeout=seconds, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def last_line(output: str) -> str:
    """The last line that a command printed."""
    return next((line for line in reversed(output.splitlines()) if line.strip()), "")


def summary(output: str) -> str:
    """The line with pytest's counts."""
    found = re.findall(r"(?m)^=* ?(\d+ (?:passed|failed).*?) in [\d.]+s", output)
    return found[-1] if found else last_line(output)


if __name__ == "__main__":
    main()
