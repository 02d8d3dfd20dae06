"""A machine that cannot run make test-cuda is told why in one sentence, and a real GPU is left to itself."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent

pretended = pytest.mark.skipif("PRETENDED_GPU" not in os.environ, reason="needs the pretended GPU")


@pytest.mark.parametrize(
    ("lack", "named"),
    [
        ({"processor": "aarch64"}, "aarch64"),
        ({"system": "Darwin"}, "Darwin"),
        ({"free": 10**9}, "1.0 GB free"),
        ({"compiler": False}, "g++"),
    ],
    ids=["processor", "system", "disk", "compiler"],
)
def test_what_a_machine_lacks_is_said_before_anything_is_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lack: dict[str, Any], named: str
) -> None:
    monkeypatch.syspath_prepend(HERE)
    import machine

    enough = machine.Machine("Linux", "x86_64", free=10**12, gpu=False, compiler=True)
    assert machine.obstacle(tmp_path, enough) is None
    found = machine.obstacle(tmp_path, replace(enough, **lack))
    assert found
    assert named in found
    assert machine.obstacle(tmp_path, replace(enough, gpu=True, compiler=False)) is None
    assert machine.Machine.describe(tmp_path).free > 0


@pytest.mark.parametrize("lacking", ["compiler", "headers"])
def test_the_device_is_not_built_without(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lacking: str) -> None:
    monkeypatch.syspath_prepend(HERE)
    import build

    monkeypatch.setenv("PATH", str(tmp_path))
    if lacking == "headers":
        (tmp_path / "g++").touch(mode=0o755)
    with pytest.raises(SystemExit, match=lacking):
        build.build(tmp_path, lambda: None)


def test_a_card_that_cannot_be_pretended_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(HERE)
    import build

    monkeypatch.setenv("PATH", str(tmp_path))  # without nvidia-smi
    monkeypatch.setenv(build.GPU, "B200")
    with pytest.raises(SystemExit, match=r"B200.*A100, .* or WSL2"):
        build.environment()


def test_a_real_gpu_is_left_to_itself(tmp_path: Path) -> None:
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\necho GPU 0: a real one\n")
    driver.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    environment["PATH"] = f"{tmp_path}:{environment['PATH']}"
    command = [sys.executable, str(HERE / "run.py"), "--version"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0
    assert "pretended" not in done.stdout


@pretended
@pytest.mark.gpu
def test_a_function_that_the_device_lacks_is_named() -> None:
    call = "import ctypes; ctypes.CDLL(None).cudaMemcpy2DAsync()"
    done = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True)
    assert done.returncode == 2
    assert "lacks cudaMemcpy2DAsync" in done.stderr
