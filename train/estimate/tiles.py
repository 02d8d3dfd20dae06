"""How much of a matrix product's arithmetic a GPU wastes on sizes that do not fill its tiles and waves.

In: a config, and the number of the GPU's multiprocessors. Out: a waste per product, and warnings. A product's result is
cut into tiles, each computed whole by one multiprocessor, and as many tiles as there are multiprocessors make a wave,
which takes as long as one tile (NVIDIA, Matrix Multiplication Background User's Guide). Libraries choose among
tiles; the most efficient one is assumed, so that the figures compare sizes and do not predict times.
"""

from dataclasses import dataclass

from train.config import SIXTEEN_BITS, TrainConfig

TILE = (128, 256)
"""Rows and columns of the most efficient tile on A100 and H100."""
MULTIPROCESSORS = {"A100": 108, "H100": 132, "H200": 132}
WARN = 0.15
"""Waste above which a warning is given."""


@dataclass(frozen=True)
class Waste:
    """Fractions of the arithmetic of one product that are wasted."""

    name: str
    rows: int
    columns: int
    tiles: float
    """On tiles that reach beyond the result."""
    waves: float
    """On multiprocessors that are idle in the last wave."""


def products(config: TrainConfig, multiprocessors: int) -> list[Waste]:
    """The waste of each matrix product of the forward pass, whose rows are the tokens of a micro-batch."""
    model, tokens = config.shape, config.micro_batch * config.model.context_length
    columns = {
        "queries, keys, values": 3 * model.width,
        "projections to the width": model.width,
        "feed-forward up": 4 * model.width,
        "head": model.padded_vocabulary,
    }
    return [_waste(name, tokens, size, multiprocessors) for name, size in columns.items()]


def _waste(name: str, rows: int, columns: int, multiprocessors: int) -> Waste:
    down, across = -(-rows // TILE[0]), -(-columns // TILE[1])
    tiles = down * across
    waves = -(-tiles // multiprocessors)
    used = rows * columns / (tiles * TILE[0] * TILE[1])
    return Waste(name, rows, columns, 1 - used, 1 - tiles / (waves * multiprocessors))


def warnings(config: TrainConfig, multiprocessors: int) -> list[str]:
    """Sentences about sizes that leave tensor cores, tiles or waves unfilled; none where all is well."""
    model = config.shape
    align = 8 if config.precision in SIXTEEN_BITS else 4
    sizes = {"width": model.width, "head's width": model.width // model.heads, "vocabulary": model.padded_vocabulary}
    said = [
        f"the {name} of {size:,} is not a multiple of {align}: tensor cores need that in {config.precision}"
        for name, size in sizes.items()
        if size % align and config.precision != "fp32"  # which does not use them
    ]
    said += [
        f"the vocabulary of {model.padded_vocabulary:,} is not a multiple of 64: --model with padded_vocabulary="
        f"{-(-model.padded_vocabulary // 64) * 64} fills whole tiles"
        for _ in range(model.padded_vocabulary % 64 > 0)
    ]
    for product in products(config, multiprocessors):
        lost = 1 - (1 - product.tiles) * (1 - product.waves)
        if lost > WARN:
            said.append(
                f"{product.name}, {product.rows:,} x {product.columns:,}, wastes {lost:.0%}: {product.tiles:.0%} on "
                f"incomplete tiles and {product.waves:.0%} on an incomplete wave"
            )
    return said
