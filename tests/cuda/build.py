"""Builds the pretended device for the torch of this environment.

A function that torch's libraries ask of CUDA and the device lacks becomes one that names itself and ends the process
when it is called: torch asks for hundreds that no test needs, and NVIDIA's own would fail far from the cause.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from machine import has_gpu

SOURCES = Path(__file__).parent / "device"
OURS = re.compile(r"(__cuda|cuda[A-Z]|cublas|cu[A-Z]|nvml)\w+")
NOT_OURS = re.compile(r"cu(blasLt|blas)?(Log|Xt)\w+|cupti\w*|cuFile\w+|cudnn\w+")
MISSING = """#define EXPORTED extern "C" __attribute__((visibility("default")))
EXPORTED void pretended_lacks(const char*);"""
NAMES = ("libcuda.so", "libcuda.so.1", "libnvidia-ml.so.1")
"""The libraries that programs load by name, all of which the device is."""
GPU = "PRETENDED_GPU"
"""Set to the model in all that runs on the pretended device."""
MODELS = ("A100", "H100", "V100", "T4", "RTX3060", "RTX4090", "GB10", "MIG", "WSL2")
"""Those of device/kernels.cpp, the default first; MIG is a slice of an A100, and WSL2 an RTX 3060 in Windows."""


def environment() -> dict[str, str]:
    """The environment of a process that is to have a GPU: where there is none, with the device, which is built."""
    if has_gpu():
        return dict(os.environ)
    if os.environ.get(GPU, MODELS[0]) not in MODELS:
        sys.exit(f"There is no pretended {os.environ[GPU]}: set {GPU} to {', '.join(MODELS[:-1])} or {MODELS[-1]}.")
    library = build(Path(sys.prefix) / "pretended")
    folder = str(library.parent)
    loaded = {"LD_PRELOAD": str(library), "LD_LIBRARY_PATH": folder, "TRITON_LIBCUDA_PATH": folder}
    return {GPU: MODELS[0], "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"} | os.environ | loaded


def build(folder: Path, find_headers: Callable[[], Path | None] | None = None) -> Path:
    """The device as a shared library in ``folder``, built anew where a source has changed.

    Raises :class:`SystemExit` with a sentence where there is no compiler or there are no headers.
    """
    library = folder / "libpretended.so"
    sources = sorted(SOURCES.iterdir())
    if library.exists() and library.stat().st_mtime > max(path.stat().st_mtime for path in [*sources, Path(__file__)]):
        return library
    if not shutil.which("g++"):
        sys.exit("The pretended GPU is written in C++, and there is no C++ compiler here: install g++.")
    include = (find_headers or headers)()
    if include is None:
        sys.exit("The headers of CUDA 13 are neither in torch's packages nor in /usr/local/cuda: install them.")
    folder.mkdir(parents=True, exist_ok=True)
    compiled = [str(path) for path in sources if path.suffix == ".cpp"]
    compile_ = ["g++", "-std=c++17", "-shared", "-fPIC", "-O1", "-fvisibility=hidden", f"-I{include}"]
    subprocess.run([*compile_, *compiled, "-o", str(library)], check=True)
    missing = sorted(asked_of_cuda() - symbols(library, "--defined-only"))
    lines = [f'EXPORTED void {name}() {{ pretended_lacks("{name}"); }}' for name in missing]
    (folder / "missing.cpp").write_text("\n".join([MISSING, *lines, ""]), encoding="utf-8")
    subprocess.run([*compile_, *compiled, str(folder / "missing.cpp"), "-o", str(library)], check=True)
    for name in NAMES:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(library.name)
    return library


def packages() -> Path:
    """The folder of installed packages."""
    spec = find_spec("torch")
    assert spec
    assert spec.origin
    return Path(spec.origin).parent.parent


def headers() -> Path | None:
    """The folder of CUDA's public headers."""
    candidates = [packages() / "triton/backends/nvidia/include", Path("/usr/local/cuda/include")]
    needed = ("cuda.h", "cuda_runtime_api.h", "crt/host_defines.h")
    return next((folder for folder in candidates if all((folder / name).exists() for name in needed)), None)


def symbols(library: Path, which: str) -> set[str]:
    """The functions that ``library`` defines or asks of others."""
    found = subprocess.run(["nm", "-D", which, str(library)], capture_output=True, text=True, check=True)
    return {line.split()[-1].partition("@")[0] for line in found.stdout.splitlines()}


def asked_of_cuda() -> set[str]:
    """What torch's libraries ask of the libraries that the device stands in for."""
    asked: set[str] = set()
    for library in (packages() / "torch" / "lib").glob("lib*.so"):
        asked |= symbols(library, "--undefined-only")
    return {name for name in asked if OURS.fullmatch(name) and not NOT_OURS.fullmatch(name)}
