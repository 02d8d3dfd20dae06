"""The data of a plan for which there are no token shards yet."""

from pipeline.shards import SPLITS, Manifest, ShardInfo, shard_path
from train.model_config import ModelSpec

TOKENS_PER_PARAMETER = 20
"""Compute-optimal number of training tokens per parameter (Hoffmann et al. 2022, arXiv 2203.15556, table 3)."""


def assume_manifest(tokens: int) -> Manifest:
    """Return the manifest of data with this number of training tokens, which fit the vocabulary of any model.

    It has no fingerprint, because there are no shards.
    """
    shards = [ShardInfo(shard_path(split, "000000", 0), split, 2 * tokens, 1, tokens, tokens, "") for split in SPLITS]
    totals = {split: {"shards": 1, "books": 1, "tokens": tokens, "chars": tokens} for split in SPLITS}
    return Manifest({}, "", shards, {}, {}, "", splits=totals)


def describe_data(manifest: Manifest, model: ModelSpec, source: str) -> str:
    """Describe the data of a plan in a line: their tokens and token ids, and what is assumed of them."""
    tokens = manifest.splits["train"]["tokens"]
    if manifest.fingerprint:
        return f"data: {source}, {tokens:,} training tokens and {model.vocab_size:,} token ids"
    return f"data: none in {source}; assuming {tokens:,} tokens and {model.vocab_size:,} token ids"
