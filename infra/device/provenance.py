"""Provenance of a result: code, versions, machine and command line, recorded once by the driver."""

import getpass
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from infra.cli import command
from infra.device.gpu import GpuState, read_gpu

_GIT_VARIABLES = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_PREFIX")

_PACKAGES = ("torch", "ray", "mlflow", "pyarrow", "gigatoken", "tiktoken")


def collect_tags() -> dict[str, str]:
    """Return the tags of a run that this process creates: what MLflow shows as its source, and all else in one tag.

    A tag for each value would fill the screen above the run's description.
    """
    values = collect()
    tags = {"mlflow.source.name": values["program"]}  # MLflow shows the part after the last slash.
    if "commit" in values:
        tags["mlflow.source.git.commit"] = values["commit"]
    return tags | {"provenance": json.dumps(values)}


def collect() -> dict[str, str]:
    """Return what is needed to reproduce this process's results, by name; unavailable values are omitted."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)  # Only a process of python -m has a spec.
    program, target = (spec.name, ["-m", spec.name]) if spec else (Path(sys.argv[0]).name, ["-P", sys.argv[0]])
    values = {
        "command": shlex.join([*(command.program.split() or ["python", *target]), *sys.argv[1:]]),
        "program": program,
        "python": platform.python_version(),
        "user": find_user_name(),
    }
    if revision := find_commit():
        values["commit"] = revision
        values["commit_is_dirty"] = str(bool(_git("status", "--porcelain"))).lower()
    for package in _PACKAGES:
        try:
            values[f"version.{package}"] = version(package)
        except PackageNotFoundError:
            continue
    return values | describe_machine()


def describe_machine(read_gpu: Callable[[], GpuState | None] = read_gpu) -> dict[str, str]:
    """Return the properties of this machine by name."""
    machine = {"host": platform.node(), "platform": platform.platform()}
    if gpu := read_gpu():
        machine["gpu"] = gpu.name
        if gpu.driver:
            machine["driver"] = gpu.driver
        if gpu.power_limit:
            machine["gpu_power_limit_watts"] = f"{gpu.power_limit:g}"
    return machine


def find_commit() -> str:
    """Return the commit of this project's git checkout; empty if the package is installed elsewhere.

    An installed package may be inside the folder of another repository, whose commit does not describe this code.
    """
    file = Path(__file__)
    tracked = _git("ls-files", "--full-name", "--", file.name) == "/".join(file.parts[-3:])
    return _git("rev-parse", "HEAD") if tracked else ""


def find_user_name() -> str:
    """Return the user's name, or the numeric id if the system has no name for it, as in many containers."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def _git(*arguments: str) -> str:
    """Return the output of a git command in the folder of this file; empty if it fails, as outside of a repository."""
    # If a git hook or alias started this process, these variables name the repository of the hook.
    environment = {name: value for name, value in os.environ.items() if name not in _GIT_VARIABLES}
    try:
        process = subprocess.run(
            ["git", *arguments], cwd=Path(__file__).parent, env=environment, capture_output=True, text=True,
            timeout=10, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return ""
    return process.stdout.strip()
