"""Where a result comes from: code, versions, machine and command line, recorded once by the driver."""

import getpass
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


def collect() -> dict[str, str]:
    """Tags that describe how to reproduce this process's work; values that are not available are left out."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)  # of a process started with python -m
    module, started = (spec.name, ["-m", spec.name]) if spec else (Path(sys.argv[0]).name, ["-P", sys.argv[0]])
    tags = {
        "command": shlex.join([*(command.program.split() or ["python", *started]), *sys.argv[1:]]),
        "mlflow.source.name": module,  # MLflow shows the part after the last slash
        "python": platform.python_version(),
        "user": user(),
    }
    if here := commit():
        tags["commit"] = here
        tags["commit_is_dirty"] = str(bool(_git("status", "--porcelain"))).lower()
    for package in _PACKAGES:
        try:
            tags[f"version.{package}"] = version(package)
        except PackageNotFoundError:
            continue
    return tags | machine()


def machine(read_gpu: Callable[[], GpuState | None] = read_gpu) -> dict[str, str]:
    """Tags that describe this machine, which for a training is that of its worker."""
    tags = {"host": platform.node(), "platform": platform.platform()}
    if gpu := read_gpu():
        tags |= {"gpu": gpu.name, "driver": gpu.driver}
        if gpu.power_limit:
            tags["gpu_power_limit_watts"] = f"{gpu.power_limit:g}"
    return tags


def commit() -> str:
    """The commit of this source; empty when it is not a git checkout of this project.

    The package may be installed below the folder of another repository, whose commit says nothing about this code.
    """
    file = Path(__file__)
    tracked = _git("ls-files", "--full-name", "--", file.name) == "/".join(file.parts[-3:])
    return _git("rev-parse", "HEAD") if tracked else ""


def user() -> str:
    """The user's name, or their numeric id where the system has no name, as in many containers."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def _git(*arguments: str) -> str:
    """Output of a git command in the folder of this source; empty when it fails there, as outside of a repository."""
    # A hook or alias of git's that runs a command names its own repository in these variables.
    environment = {name: value for name, value in os.environ.items() if name not in _GIT_VARIABLES}
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=Path(__file__).parent, env=environment, capture_output=True, text=True,
            timeout=10, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
