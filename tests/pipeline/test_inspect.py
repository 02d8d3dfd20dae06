"""A flipped byte anywhere in any shard is found."""

import glob
import hashlib
import random
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from infra.errors import UserError
from infra.storage.directory import StorageDir
from pipeline.books.sources import build_inventory
from pipeline.config import TokenizeConfig
from pipeline.encoding.tokenizer import GPT2_SHA256, gpt2
from pipeline.inspect import InspectConfig, decode_passages, find_damage, main
from pipeline.job.partition_result import read_result
from pipeline.job.plan import make_partitions
from pipeline.job.task import run_partition
from pipeline.shards import Manifest, ShardRow, read_manifest, write_shard


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory, write_books: Callable[..., Path]) -> Path:
    """A finished data set of two splits."""
    folder = tmp_path_factory.mktemp("inspect")
    books = write_books(folder / "books", 8, 500)
    config = TokenizeConfig(sources=(str(books),), val_fraction=0.3)
    for partition in make_partitions(build_inventory(config.sources), config):
        run_partition(partition, StorageDir.of(folder / "tokens"), f"test-{uuid.uuid4()}")
    result = read_result(folder / "tokens", "000000")
    assert result
    assert len(result.shards) == 2
    made = Manifest.of(result.shards, config={}, tokenizer_sha256=GPT2_SHA256, inputs={}, report={"books_dropped": {}})
    made.write(folder / "tokens")
    return folder / "tokens"


def test_every_flipped_byte_is_found(tokens: Path) -> None:
    manifest = read_manifest(tokens)
    assert not list(find_damage(StorageDir.of(tokens), manifest))
    chance = random.Random(0)
    for _ in range(1000):
        path = tokens / chance.choice(manifest.shards).path
        place, bit = chance.randrange(path.stat().st_size), 1 << chance.randrange(8)
        with path.open("r+b") as file:
            file.seek(place)
            (byte,) = file.read(1)
            file.seek(place)
            file.write(bytes([byte ^ bit]))
        (sentence,) = find_damage(StorageDir.of(tokens), manifest)
        assert str(path) in sentence
        with path.open("r+b") as file:
            file.seek(place)
            file.write(bytes([byte]))


def test_each_book_whose_tokens_are_not_the_references_is_named(
    tokens: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(InspectConfig(str(tokens), reencode=True, passages=0)) == 0
    total = sum(info.tokens for info in read_manifest(tokens).shards)
    assert f"tiktoken: all {total:,} tokens are equal" in " ".join(capsys.readouterr().out.split())
    ids = gpt2().encode(b"It was the best of times, it was the worst of times").tolist()
    split = [*gpt2().encode(b"It wa").tolist(), *gpt2().encode(b"s the best of times, it was the worst of times")]
    end = gpt2().end_of_text
    sha256 = hashlib.sha256(gpt2().decode_bytes(np.array(ids))).hexdigest()
    assert gpt2().decode(split) == gpt2().decode(ids), "the same text with other tokens"
    books = {"equal": [*ids, end], "split": [*split, end], "other": [*ids[:-1], end], "open": ids}
    rows = [
        ShardRow(name, None, None, None, "a test", sha256, 51, np.array(tokens, np.uint16))
        for name, tokens in books.items()
    ]
    info = write_shard(tmp_path, "train/000000-000.arrow", "train", rows)
    Manifest.of([info], config={}, tokenizer_sha256=GPT2_SHA256, inputs={}, report={}).write(tmp_path)
    assert main(InspectConfig(str(tmp_path), verify=True, passages=0)) == 0, "the checksums are right"
    capsys.readouterr()
    assert main(InspectConfig(str(tmp_path), reencode=True, passages=0)) == 1
    printed = " ".join(capsys.readouterr().err.split())
    assert "encode split differently from token 1 on" in printed
    assert "tokens of other do not decode to its text" in printed
    assert "tokens of open do not end with" in printed
    assert "3 of 4 books differ" in printed
    assert "equal" not in printed


def test_a_missing_and_a_short_shard_are_found(tokens: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = read_manifest(tokens)
    one, two = (tokens / info.path for info in manifest.shards)
    content, other = one.read_bytes(), two.read_bytes()
    one.write_bytes(content[:-8])
    two.unlink()
    assert main(InspectConfig(str(tokens), verify=True, passages=0)) == 1
    said = capsys.readouterr().err
    assert f"{one} has" in said
    assert f"{two} is missing" in said
    one.write_bytes(content)
    two.write_bytes(other)
    assert main(InspectConfig(str(tokens), verify=True)) == 0


def test_a_folder_of_something_else_is_not_called_unfinished(tmp_path: Path) -> None:
    (tmp_path / "book.txt").touch()
    with pytest.raises(UserError, match=r"no token shards .* --out data/tokens"):
        read_manifest(tmp_path)
    (tmp_path / "partitions").mkdir()
    (tmp_path / "partitions/settings.json").touch()
    with pytest.raises(UserError, match=r"has no manifest\.json"):
        read_manifest(tmp_path)


def test_brackets_and_names_between_colons_are_printed_as_they_are(
    tmp_path: Path, prose: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "[b] [a=b].txt").write_text(prose(1).replace(" the ", " [/foo] [a=b] [1] :abc: "), encoding="utf-8")
    config = TokenizeConfig(sources=(f"{glob.escape(str(tmp_path))}/*.txt",))
    (partition,) = make_partitions(build_inventory(config.sources), config)
    run_partition(partition, StorageDir.of(tmp_path / "tokens"), f"test-{uuid.uuid4()}")
    result = read_result(tmp_path / "tokens", partition.name)
    assert result
    Manifest.of(result.shards, config={}, tokenizer_sha256=GPT2_SHA256, inputs={}, report={}).write(tmp_path / "tokens")
    assert main(InspectConfig(str(tmp_path / "tokens"), passage_tokens=400)) == 0
    said = capsys.readouterr().out
    assert "[b] [a=b].txt, from token" in said
    assert " [/foo] [a=b] [1] :abc: " in said


def test_passages_are_the_text_of_books_and_end_with_them(tokens: Path) -> None:
    manifest = read_manifest(tokens)
    short = list(decode_passages(StorageDir.of(tokens), manifest, 3, 40))
    assert len(short) == 3
    for title, text in short:
        assert text in (tokens.parent / title.split(", from token")[0]).read_text(encoding="utf-8")
    books = sum(info.rows for info in manifest.shards)
    found = list(decode_passages(StorageDir.of(tokens), manifest, books, 5000))  # longer than a book
    assert len(found) == books
    for title, text in found:
        book = tokens.parent / title.split(", from token")[0]
        assert ", from token 0, " in title
        assert text == book.read_text(encoding="utf-8")


def test_each_split_is_shown_with_what_it_holds(
    tokens: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"train": 5_340_000, "val": 1_260_000}
    shards = [replace(info, bytes=sizes[info.split]) for info in read_manifest(tokens).shards]
    report = {"books_dropped": {"empty": 1200, "language": 1}}
    Manifest.of(shards, config={}, tokenizer_sha256=GPT2_SHA256, inputs={}, report=report).write(tmp_path)
    assert main(InspectConfig(str(tmp_path), passages=0)) == 0
    lines = [" ".join(line.replace("│", " ").split()) for line in capsys.readouterr().out.splitlines()]
    for info, size in zip(shards, ("5.3", "1.3"), strict=True):
        assert f"{info.split} 1 {info.rows:,} {info.tokens:,} {info.chars:,} {size}" in lines
    assert any("1,200 empty, 1 language" in line for line in lines)
