"""What a finished loop found, put together as a RunResult: speed, arithmetic, memory, losses, what was seen.

In: a trainer whose run has ended, and how. Out: the record that every command compares and keeps.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from infra.hardware import peak_flops
from train.estimate import flops as flops_formula
from train.estimate.flops import utilisation
from train.loop import memory, throughput
from train.loop.validation import bits_per, bytes_of, perplexity
from train.result import Outcome, RunResult

if TYPE_CHECKING:
    from train.loop.trainer import Trainer


def conclude(trainer: "Trainer", outcome: Outcome, reason: str, saved: Path | None) -> RunResult:
    """The result of ``trainer``'s run, which ended with ``outcome``; ``saved`` is its newest checkpoint."""
    config, manifest = trainer.config, trainer.data.manifest
    speed = throughput.steady_state(trainer.step_seconds, config.step_tokens)
    flops = flops_formula.flops_per_token(config.model)
    name = torch.cuda.get_device_name(trainer.device) if trainer.device.type == "cuda" else "cpu"
    peak = peak_flops(name)
    rate = speed.tokens_per_second * flops if speed else None
    last = trainer.reports[-1] if trainer.reports else None
    trained = sum(trainer.step_seconds)
    train_tokens = trainer.step * config.step_tokens
    totals, val = manifest.splits["train"], manifest.splits["val"]
    val_loss = last.val_loss if last else None
    validation = trainer.data.validation
    val_bytes = bytes_of(validation, manifest.vocabulary_sha256) if validation and val_loss is not None else None
    return RunResult(
        outcome=outcome,
        reason=reason,
        steps=trainer.step,
        throughput=speed,
        memory=memory.peak(trainer.device),
        train_loss=last.train_loss if last else None,
        val_loss=val_loss,
        train_tokens=train_tokens,
        val_tokens=trainer.val_tokens,
        books=train_tokens * totals["books"] / totals["tokens"],
        seconds=trainer.elapsed,
        first_step_seconds=trainer.first_step_seconds,
        data_wait_fraction=trainer.data_wait / trained if trained else None,
        optimizer_fraction=trainer.optimizer_seconds / trained if trained else None,
        flops_per_token=flops,
        flops_formula=flops_formula.FLOPS_FORMULA,
        flops_per_second=rate,
        mfu=utilisation(speed.tokens_per_second, flops, peak, config.workers) if speed else None,
        device=name,
        checkpoint=str(saved) if saved else None,
        data_fingerprint=manifest.fingerprint,
        loss_curve=[(r.step, r.train_loss, r.val_loss) for r in trainer.reports],
        val_perplexity=perplexity(val_loss),
        val_bits_per_byte=bits_per(val_loss, val["tokens"], val_bytes),
        val_bits_per_character=bits_per(val_loss, val["tokens"], val["chars"]),
    )
