"""Runs what the marker ``gpu`` selects, on a GPU or where there is none on the pretended one. See ``make test-cuda``.

Arguments go to pytest: a file, ``-k``, ``-x``. PRETENDED_GPU=H100 pretends an H100 instead of an A100.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from build import environment
from machine import has_gpu

ROOT = Path(__file__).parents[2]
NOT_THERE = {
    "test_a_gpu_reaches_most_of_its_datasheet": "measures speed, and kernels take no time here",
    "test_a_profile_on_a_gpu_names_the_kernel_that_ran": "reads the kernels that NVIDIA's profiler saw run",
    "test_a_gpu_repeats_its_dropout": "needs random numbers of the GPU inside a kernel",
}
"""Tests of what the pretended device has not, and why."""


class Pretended:
    """Computes the eager operators of each test, and compiles nothing: compiled kernels would do nothing."""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Skip what the device cannot show."""
        for item in items:
            reason = NOT_THERE.get(item.name.partition("[")[0])
            if reason:
                item.add_marker(pytest.mark.skip(reason=f"pretended GPU: {reason}"))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Iterator[None]:
        """Enter the mode for the test itself."""
        import torch
        from compute import OnCpu, misuses

        misuses()  # of the test before, at its end
        with OnCpu(), torch.compiler.set_stance("force_eager"):
            yield
        if found := misuses():
            pytest.fail(f"the GPU was misused: {found}")


def main() -> None:
    """Load the device into a new process of this program, unless there is a GPU or it is loaded."""
    gpu = has_gpu()
    if not gpu and "libpretended" not in os.environ.get("LD_PRELOAD", ""):
        print("No GPU found: the tests run on a pretended one.", flush=True)
        sys.exit(subprocess.run([sys.executable, *sys.argv], env=environment()).returncode)
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    plugins = [] if gpu else [Pretended()]
    selected = ["-m", "gpu and not slow", "--ignore", "tests/cluster", "--tb=short"]
    sys.exit(pytest.main([*selected, *sys.argv[1:]], plugins=plugins))


if __name__ == "__main__":
    main()
