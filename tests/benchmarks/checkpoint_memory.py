"""The host memory of saving checkpoints, and how long the training loop waits for them, on a GPU or the pretended one.

    tests/benchmarks/checkpoint_memory.py [--record FILE.json]    # in the environment of make test-cuda

Two checkpoints of GPT-2 124M are saved one right after the other, as a loop with short steps does. A thread samples the
resident memory of the process; on the pretended GPU that contains the device's own memory, which is there before.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/cuda")]


def main() -> None:
    """Measure in a process that has a GPU, print and record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--record", type=Path)
    parser.add_argument("--layers", type=int, default=12, help="of the model, of width 768")
    parser.add_argument("--measure", action="store_true", help="in this process")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.layers)))
        sys.stdout.flush()
        os._exit(0)
    measured = run_in_process(options.layers)
    print(json.dumps(measured))
    if options.record:
        versions = {"versions": {"torch": version("torch")}, "command": " ".join(["python", *sys.orig_argv[1:]])}
        options.record.write_text(json.dumps(versions | measured, indent=1) + "\n")


def run_in_process(layers: int) -> dict[str, Any]:
    """Measure in a process of its own, which has a GPU."""
    from build import environment  # type: ignore[import-not-found]

    command = [sys.executable, "-P", __file__, "--measure", "--layers", str(layers)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def resident() -> dict[str, int]:
    """Bytes of this process's memory: of its own, and of files that it has mapped."""
    lines = Path("/proc/self/status").read_text().splitlines()
    kinds = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith("Rss")}
    return {"own": kinds["RssAnon"] + kinds["RssShmem"], "files": kinds["RssFile"]}


def measure(layers: int) -> dict[str, Any]:
    """The largest memory while two checkpoints are saved, in bytes above that before, and the seconds of each call."""
    import torch

    from train.config import Execution, OptimizationConfig
    from train.loop.execution import build_model
    from train.model_config import PRESETS
    from train.models.optimizer import make_optimizer
    from train.run_files.checkpoint import Checkpoints, take_snapshot
    from train.run_files.progress import Progress

    device = torch.device("cuda", 0)
    model = build_model(
        replace(PRESETS["gpt2-124m"], layers=layers), Execution(device="cuda"), "adamw-fused", 0, device
    )
    optimizer = make_optimizer(model, OptimizationConfig())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    scaler = torch.amp.GradScaler("cuda", enabled=False)
    state = sum(p.numel() for p in model.parameters()) * 12
    torch.ones(1, pin_memory=True)
    peaks, ended = {"own": 0, "files": 0}, threading.Event()
    before = resident()

    def watch() -> None:
        while not ended.wait(0.005):
            for kind, size in resident().items():
                peaks[kind] = max(peaks[kind], size - before[kind])

    def progress(step: int) -> Progress:
        return Progress(step, 0, 0, None, 0, 0.0, data_fingerprint="", tokenizer_sha256="", config={})

    watcher = threading.Thread(target=watch)
    watcher.start()
    calls: list[float] = []
    started_at = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Checkpoints(Path(folder), 2)
        checkpoints.prepare_folder()
        for step in (1, 2):
            began = time.perf_counter()
            checkpoints.wait_for_write()
            snapshot = take_snapshot(model, optimizer, scaler, torch.zeros(1, device=device))
            checkpoints.save(snapshot, progress(step), lambda losses: True)
            del snapshot
            calls.append(time.perf_counter() - began)
        checkpoints.wait()
        size = sum(path.stat().st_size for path in Path(folder).rglob("step-00000002/*"))
    seconds = time.perf_counter() - started_at
    ended.set()
    watcher.join()
    return {
        "device": torch.cuda.get_device_name(), "state_bytes": state, "checkpoint_bytes": size,
        "peak_bytes": peaks["own"], "peak_over_state": peaks["own"] / state, "mapped_file_bytes": peaks["files"],
        "seconds_in_the_loop": calls, "seconds_of_both": seconds,
    }  # fmt: skip


if __name__ == "__main__":
    main()
