"""Ours beside what a user would pick instead: one model, one batch, one card, fresh processes that take turns.

    python -P tests/benchmarks/gpu/peers.py --data data/tokens --global-batch 480 --config runs/SEARCH/best.json \
        [--build-nanogpt ../build-nanogpt] [--memory-limit 40GB] [--record FILE.json]

Every side trains the standard GPT-2 of ``--model`` (biases, tied head, vocabulary 50,304, no dropout) with
AdamW, betas 0.9 and 0.95, decay 0.1 on matrices, gradients clipped at 1. The peers get bf16 autocast, SDPA,
``torch.compile``, fused AdamW, TF32 elsewhere, and our data loader, which flatters them. Each side uses the
largest micro-batch up to its own ``--micro-batch`` that stays within the limit: a side that runs out of
memory, or lives off freed cache as no trial of the search may, is tried again with the next smaller divisor.
nanoGPT's model is the one that the GPU test trains, written from its published description, with our initial weights,
so that its losses are compared with ours. build-nanogpt is read from a local checkout; none of its code is kept here. A
run that was interrupted continues from the rows beside its record.
"""

import argparse
import ast
import itertools
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

from infra.cli.units import parse_size
from infra.device import provenance
from infra.device.gpu import read_gpu
from infra.storage.files import write_json
from train.config import Cycle, ResolvedConfig, TrainConfig, divisors, load_config
from train.model_config import ModelConfig, parse_model
from train.resolved import resolve_local
from tune.suite.catalog import A100
from tune.suite.suites import apply_changes

RAN_OUT = "out of memory"
SIDES = ("ours", "ladder", "huggingface", "nanogpt", "build-nanogpt")
"""Ours at ``--config``; ours as the last rung of the ladder ``a100``; the peers."""

Loss = Callable[[Any, Any], Any]
"""Token ids and the ids after them, both of shape (micro-batch, context), to the mean loss."""


@dataclass(frozen=True)
class Peer:
    """A model as a user would train it: its loss and its optimizer."""

    model: Any
    loss: Loss
    optimizer: Any


MakePeer = Callable[[argparse.Namespace, ResolvedConfig, Any], Peer]
"""Function of the options, the run and the device that builds a peer."""


def main() -> None:
    """Take turns, print a table, and record. As a child: measure one side and print what it found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", default="gpt2-124m")
    parser.add_argument("--global-batch", type=int, default=480, help="sequences per step")
    parser.add_argument("--micro-batch", type=int, default=60, help="largest to try for every side but 'ours'")
    parser.add_argument("--config", type=Path, help="the search's best.json, for the side 'ours'")
    parser.add_argument("--build-nanogpt", type=Path, help="a checkout of build-nanogpt")
    parser.add_argument("--memory-limit", default="40GB")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--compile", choices=["whole", "off"], default="whole", help="off for a trial on a CPU")
    parser.add_argument("--record", type=Path)
    parser.add_argument("--settings", type=json.loads, default={}, help="of the side 'ours', as JSON, over --config's")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        print(json.dumps(measure(options)))
        return
    sides = [side for side in SIDES if side != "build-nanogpt" or options.build_nanogpt]
    sizes = dict.fromkeys(sides, largest(options.global_batch, options.micro_batch))
    if options.config:
        sizes["ours"] = ResolvedConfig.from_resolved(load_config(options.config)).batch.micro_batch
    journal = options.record and options.record.with_suffix(".rows.jsonl")
    rows: list[dict[str, Any]] = []
    if journal and journal.exists():
        rows = [json.loads(line) for line in journal.read_text().splitlines()]
        sizes |= {row["side"]: row["micro_batch"] for row in rows}
    done = {(row["turn"], row["side"]) for row in rows}
    for turn in range(options.rounds):
        for side in sides if turn % 2 == 0 else reversed(sides):
            if (turn, side) in done:
                continue
            row = run(side, sizes[side])
            while row.get("outcome") == RAN_OUT and sizes[side] > 1:
                print(f"{side}: {sizes[side]} sequences do not fit", flush=True)
                sizes[side] = largest(options.global_batch, sizes[side] - 1)
                row = run(side, sizes[side])
            rows.append({"turn": turn, "side": side} | row)
            if journal:
                with journal.open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
            print(json.dumps({k: v for k, v in rows[-1].items() if k != "losses"}), flush=True)
    speeds = {side: [r["tokens_per_second"] for r in rows if r["side"] == side] for side in sides}
    middle = {side: statistics.median(speed) for side, speed in speeds.items()}
    for side, speed in middle.items():
        print(f"{side:14} {speed:12,.0f} tokens/s   ours is {middle['ours'] / speed:5.2f} times as fast")
    difference = loss_difference(rows, "ours", "nanogpt")
    if difference is not None:
        print(f"losses of ours and nanoGPT's model differ by at most {difference:.4f} nats")
    if options.record:
        about = {"where": provenance.collect(), "memory_limit": options.memory_limit, "rounds": options.rounds}
        about["versions"] = {name: version(name) for name in ("torch", "transformers")}
        about["command"] = " ".join(["python", "-P", *sys.argv])
        ratios = {side: middle["ours"] / speed for side, speed in middle.items()}
        record = about | {"tokens_per_second": middle, "ours_over": ratios, "loss_difference": difference, "rows": rows}
        write_json(options.record, record)


def loss_difference(rows: list[dict[str, Any]], side: str, other: str) -> float | None:
    """The largest difference of the losses of two sides in the same step; None before both have trained."""
    losses = [next((row["losses"] for row in rows if row["side"] == name and row.get("losses")), None)
              for name in (side, other)]  # fmt: skip
    if None in losses:
        return None
    return max(abs(one - another) for one, another in zip(*losses, strict=True))


def largest(global_batch: int, most: int) -> int:
    """The largest divisor of ``global_batch`` that is at most ``most``."""
    return max(size for size in divisors(global_batch) if size <= most)


def run(side: str, size: int) -> dict[str, Any]:
    """Measure one side in a process of its own."""
    child = [sys.executable, "-P", __file__, *sys.argv[1:], "--side", side, "--size", str(size)]
    done = subprocess.run(child, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{side} failed:\n{done.stderr}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second of one side by the median step, its peak memory, and its losses."""
    import torch

    from train.loop import memory
    from train.loop.execution import configure_allocator
    from train.loop.memory_limit import MemoryLimit
    from tune.trial.run import THRASHING_STEPS

    config = config_of(options)
    configure_allocator(config.execution.allocator)  # as a trial does, before anything is allocated
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    limit = MemoryLimit.apply(parse_size(options.memory_limit), kind)
    torch.set_float32_matmul_precision("high")
    memory.reset_peak(limit.device)
    try:
        if options.side in ("ours", "ladder"):
            seconds, losses = train_ours(config)
        else:
            seconds, losses = train_peer(PEERS[options.side], config, options, limit.device)
    except RuntimeError as failure:
        if not memory.is_oom_error(failure):
            raise
        return {"outcome": RAN_OUT}
    # One retry makes room for the optimizer's state in the first step; more mean that every step frees and asks anew.
    if options.side not in ("ours", "ladder") and memory.peak(limit.device).allocator_retries > THRASHING_STEPS:
        return {"outcome": RAN_OUT}
    steady = seconds[max(1, len(seconds) // 3) :]
    return clocks() | {
        "outcome": "ok",
        "micro_batch": config.batch.micro_batch,
        "tokens_per_second": config.step_tokens / statistics.median(steady),
        "peak_bytes": limit.used()[0],
        "step_seconds": seconds,
        "losses": losses,
    }


def clocks() -> dict[str, Any]:
    """The clock of the GPU and why it is lowered, right after the steps."""
    state = read_gpu()
    names = ("sm_clock", "temperature", "throttle_reasons")
    return {name: getattr(state, name) for name in names} if state else {}


def config_of(options: argparse.Namespace) -> ResolvedConfig:
    """What is trained: the same mathematics on every side; the execution is that of ``best.json`` or of the ladder."""
    config = TrainConfig.of(
        data=str(options.data.resolve()), model=parse_model(options.model), compile=options.compile, loss="plain"
    )  # fmt: skip
    if options.side == "ours" and options.config:
        config = load_config(options.config).replace(data=config.dataset.data)
    if options.side == "ours":
        config = config.replace(**options.settings)
    if options.side == "ladder":
        steps = {name: value for rung in A100.rungs for name, value in rung.changes.items() if name != "batch"}
        config = apply_changes(config, steps | {"compile": "max-autotune" if options.compile == "whole" else "off"})
    changes = {"global_batch": options.global_batch, "micro_batch": options.size, "steps": options.steps}
    return resolve_local(config.replace(**changes, cycle=Cycle(options.steps, 0), keep_checkpoints=0))


def train_ours(config: ResolvedConfig) -> tuple[list[float], list[float]]:
    """Seconds and losses of the steps of our loop."""
    from train.data.sources import source_of
    from train.loop.trainer import Trainer

    data = source_of(config.dataset).open(config.model, config.batch, config.duration.cycle)
    trainer = Trainer(config, data)
    result = trainer.run()
    if result.outcome == "oom":
        import torch

        raise torch.OutOfMemoryError(result.reason)
    return trainer.times.steps, [loss for report in trainer.times.reports for loss in report.step_losses]


def train_peer(
    make: Callable[[argparse.Namespace, ResolvedConfig, Any], Peer],
    config: ResolvedConfig,
    options: argparse.Namespace,
    device: Any,
) -> tuple[list[float], list[float]]:
    """Seconds and losses of a peer's steps: autocast, accumulation, clipping, step, as all of them train."""
    import torch

    from pipeline.shards import TokenShards
    from train.data.loader import BatchLoader, WorkerShare
    from train.data.windows import Windows
    from train.loop.timing import mark, seconds_between, wait_for
    from train.models.optimizer import learning_rate, set_learning_rate

    torch.manual_seed(config.dataset.seed)
    peer = make(options, config, device)
    windows = Windows(
        TokenShards(Path(config.dataset.data)).streams("train"), config.model.context_length, config.dataset.seed
    )
    loader = BatchLoader(windows, WorkerShare(config.batch), device)
    # On a CPU, where bf16 is emulated, all sides compute in fp32; it is a trial of this program, no comparison.
    # A card without bf16 computes in fp16 with loss scaling, as ours does there.
    is_fp16 = config.execution.precision == "fp16"
    cast = torch.autocast(device.type, torch.float16 if is_fp16 else torch.bfloat16, enabled=device.type == "cuda")
    scaler = torch.amp.GradScaler(device.type, enabled=is_fp16)
    marks, losses = [mark(device)], []
    steps = config.duration.steps or 0
    for step in range(steps):
        set_learning_rate(peer.optimizer, learning_rate(config.optimization, step, steps, step / steps))
        total = torch.zeros((), device=device)
        for _ in range(config.batch.accumulation):
            inputs, targets = (half.contiguous() for half in loader.next())  # which nanoGPT's view() needs
            with cast:
                loss = peer.loss(inputs, targets) / config.batch.accumulation
            scaler.scale(loss).backward()
            total += loss.detach()
        scaler.unscale_(peer.optimizer)
        torch.nn.utils.clip_grad_norm_(peer.model.parameters(), config.optimization.clip_norm)
        scaler.step(peer.optimizer)
        scaler.update()
        peer.optimizer.zero_grad(set_to_none=True)
        losses.append(total)
        marks.append(mark(device))
    wait_for(marks[-1])
    seconds = [seconds_between(first, last) for first, last in itertools.pairwise(marks)]
    return seconds, [loss.item() for loss in losses]


def huggingface(options: argparse.Namespace, config: ResolvedConfig, device: Any) -> Peer:
    """``transformers``' GPT-2 at its best: SDPA, the loss inside the compiled graph, no logits returned.

    Under compilation its own "sdpa" makes a mask of all positions, with which no flash kernel runs. An attention
    registered under another name gets none, and is causal by the flag.
    """
    import torch
    import torch.nn.functional as F
    from transformers import AttentionInterface, GPT2Config, GPT2LMHeadModel
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    shape = cast(ModelConfig, parse_model(options.model))
    sizes: dict[str, Any] = {
        "vocab_size": shape.padded_vocab_size, "n_positions": shape.context_length, "n_embd": shape.width,
        "n_layer": shape.layers, "n_head": shape.heads,
    }  # fmt: skip
    plain: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
    AttentionInterface.register("causal_sdpa", sdpa_attention_forward)
    plain["attn_implementation"] = "causal_sdpa"
    model: Any = GPT2LMHeadModel(GPT2Config(**sizes, **plain)).to(device)

    def loss(inputs: Any, targets: Any) -> Any:
        logits = model(inputs).logits
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1))

    matrices = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), fused=device.type == "cuda")
    return Peer(model, compiled(loss, options), optimizer)


def nanogpt(options: argparse.Namespace, config: ResolvedConfig, device: Any) -> Peer:
    """nanoGPT's model and optimizer, compiled as its ``train.py`` does, with our initial weights."""
    from train.gpu_test.nanogpt import NanoGPT, load_initial_weights, make_optimizer
    from train.loop.execution import build_model

    model = NanoGPT(cast(ModelConfig, config.model)).to(device)
    ours = build_model(config.model, config.execution, config.optimization.optimizer, config.dataset.seed, device)
    load_initial_weights(model, ours)
    optimizer = make_optimizer(model, learning_rate=6e-4, betas=(0.9, 0.95), decay=0.1, fused=device.type == "cuda")
    return Peer(model, compiled(model, options), optimizer)


def build_nanogpt(options: argparse.Namespace, config: ResolvedConfig, device: Any) -> Peer:
    """build-nanogpt's model and optimizer, compiled, as its author's lecture does."""
    theirs = definitions(options.build_nanogpt / "train_gpt2.py", master_process=False)
    shape = cast(ModelConfig, parse_model(options.model))
    config = theirs.GPTConfig(
        block_size=shape.context_length, vocab_size=shape.padded_vocab_size, n_layer=shape.layers,
        n_head=shape.heads, n_embd=shape.width,
    )  # fmt: skip
    model = theirs.GPT(config).to(device)
    optimizer = model.configure_optimizers(weight_decay=0.1, learning_rate=6e-4, device_type=device.type)
    forward = compiled(model, options)
    return Peer(model, lambda inputs, targets: forward(inputs, targets)[1], optimizer)


PEERS = {"huggingface": huggingface, "nanogpt": nanogpt, "build-nanogpt": build_nanogpt}


def compiled(function: Any, options: argparse.Namespace) -> Any:
    """``function`` as ``torch.compile`` makes it, for shapes that never change."""
    import torch

    return torch.compile(function, dynamic=False) if options.compile == "whole" else function


def definitions(path: Path, **names: object) -> SimpleNamespace:
    """The classes and functions of a script, without its imports and without running the training below them."""
    import inspect

    import torch

    kept = [n for n in ast.parse(path.read_text()).body if isinstance(n, ast.ClassDef | ast.FunctionDef)]
    space: dict[str, Any] = {
        "__name__": "peer", "math": math, "inspect": inspect, "dataclass": dataclass, "torch": torch, "nn": torch.nn,
        "F": torch.nn.functional, **names,
    }  # fmt: skip
    sys.modules["peer"] = ModuleType("peer")  # where dataclass looks names up
    exec(compile(ast.Module(list(kept), []), str(path), "exec"), space)  # noqa: S102 a file the user names, to run it
    return SimpleNamespace(**space)


if __name__ == "__main__":
    main()
