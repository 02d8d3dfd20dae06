"""Speed and losses of llm.c on a card, where a checkout of it and NVIDIA's compiler are at hand.

    python -P tests/benchmarks/gpu/llm_c.py --checkout ../llm.c --data data/tokens --micro-batch 16 --steps 10

In: token shards and a checkout, which is built once by its own Makefile. Out: as JSON on the last line, tokens per
second by the median step, and the losses, which are of other initial weights and so are not compared with ours.
"""

import argparse
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

MAGIC, VERSION, HEADER_INTEGERS = 20240520, 1, 256
"""Of llm.c's files of tokens: a header of 32-bit integers, then 16-bit ids."""
PROGRAM = "train_gpt2cu"
STEP = re.compile(r"^step\s+(\d+)/\d+ \|.*?loss\s+([\d.]+).*?\|\s*([\d.]+) ms\b", re.MULTILINE)
"""A step's number, loss and milliseconds, in what it prints."""


def obstacle(checkout: Path) -> str:
    """Why llm.c cannot be measured with this checkout; empty if it can."""
    if not (checkout / "train_gpt2.cu").exists():
        return f"{checkout} is no checkout of llm.c: train_gpt2.cu is missing"
    if not (checkout / PROGRAM).exists() and not shutil.which("nvcc"):
        return "NVIDIA's compiler, nvcc, is missing"
    return ""


def write_tokens(shards: Path, target: Path, count: int) -> int:
    """Write the first ``count`` tokens of a data set in llm.c's format; returns how many there were."""
    import numpy as np

    from pipeline.shards import TokenShards

    tokens = np.concatenate([np.asarray(stream)[:count] for stream in TokenShards(shards).streams("train")])[:count]
    header = np.zeros(HEADER_INTEGERS, np.int32)
    header[:3] = MAGIC, VERSION, len(tokens)
    target.write_bytes(header.tobytes() + tokens.astype(np.uint16).tobytes())
    return len(tokens)


def measure(checkout: Path, shards: Path, micro_batch: int, steps: int, context: int = 1024) -> dict[str, Any]:
    """Train GPT-2 124M for some steps of one micro-batch each."""
    if reason := obstacle(checkout):
        return {"outcome": "failed", "reason": reason}
    if not (checkout / PROGRAM).exists():
        built = subprocess.run(["make", PROGRAM], cwd=checkout, capture_output=True, text=True)
        if built.returncode:
            return {"outcome": "failed", "reason": built.stderr[-600:]}
    step_tokens = micro_batch * context
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "tokens_train.bin")
        write_tokens(shards, data, step_tokens * (steps + 1) + 1)
        command = [
            str(checkout.resolve() / PROGRAM), "-i", str(data), "-j", str(data), "-e", "d12", "-b", str(micro_batch),
            "-t", str(context), "-d", str(step_tokens), "-x", str(steps), "-v", "0", "-s", "0", "-h", "0",
        ]  # fmt: skip
        done = subprocess.run(command, cwd=checkout, capture_output=True, text=True)
    if done.returncode:
        is_oom = "out of memory" in (done.stdout + done.stderr).lower()
        return {"outcome": "out of memory" if is_oom else "failed", "reason": (done.stderr or done.stdout)[-600:]}
    return parse(done.stdout, step_tokens) | {"micro_batch": micro_batch}


def parse(printed: str, step_tokens: int) -> dict[str, Any]:
    """The speed and the losses that llm.c ``printed`` for its steps."""
    matches = STEP.findall(printed)
    if not matches:
        return {"outcome": "failed", "reason": f"no steps in what it printed: {printed[-300:]}"}
    seconds = [float(milliseconds) / 1000 for _, _, milliseconds in matches]
    steady = seconds[max(1, len(seconds) // 3) :] or seconds
    return {
        "outcome": "ok", "tokens_per_second": step_tokens / statistics.median(steady), "step_seconds": seconds,
        "losses": [float(loss) for _, loss, _ in matches],
    }  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--checkout", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--micro-batch", type=int, required=True)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    print(json.dumps(measure(options.checkout, options.data, options.micro_batch, options.steps)))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
