"""Predicted time of activation checkpointing, from which the least recomputation that fits in memory is chosen."""

from typing import get_args

from train.config import ACTIVATION_BUDGETS, Checkpointing

PRODUCTS_FRACTION = 0.26
"""Fraction of a step that the matrix products and attention of the blocks take in the forward pass: a third of 54 of
69 ms, for GPT-2 124M in bf16 on an A100 (predicted from its kernels, tests/benchmarks/records/kernels.json)."""
ELEMENTWISE_FRACTION = 0.07
"""Fraction of a step that element-wise operations and norms take in the forward pass: a third of 15 of 69 ms."""
PRODUCT_OUTPUTS_FRACTION = 0.55
"""Fraction of a block's activations that are outputs of matrix products and attention, or the block's input."""


def recomputation_time(checkpointing: Checkpointing) -> float:
    """Return the predicted additional time of a step, as a fraction.

    A budget recomputes element-wise operations first, which take the least time for their memory, and then products.
    """
    if checkpointing in ACTIVATION_BUDGETS:
        budget = ACTIVATION_BUDGETS[checkpointing]
        elementwise = min(1.0, (1 - budget) / (1 - PRODUCT_OUTPUTS_FRACTION))
        products = max(0.0, 1 - budget / PRODUCT_OUTPUTS_FRACTION)
        return elementwise * ELEMENTWISE_FRACTION + products * PRODUCTS_FRACTION
    block = {"none": 0.0, "selective": 0.0, "alternate": 0.5, "full": 1.0}[checkpointing]
    return block * (ELEMENTWISE_FRACTION + PRODUCTS_FRACTION) + ELEMENTWISE_FRACTION * (checkpointing == "selective")


CHECKPOINTING_BY_TIME: tuple[Checkpointing, ...] = tuple(sorted(get_args(Checkpointing), key=recomputation_time))
"""Kinds of activation checkpointing, the fastest first."""
