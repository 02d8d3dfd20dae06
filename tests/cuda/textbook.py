"""GPT-2 124M and its training step as textbooks write them: what the study's rungs need on an A100 of 40 GB.

    python tests/cuda/textbook.py tune/suite/textbook.json    # in the environment of make test-cuda

Dropout, GELU and normalization are written out, query, key and value have a layer each, and the loss is computed
outside the model. Each rung of the study trains three steps in a fresh process, on a GPU or where there is none on the
pretended one, on which memory is real and kernels do nothing. The record has the most bytes that torch's allocator
handed out and reserved, and the seconds that a step needs by the roofline of its kernels, as does one of this project
at the same rung. ``--compare study`` shows them. See ``make record-textbook``.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from build import GPU, environment
from torch import Tensor, nn

if TYPE_CHECKING:
    from step_time import StepTime

ROOT = Path(__file__).parents[2]
CONTEXT, WIDTH, HEADS, LAYERS, DROPOUT = 512, 768, 12, 12, 0.1


@dataclass(frozen=True)
class Rung:
    """What differs between the study's rungs, as far as it takes memory or kernels. ``batch`` counts sequences."""

    batch: int
    precision: str = "fp32"
    compile: bool = False
    flash: bool = False
    vocab_size: int = 50257
    tied: bool = False


BASELINE = Rung(28)
FP16 = Rung(32, "fp16")
COMPILED = Rung(48, "fp16", compile=True)
FLASH = Rung(64, "fp16", compile=True, flash=True)
PADDED = replace(FLASH, vocab_size=50304)
RUNGS = {
    "baseline": BASELINE,
    "tensor cores": replace(BASELINE, precision="tf32"),
    "mixed precision fp16, same batch": replace(FP16, batch=BASELINE.batch),
    "mixed precision fp16": FP16,
    "compile, same batch": replace(COMPILED, batch=FP16.batch),
    "compile": COMPILED,
    "flash attention, same batch": replace(FLASH, batch=COMPILED.batch),
    "flash attention": FLASH,
    "padded vocabulary": PADDED,
    "tied weights": replace(PADDED, tied=True),
}
"""By the name in the suite ``a100``; those that are missing need what the one before needs."""


class Norm(nn.Module):
    """Layer normalization, written out."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(dim=-1, keepdim=True)
        variance = x.var(dim=-1, keepdim=True, unbiased=False)
        return self.scale * ((x - mean) / torch.sqrt(variance + 1e-5)) + self.shift


class Gelu(nn.Module):
    """GELU by tanh, written out: eager execution keeps every term."""

    def forward(self, x: Tensor) -> Tensor:
        factor = torch.sqrt(torch.tensor(2.0 / math.pi))
        return 0.5 * x * (1 + torch.tanh(factor * (x + 0.044715 * torch.pow(x, 3))))


class Attention(nn.Module):
    """Causal attention with the matrix of weights in memory, unless ``flash``."""

    def __init__(self, rung: Rung) -> None:
        super().__init__()
        self.flash = rung.flash
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(DROPOUT)
        self.mask: Tensor
        self.register_buffer("mask", torch.triu(torch.ones(CONTEXT, CONTEXT), diagonal=1))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        key, query, value = (
            part(x).view(batch, length, HEADS, WIDTH // HEADS).transpose(1, 2)
            for part in (self.key, self.query, self.value)
        )
        if self.flash:
            mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=DROPOUT, is_causal=True)
        else:
            scores = query @ key.transpose(2, 3)
            scores.masked_fill_(self.mask.bool()[:length, :length], -torch.inf)
            mixed = self.dropout(torch.softmax(scores / (WIDTH // HEADS) ** 0.5, dim=-1)) @ value
        return self.out(mixed.transpose(1, 2).contiguous().view(batch, length, WIDTH))


class Block(nn.Module):
    """Attention and the feed-forward layers, each with its normalization, dropout and residual connection."""

    def __init__(self, rung: Rung) -> None:
        super().__init__()
        self.attention = Attention(rung)
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), Gelu(), nn.Linear(4 * WIDTH, WIDTH))
        self.before_attention, self.before_feed_forward = Norm(), Norm()
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.before_attention(x)))
        return x + self.dropout(self.feed_forward(self.before_feed_forward(x)))


class Textbook(nn.Module):
    """The model: ids to logits."""

    def __init__(self, rung: Rung) -> None:
        super().__init__()
        self.tokens = nn.Embedding(rung.vocab_size, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.dropout = nn.Dropout(DROPOUT)
        self.blocks = nn.Sequential(*(Block(rung) for _ in range(LAYERS)))
        self.norm = Norm()
        self.head = nn.Linear(WIDTH, rung.vocab_size, bias=False)
        if rung.tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        return self.head(self.norm(self.blocks(self.dropout(self.tokens(ids) + self.positions(positions)))))


def train(rung: Rung) -> Iterator[None]:
    """The textbook's loop on batches of zeros, one step at a time."""
    device = torch.device("cuda")
    torch.set_float32_matmul_precision("highest" if rung.precision == "fp32" else "high")
    model = Textbook(rung).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-4, weight_decay=0.1)
    forward = torch.compile(model) if rung.compile else model
    scaler = torch.amp.GradScaler("cuda", enabled=rung.precision == "fp16")
    while True:
        inputs = torch.zeros(rung.batch, CONTEXT, dtype=torch.long, device=device)
        targets = torch.zeros_like(inputs)
        optimizer.zero_grad()
        loss = mean_loss(forward, inputs, targets, rung)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        del loss
        yield


def mean_loss(forward: Callable[[Tensor], Tensor], inputs: Tensor, targets: Tensor, rung: Rung) -> Tensor:
    """A function of its own, as in textbooks, whose logits are gone when it returns."""
    with torch.autocast("cuda", dtype=torch.float16, enabled=rung.precision == "fp16"):
        return F.cross_entropy(forward(inputs).flatten(0, 1), targets.flatten())


def measured(name: str, counted: "StepTime") -> dict[str, Any]:
    """What the textbook's rung ``name`` needs: bytes of three steps, and the seconds of the next."""
    steps = train(RUNGS[name])
    with counted:
        list(islice(steps, 3))
        found = {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
        before = counted.seconds
        next(steps)
    return found | {"seconds": round(counted.seconds - before, 5)}


def ours(name: str, counted: "StepTime") -> dict[str, Any]:
    """The seconds that a step of this project needs at the study's rung ``name``."""
    import numpy as np

    from pipeline.shards import Manifest, ShardRow, write_shard
    from train.config import Cycle
    from train.data.sources import source_of
    from train.loop.trainer import Callbacks, Trainer
    from tune.suite.textbook import study_rungs

    steps: list[float] = []

    def after_a_step() -> bool:
        """Counts the third, which is under way when the callback for the second returns."""
        steps.append(counted.seconds)
        if len(steps) == 2:
            counted.__enter__()
        elif len(steps) == 3:
            counted.__exit__(None, None, None)
        return len(steps) == 3

    with tempfile.TemporaryDirectory() as folder:
        tokens = np.zeros(200_000, dtype=np.uint16)
        shard = write_shard(
            Path(folder), "train/000000-000.arrow", "train",
            [ShardRow("book", "Book", None, "en", "made", "0" * 64, len(tokens), tokens)],
        )  # fmt: skip
        Manifest.of([shard], config={}, tokenizer_sha256="made", inputs={}, report={}).write(Path(folder))
        config = dict(study_rungs())[name]
        config = config.replace(data=folder, steps=4, cycle=Cycle(4, 0), keep_checkpoints=0, max_loss_spike=0.0)
        data = source_of(config.dataset).open(config.model, config.batch, config.duration.cycle)
        Trainer(config, data, Callbacks(should_stop=after_a_step)).run()
    return {"our_seconds": round(steps[-1], 5)}


LOOPS = {"textbook": measured, "ours": ours}


def main() -> None:
    """Run each rung of both loops, or the one that is named, and write the record."""
    sys.path.insert(0, str(ROOT))
    if sys.argv[1] in LOOPS:
        from step_time import StepTime

        from train.estimate.gpu_rates import load_gpu_rates

        loop, name = sys.argv[1:]
        counted = StepTime(load_gpu_rates("A100"), RUNGS[name].precision)
        found = {"device": torch.cuda.get_device_name()} | LOOPS[loop](name, counted)
        print(json.dumps(found), flush=True)
        os._exit(0)  # which spares the pretended device an orderly end
    chosen, rows = environment(), []
    with tempfile.TemporaryDirectory() as cache:
        for name, rung in RUNGS.items():
            row: dict[str, Any] = {"rung": name, "batch": rung.batch}
            for loop in LOOPS if "same batch" not in name else ("textbook",):
                command = [sys.executable, __file__, loop, name]
                environ = chosen | {"TORCHINDUCTOR_CACHE_DIR": cache}
                done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True)
                row |= json.loads(done.stdout.splitlines()[-1])
            rows.append(row)
            print(row, flush=True)
    today = datetime.now(UTC).date().isoformat()
    record = {"date": today, "torch": torch.__version__, "pretended": GPU in chosen, "rows": rows}
    Path(sys.argv[1]).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
