"""A cluster of machines without a common disk: namespaces of this machine, an S3 store and an MLflow server.

``lab/lab`` makes it (its head says how), and needs root. Where the system permits no namespaces these tests are
skipped.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

LAB = Path(__file__).parent / "lab" / "lab"
PROJECT = Path(__file__).parents[2]

NOTICED = (
    "RAY_health_check_period_ms=1000",
    "RAY_health_check_timeout_ms=4000",
    "RAY_health_check_failure_threshold=3",
    "RAY_grpc_client_keepalive_time_ms=10000",
    "RAY_grpc_client_keepalive_timeout_ms=10000",
)
"""Set on all machines: a lost one is known after 15 s, by default after 65, and in 5 a busy one may not answer; and a
call to it is given up after 20 s, where our commands alone, without the machines' consent, take 85."""


class Lab:
    """Machines ``head`` (no cores; the driver's), ``w1`` (2 cores), ``w2`` (2 cores, an A100 by name), ``store``,
    ``tracker``; only ``head`` has the source."""

    def __init__(self, name: str) -> None:
        venv = os.environ.get("VIRTUAL_ENV") or str(Path(sys.executable).parents[1])
        named = {"LAB_NAME": name, "LAB_VENV": venv, "LAB_PROJECT": str(PROJECT)}
        self.environment = os.environ | named | {"LAB_ENV": " ".join(NOTICED)}
        self.python = f"{venv}/bin/python"

    def __call__(self, *words: str, **environment: str) -> str:
        """The output of a command of the lab, which must succeed."""
        done = subprocess.run(
            [LAB, *words], env=self.environment | environment, capture_output=True, text=True, timeout=240
        )
        if done.returncode == 77:
            pytest.skip(done.stderr.strip())
        assert done.returncode == 0, f"lab {' '.join(words)}: {done.stdout}{done.stderr}"
        return done.stdout

    def execute(self, program: str, argument: str = "") -> str:
        """The output of a Python program in the project's folder of ``head``."""
        return self("on", "head", f"cd ~/project && {self.python} - {argument} <<'END'\n{program}\nEND")

    def receive(self, command: str, content: bytes) -> None:
        """Run ``command`` on ``head`` with ``content`` as its input."""
        subprocess.run([LAB, "on", "head", command], input=content, env=self.environment, check=True, timeout=60)

    def start(self, machine: str, command: str) -> subprocess.Popen[str]:
        """Start ``python -m COMMAND`` in the project's folder of ``machine``; signals to it reach the command."""
        line = f"cd ~/project && exec {self.python} -m {command}"
        return subprocess.Popen(
            [LAB, "on", machine, line], env=self.environment, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def run(self, machine: str, command: str, *, code: int = 0, seconds: float = 240) -> str:
        """The output of ``python -m COMMAND`` on ``machine``, which must exit with ``code``."""
        process = self.start(machine, command)
        output, _ = process.communicate(timeout=seconds)
        assert process.returncode == code, f"{command}: exit code {process.returncode}\n{output}"
        return output


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A running lab with a store, a tracker, and Ray on head, w1 and w2."""
    made = Lab(f"lab-{os.getpid()}")
    try:
        made("up")
        made("store")
        made("tracker")
        made("ray")
        yield made
    finally:
        subprocess.run([LAB, "down"], env=made.environment, capture_output=True, timeout=120)
