"""Tile and wave quantization: the fraction of a matrix product that a GPU wastes on sizes that do not fill its tiles.

The result of a matrix product is divided into tiles, each computed by one multiprocessor. As many tiles as there are
multiprocessors form a wave, which takes as long as one tile (NVIDIA, Matrix Multiplication Background User's Guide).
Libraries choose among several tiles; the most efficient one is assumed, so the numbers compare sizes and do not predict
times.
"""

from dataclasses import dataclass

from train.config import HALF_PRECISIONS, Precision
from train.model_config import ModelSpec

TILE = (128, 256)
"""Rows and columns of the most efficient tile on A100 and H100."""
MAX_UNREPORTED_WASTE = 0.15
"""Wasted fraction above which there is a warning."""


@dataclass(frozen=True)
class Waste:
    """Fractions of one matrix product that are wasted."""

    name: str
    """Name of the matrix product, such as "MLP up"."""
    rows: int
    """Number of rows of the result, which are tokens."""
    columns: int
    """Number of columns of the result."""
    tiles: float
    """Fraction wasted on tiles that extend beyond the result."""
    waves: float
    """Fraction wasted on multiprocessors that are idle in the last wave."""

    @property
    def wasted(self) -> float:
        """Fraction wasted on tiles and waves together."""
        return 1 - (1 - self.tiles) * (1 - self.waves)


def products(model: ModelSpec, micro_batch: int, multiprocessors: int) -> list[Waste]:
    """Return the waste of each matrix product of the forward pass, whose rows are the tokens of a micro-batch."""
    tokens = micro_batch * model.context_length
    return [_waste(name, tokens, columns, multiprocessors) for name, columns in model.matrices.items()]


def _waste(name: str, rows: int, columns: int, multiprocessors: int) -> Waste:
    down, across = -(-rows // TILE[0]), -(-columns // TILE[1])
    tiles = down * across
    waves = -(-tiles // multiprocessors)
    used = rows * columns / (tiles * TILE[0] * TILE[1])
    return Waste(name, rows, columns, 1 - used, 1 - tiles / (waves * multiprocessors))


def warnings(model: ModelSpec, micro_batch: int, precision: Precision, multiprocessors: int) -> list[str]:
    """Return sentences about sizes that do not fill tensor cores, tiles or waves; empty if there are none."""
    align = 8 if precision in HALF_PRECISIONS else 4
    sentences = [
        f"{name} {size:,} is not a multiple of {align}, which tensor cores need for {precision}"
        for name, size in model.aligned_sizes.items()
        if size % align and precision != "fp32"  # fp32 does not use tensor cores.
    ]
    if model.output_size % 64:
        padded = -(-model.output_size // 64) * 64
        sentences.append(
            f"padded vocabulary {model.output_size:,} is not a multiple of 64; set padded_vocab_size={padded} in "
            "--model to fill whole tiles"
        )
    for product in products(model, micro_batch, multiprocessors):
        if product.wasted > MAX_UNREPORTED_WASTE:
            sentences.append(
                f"{product.name} ({product.rows:,} x {product.columns:,}) wastes {product.wasted:.0%}: "
                f"{product.tiles:.0%} on incomplete tiles and {product.waves:.0%} on an incomplete wave"
            )
    return sentences
