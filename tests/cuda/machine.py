"""Whether this machine can run torch's CUDA build, on its GPU or on the pretended one, before that is installed.

python tests/cuda/machine.py FOLDER     # asks for room for an environment in FOLDER
"""

import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

SPACE = 9 * 10**9
"""Bytes that torch's CUDA build and the project's other dependencies take, and what pip unpacks meanwhile."""


def has_gpu() -> bool:
    """Whether the driver of a real GPU answers."""
    try:
        found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return found.returncode == 0 and "GPU" in found.stdout


@dataclass(frozen=True)
class Machine:
    """What the tests need of a machine."""

    system: str
    processor: str
    free: int
    """Bytes of disk space for the environment."""
    gpu: bool
    compiler: bool

    @classmethod
    def describe(cls, folder: Path) -> "Machine":
        """This machine, with an environment in ``folder``."""
        free = shutil.disk_usage(folder).free
        return cls(platform.system(), platform.machine(), free, has_gpu(), bool(shutil.which("g++")))


def obstacle(folder: Path, machine: Machine) -> str | None:
    """Why the tests cannot run on ``machine`` with an environment in ``folder``, in one sentence."""
    if (machine.system, machine.processor) != ("Linux", "x86_64"):
        where = f"{machine.system} on {machine.processor}"
        return f"make test-cuda needs Linux on x86_64, for which torch's CUDA build is made; this is {where}."
    if machine.free < SPACE:
        return (
            f"make test-cuda needs {SPACE / 1e9:.0f} GB for an environment with torch's CUDA build, and {folder} has "
            f"{machine.free / 1e9:.1f} GB free: make room, or set CUDA_VENV to a folder on another disk."
        )
    if not (machine.gpu or machine.compiler):
        return (
            "make test-cuda builds a pretended GPU where there is no real one and finds no C++ compiler: install g++."
        )
    return None


if __name__ == "__main__":
    sys.exit(obstacle(Path(sys.argv[1]), Machine.describe(Path(sys.argv[1]))))
