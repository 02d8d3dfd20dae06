"""The batch of a run with ``--fit-batch``: the largest one that is predicted to fit in memory."""

from dataclasses import replace

from infra.cli.units import format_size
from infra.errors import UserError
from train.config import Batch, Step
from train.estimate.memory import predict_peak

TOO_LARGE = ("oom", "over_limit")
"""Outcomes of a run whose batch did not fit."""

RETRIES = 3
"""Maximum number of smaller batches that are tried if a batch that was predicted to fit does not."""


def largest_batch(step: Step, limit: int) -> Batch:
    """Find the batch with the largest micro-batch that is predicted to fit ``limit`` bytes; above 8 a multiple of 8.

    The accumulation is unchanged, so the global batch changes. Raises ``UserError`` if no micro-batch fits.
    """
    batch = step.batch
    sequences = batch.accumulation * batch.workers
    largest = None
    for size in (*range(1, 8), *range(8, 8193, 8)):
        candidate = replace(batch, micro_batch=size, global_batch=size * sequences)
        if predict_peak(replace(step, batch=candidate)).total > limit:
            break
        largest = candidate
    if largest is None:
        raise UserError(f"--fit-batch: no micro-batch fits {format_size(limit)}. Use a larger --memory-limit.")
    return largest
