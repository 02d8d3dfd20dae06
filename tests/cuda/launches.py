"""The kernels that a step launches one by one, without and with CUDA graphs, and the time that it needs for that.

    python tests/cuda/launches.py [--record FILE.json]    # in the environment of make test-cuda

Each row is a model and a micro-batch on a card, which train some steps in a fresh process, compiled as a whole and in
the mode with CUDA graphs; one later step is counted. Memory, graphs and their replays are real on the pretended device,
kernels do nothing: their time is the roofline of :mod:`step_time`. A step takes at least that, and at least the time in
which the CPU launches what it launches.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/cuda")]

ROWS: tuple[dict[str, Any], ...] = (
    {"model": "tiny", "micro_batch": 8},
    {"model": "tiny", "micro_batch": 8, "global_batch": 32},
    {"model": "edu-3m", "micro_batch": 8},
    {"model": "small", "micro_batch": 4, "gpu": "H100"},
    {"model": "gpt2-124m", "micro_batch": 1, "gpu": "H100"},
    {"model": "gpt2-124m", "micro_batch": 4, "gpu": "H100"},
)
"""Settings of a step; a global batch of one micro-batch and an A100 where they are missing."""

MODES = ("whole", "reduce-overhead")
COUNTED_STEP = 5
"""The first step runs, the second is recorded, and later ones are replayed."""


def main() -> None:
    """Count every row, print and record what was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--record", type=Path)
    parser.add_argument("--row", type=json.loads, help="count this alone, in this process")
    options = parser.parse_args()
    if options.row is not None:
        print(json.dumps(counted_step(**options.row)), flush=True)
        os._exit(0)  # which spares the pretended device an orderly end
    rows: list[dict[str, Any]] = []
    for settings in ROWS:
        rows.append(row(settings))
        print(json.dumps(rows[-1]), flush=True)
    if options.record:
        command = " ".join(["python", *sys.orig_argv[1:]])
        record = {"command": command, "versions": {"torch": version("torch")}, "rows": rows}
        options.record.write_text(json.dumps(record, indent=1) + "\n")


def row(settings: dict[str, Any]) -> dict[str, Any]:
    """What a step with ``settings`` launches without and with CUDA graphs, the time of both, and what is chosen."""
    from train.estimate.gpt2_speed import LAUNCH_SECONDS

    whole, graphs = (in_process({**settings, "compile": mode}) for mode in MODES)
    gpu_ms = whole["gpu_ms"]

    def mode(counts: dict[str, Any]) -> dict[str, Any]:
        launches, launch_ms = counts["launches"], round(1e3 * LAUNCH_SECONDS * counts["launches"], 3)
        memory = {name: counts[name] for name in ("predicted_bytes", "process_bytes")}
        return {"launches": launches, "launch_ms": launch_ms, "step_ms": max(gpu_ms, launch_ms), **memory}

    return settings | {
        "predicted_kernels": whole["micro_batch_kernels"],
        "gpu_ms": gpu_ms,
        "whole": mode(whole),
        "graphs": mode(graphs),
        "auto": whole["auto"],
    }


def in_process(settings: dict[str, Any], **environ: str) -> dict[str, Any]:
    """The counts of one step in a fresh process."""
    from build import GPU, environment  # type: ignore[import-not-found]

    gpu = settings.get("gpu", "A100")
    with tempfile.TemporaryDirectory() as cache:
        started = environment() | {"TORCHINDUCTOR_CACHE_DIR": cache, GPU: gpu, **environ}
        command = [sys.executable, "-P", __file__, "--row", json.dumps(settings)]
        done = subprocess.run(command, env=started, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def counted_step(*, gpu: str = "A100", compile: str, **settings: Any) -> dict[str, Any]:
    """What one step launches: kernels, of which the GPU takes ``gpu_ms`` for those outside of graphs, and graphs."""
    from compute import DEVICE  # type: ignore[import-not-found]
    from step_time import StepTime  # type: ignore[import-not-found]

    from infra.device.hardware import device_info
    from train.config import Cycle, TrainConfig
    from train.data.sources import source_of
    from train.estimate.gpt2_speed import kernel_count
    from train.estimate.gpu_rates import load_gpu_rates
    from train.estimate.memory import predict_peak
    from train.loop.trainer import Callbacks, Trainer
    from train.model_config import ModelConfig, parse_model
    from train.resolved import resolve

    counted, readings = StepTime(load_gpu_rates(gpu), "tf32"), list[tuple[float, int]]()

    def after_a_step() -> bool:
        readings.append((counted.seconds, counted.launches + DEVICE.pretended_launches()))
        if len(readings) == COUNTED_STEP - 1:
            counted.__enter__()
        elif len(readings) == COUNTED_STEP:
            counted.__exit__(None, None, None)
        return len(readings) == COUNTED_STEP

    chosen = {"global_batch": settings["micro_batch"]} | settings | {"model": parse_model(settings["model"])}
    with tempfile.TemporaryDirectory() as folder:
        write_zeros(Path(folder), 200_000)
        fixed = {"data": folder, "steps": 9, "cycle": Cycle(9, 0), "keep_checkpoints": 0, "max_loss_spike": 0.0}
        requested = TrainConfig.of(device="cuda", **chosen, **fixed)
        auto, config = (resolve(requested.replace(compile=mode), device_info()) for mode in ("auto", compile))
        data = source_of(config.dataset).open(config.model, config.batch, config.duration.cycle)
        result = Trainer(config, data, Callbacks(should_stop=after_a_step)).run()
    seconds, launches = (after - before for before, after in zip(*readings[-2:], strict=True))
    return {
        "auto": auto.execution.compile, "launches": launches, "gpu_ms": round(1e3 * seconds, 3),
        "micro_batch_kernels": kernel_count(cast(ModelConfig, config.model), config.batch, config.execution),
        "predicted_bytes": predict_peak(config.step).total, "process_bytes": result.memory.process,
    }  # fmt: skip


def write_zeros(folder: Path, count: int) -> None:
    """Token shards of ``count`` zeros."""
    import numpy as np

    from pipeline.shards import Manifest, ShardRow, write_shard

    tokens = np.zeros(count, dtype=np.uint16)
    book = ShardRow("book", "Book", None, "en", "made", "0" * 64, len(tokens), tokens)
    shard = write_shard(folder, "train/000000-000.arrow", "train", [book])
    Manifest.of([shard], config={}, tokenizer_sha256="made", inputs={}, report={}).write(folder)


if __name__ == "__main__":
    main()
