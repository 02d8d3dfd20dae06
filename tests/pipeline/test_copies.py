"""Copies of a data set in a real S3 server: whole or without a manifest, through failures, and back again."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow.fs
import pytest

from infra import storage
from infra.errors import UserError
from pipeline import copies
from pipeline.config import TokenizeConfig
from pipeline.copies import download, upload
from pipeline.fetch import FetchConfig, main
from pipeline.shards import MANIFEST, Manifest, TokenShards, read_manifest

S3 = tuple[str, Callable[[float], None]]


@pytest.fixture
def tokens(small_shards: Path, tmp_path: Path) -> Path:
    """A finished data set of three shards."""
    folder = shutil.copytree(small_shards, tmp_path / "tokens")
    (folder / "quarantine.jsonl").write_text('{"book": "none"}\n')
    return folder


@pytest.fixture
def uri(s3: S3) -> str:
    """Where to copy to."""
    query, _ = s3
    system, _ = pyarrow.fs.FileSystem.from_uri(f"s3://copies{query}&allow_bucket_creation=true")
    system.create_dir("copies")
    return f"s3://copies/tokens{query}"


def stored(uri: str) -> set[str]:
    return {entry.path.removeprefix("copies/tokens/") for entry in storage.listing(uri)}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_copy_comes_back_to_the_same_bytes_through_a_storage_that_fails_now_and_then(
    tokens: Path, uri: str, s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "_BLOCK", 10_000)  # a third of a shard
    monkeypatch.setattr(copies, "_BLOCK", 10_000)
    _, set_rate = s3
    set_rate(0.1)
    assert upload(tokens, uri) == 3
    main(FetchConfig(uri, tmp_path / "back"))
    assert contents(tmp_path / "back") == contents(tokens)
    assert len(TokenShards(tmp_path / "back").open("train")) == 2


def test_only_what_differs_is_sent_and_fetched(tokens: Path, uri: str, tmp_path: Path) -> None:
    upload(tokens, uri)
    assert upload(tokens, uri) == 0
    back = tmp_path / "back"
    assert download(uri, back) == 3
    assert download(uri, back) == 0
    damaged = back / "train/00001.arrow"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    assert download(uri, back) == 1
    assert contents(back) == contents(tokens)
    manifest = read_manifest(tokens)
    fewer = Manifest.of(
        [shard for shard in manifest.shards if shard.path != "train/00001.arrow"],
        config={}, vocabulary_sha256="small", inputs={}, report={},
    )  # fmt: skip
    fewer.write(tokens)
    system, root = storage.locate(uri)
    for name in (others := {"train/notes.txt", "val/their own.arrow", "train/below/00001.arrow"}):
        with system.open_output_stream(f"{root}/{name}") as file:
            file.write(b"not ours")
    assert upload(tokens, uri) == 0
    assert stored(uri) == {MANIFEST, "quarantine.jsonl", "train/00000.arrow", "val/00000.arrow", *others}
    with pytest.raises(UserError, match="holds another data set"):
        download(uri, back)


def test_an_interrupted_copy_has_no_manifest_and_is_finished_by_the_next(
    tokens: Path, uri: str, tmp_path: Path
) -> None:
    upload(tokens, uri)

    class Killed(Exception):
        pass

    def die() -> None:
        raise Killed

    with pytest.raises(Killed):
        upload(tokens, uri, die)
    assert MANIFEST not in stored(uri)
    with pytest.raises(UserError, match=r"holds no manifest\.json"):
        download(uri, tmp_path / "back")
    assert not (tmp_path / "back").exists()
    assert upload(tokens, uri) == 0
    assert download(uri, tmp_path / "back") == 3


def test_a_damaged_copy_is_described(
    tokens: Path, uri: str, s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, set_rate = s3
    upload(tokens, uri)
    system, root = storage.locate(uri)
    with system.open_output_stream(f"{root}/train/00000.arrow") as file:
        file.write((tokens / "train/00000.arrow").read_bytes()[:-1] + b"?")
    with pytest.raises(UserError, match=r"00000\.arrow is damaged there"):
        download(uri, tmp_path / "back")
    assert not [path for path in (tmp_path / "back").rglob("*") if path.is_file()]
    assert upload(tokens, uri) == 1, "a shard without its label is sent again"
    system.delete_file(f"{root}/val/00000.arrow")
    with pytest.raises(UserError, match=r"has lost val/00000\.arrow"):
        download(uri, tmp_path / "back")
    values = json.loads((tokens / MANIFEST).read_text())
    for path in ("../../escaped", "train/00000.arrow/../../../../escaped"):
        values["shards"][0]["path"] = path
        with system.open_output_stream(f"{root}/{MANIFEST}") as file:
            file.write(json.dumps(values).encode())
        with pytest.raises(UserError, match=rf"names '{path}', which no shard is called"):
            download(uri, tmp_path / "other")
    with system.open_output_stream(f"{root}/{MANIFEST}") as file:
        file.write(b"<html>Please log in.</html>")
    with pytest.raises(UserError, match=r"s3://copies/tokens.*manifest\.json is damaged.*make the copy again"):
        download(uri, tmp_path / "other")
    monkeypatch.setattr(storage, "ATTEMPTS", 1)
    set_rate(1.0)
    with pytest.raises(UserError, match=r"cannot be (read|written), after 1 attempts"):
        upload(tokens, uri)
    with pytest.raises(ValueError, match=r"--out s3:/bucket/tokens is not a folder.*--copy-to"):
        TokenizeConfig(out=Path("s3://bucket/tokens"))
    with pytest.raises(ValueError, match="--copy-to elsewhere is not object storage"):
        TokenizeConfig(copy_to="elsewhere")
    with pytest.raises(ValueError, match="here is not object storage"):
        FetchConfig("here")


def test_the_manifest_is_written_last_on_both_sides(
    tokens: Path, uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload(tokens, uri)
    (tokens / "quarantine.jsonl").rename(tmp_path / "aside")
    with pytest.raises(UserError, match=r"has no quarantine\.jsonl: run .* again to write it"):
        upload(tokens, uri)
    assert MANIFEST in stored(uri), "the copy is as it was"
    (tmp_path / "aside").rename(tokens / "quarantine.jsonl")

    def unreadable(name: Path, *rest: object) -> None:
        if name.name == "quarantine.jsonl":
            raise FileNotFoundError(name)
        storage.store(name, *rest)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(copies, "store", unreadable)
        with pytest.raises(FileNotFoundError):
            upload(tokens, uri)
    assert MANIFEST not in stored(uri)
    upload(tokens, uri)
    system, root = storage.locate(uri)
    system.delete_file(f"{root}/quarantine.jsonl")
    with pytest.raises(UserError, match=r"has lost quarantine\.jsonl: make the copy again"):
        download(uri, tmp_path / "back")
    assert not (tmp_path / "back" / MANIFEST).exists()
