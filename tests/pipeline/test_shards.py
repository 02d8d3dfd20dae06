"""An opened data set is the one that its manifest describes."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.command import UserError
from pipeline.shards import MANIFEST, TokenShards


@pytest.fixture
def tokens(small_shards: Path, tmp_path: Path) -> Path:
    """A finished data set of three shards, to be damaged."""
    return shutil.copytree(small_shards, tmp_path / "tokens")


@pytest.mark.parametrize("change", [-8, 8])
def test_a_shard_of_another_length_is_refused(tokens: Path, change: int) -> None:
    path = tokens / "train/00001.arrow"
    content = path.read_bytes()
    path.write_bytes(content[:change] if change < 0 else content + bytes(change))
    said = f"00001.arrow has {len(content) + change:,} bytes where the manifest says {len(content):,}"
    with pytest.raises(UserError, match=said):
        TokenShards(tokens).open("train")
    assert len(TokenShards(tokens).open("val")) == 1


def test_a_missing_shard_is_refused(tokens: Path) -> None:
    (tokens / "val/00000.arrow").unlink()
    with pytest.raises(UserError, match=r"val/00000\.arrow is missing"):
        TokenShards(tokens).open("val")


def test_a_data_set_that_is_made_again_while_it_is_opened_is_refused(
    tokens: Path, make_shards: Callable[..., Path]
) -> None:
    opened = TokenShards(tokens)
    make_shards(tokens, seed=1)  # shards of the same lengths
    with pytest.raises(UserError, match="was made again while it was being opened"):
        opened.open("train")
    (tokens / MANIFEST).unlink()
    with pytest.raises(UserError, match="so its shards are unfinished"):
        opened.open("train")
