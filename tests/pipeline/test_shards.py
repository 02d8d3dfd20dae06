"""An opened data set is the one that its manifest describes."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from infra.errors import UserError
from infra.storage.directory import StorageDir
from pipeline.shards import (
    FORMAT_VERSION,
    MANIFEST_FILE,
    TRACKING_FILE,
    Manifest,
    Shard,
    ShardInfo,
    TokenShards,
    checksum,
    find_producing_run,
    read_manifest,
    write_batch,
)


@pytest.fixture
def tokens(small_shards: Path, tmp_path: Path) -> Path:
    """A finished data set of three shards, to be damaged."""
    return shutil.copytree(small_shards, tmp_path / "tokens")


@pytest.mark.parametrize("change", [-8, 8])
def test_a_shard_of_another_length_is_refused(tokens: Path, change: int) -> None:
    path = tokens / "train/000001-000.arrow"
    content = path.read_bytes()
    path.write_bytes(content[:change] if change < 0 else content + bytes(change))
    sizes = rf"{len(content) + change:,} bytes.* {len(content):,}"
    with pytest.raises(UserError, match=rf"000001-000\.arrow has {sizes}"):
        TokenShards(tokens).open("train")
    assert len(TokenShards(tokens).open("val")) == 1


def test_a_damaged_and_a_missing_shard_are_refused(tokens: Path) -> None:
    path = tokens / "val/000000-000.arrow"
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(UserError, match=r"cannot be read as a token shard .* --verify"):
        TokenShards(tokens).open("val")
    path.unlink()
    with pytest.raises(UserError, match=r"val/000000-000\.arrow is missing"):
        TokenShards(tokens).open("val")


def test_a_manifest_cannot_name_a_file_outside(tokens: Path) -> None:
    values = json.loads((tokens / MANIFEST_FILE).read_text())
    for path in (
        "../../etc/passwd", "/etc/passwd", "train/../../escaped.arrow", "C:\\shards\\0.arrow", "train/0.arrow/../x",
        "train/0001.arrow",
    ):  # fmt: skip
        values["shards"][0]["path"] = path
        (tokens / MANIFEST_FILE).write_text(json.dumps(values))
        for opened in (read_manifest, TokenShards):
            with pytest.raises(UserError, match=r"manifest\.json is damaged \(.*not the name of a shard"):
                opened(tokens)


def test_a_data_set_that_is_made_again_while_it_is_opened_is_refused(
    tokens: Path, make_shards: Callable[..., Path]
) -> None:
    opened = TokenShards(tokens)
    make_shards(tokens, seed=1)  # shards of the same lengths
    with pytest.raises(UserError, match="Run the same command again"):
        opened.open("train")
    (tokens / MANIFEST_FILE).unlink()
    with pytest.raises(UserError, match=r"has no manifest\.json"):
        opened.open("train")


def test_a_manifest_depends_on_its_shards_and_not_on_their_order(tokens: Path) -> None:
    made = read_manifest(tokens)

    def of(shards: list[ShardInfo], tokenizer: str = "small") -> Manifest:
        return Manifest.of(shards, config={}, tokenizer_sha256=tokenizer, inputs={}, report={})

    assert of(made.shards[::-1]) == made
    train, val = made.shards[:2], made.shards[2]
    assert made.splits == {
        "train": {"shards": 2, "books": 11, "tokens": sum(s.tokens for s in train), "chars": 44_000},
        "val": {"shards": 1, "books": 1, "tokens": val.tokens, "chars": 4_000},
    }
    others = [
        of([*train, replace(val, checksum="0" * 32)]), of([*train, replace(val, path="val/000001-000.arrow")]),
        of([*train, replace(val, split="train")]), of(train), of(made.shards, "large"),
    ]  # fmt: skip
    assert len({manifest.fingerprint for manifest in (made, *others)}) == 6


def test_another_format_and_a_damaged_manifest_are_refused(tokens: Path) -> None:
    values = json.loads((tokens / MANIFEST_FILE).read_text(encoding="utf-8"))
    for version in (0, FORMAT_VERSION + 1):
        (tokens / MANIFEST_FILE).write_text(json.dumps(values | {"format_version": version}), encoding="utf-8")
        with pytest.raises(UserError, match=f"has format version {version}"):
            read_manifest(tokens)
    for damage in (
        b"",
        b"{}",
        b'{"format_',
        b"[]",
        b"\xff\xfe",
        b'{"format_version": %d, "shards": [{}]}' % FORMAT_VERSION,
    ):
        (tokens / MANIFEST_FILE).write_bytes(damage)
        with pytest.raises(UserError, match=r"manifest\.json is damaged .* --overwrite"):
            read_manifest(tokens)


def test_a_part_of_a_batch_is_written_with_its_own_numbers(tokens: Path) -> None:
    batch = Shard(tokens / "train/000000-000.arrow").batch
    info = write_batch(tokens, "train/000002-000.arrow", "train", batch.slice(1, 2))
    shard = Shard(tokens / info.path)
    assert (info.rows, info.tokens, info.chars) == (2, 8002, 8000)
    assert len(shard.tokens) == info.tokens
    assert shard.offsets.tolist() == [0, 4001, 8002]
    assert info.bytes == (tokens / info.path).stat().st_size
    assert info.checksum == checksum(tokens / info.path)


def test_storage_that_fails_is_not_taken_for_a_data_set_that_nobody_has_recorded(
    s3: tuple[str, Callable[[float], None]],
) -> None:
    query, set_rate = s3
    place = StorageDir.of(f"s3://places/tokens{query}")
    assert find_producing_run(place) is None
    place.write(TRACKING_FILE, b"cut sh")
    assert find_producing_run(place) is None
    set_rate(1.0)
    with pytest.raises(UserError, match="s3://places/tokens"):
        find_producing_run(place)
