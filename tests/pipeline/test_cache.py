"""A data set in object storage comes to this machine's disk whole and checked, or not at all."""

import json
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.errors import UserError
from infra.storage import directory
from infra.storage.directory import StorageDir
from pipeline.cache import ensure_local
from pipeline.shards import MANIFEST_FILE, Manifest, TokenShards, read_manifest

S3 = tuple[str, Callable[[float], None]]


@pytest.fixture
def data(bucket: str, small_shards: Path, tmp_path: Path, set_scratch: Callable[[Path], None]) -> StorageDir:
    """A finished data set of three shards in object storage, for a machine that has none yet."""
    set_scratch(tmp_path)
    data = StorageDir.of(f"s3://places/{tmp_path.name}/tokens{bucket}")
    for path in small_shards.rglob("*.*"):
        data.upload(path, path.relative_to(small_shards).as_posix())
    return data


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def test_the_same_bytes_arrive_through_a_storage_that_fails_now_and_then_and_are_fetched_once(
    data: StorageDir, s3: S3, small_shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "BLOCK_BYTES", 10_000)  # a third of a shard
    _, set_rate = s3
    set_rate(0.2)
    fetched: list[int] = []
    folder = ensure_local(data, lambda _, number: fetched.append(number))
    assert contents(folder) == contents(small_shards)
    assert len(TokenShards(folder).open("train")) == 2
    assert fetched == [0, 1, 2]
    assert ensure_local(data, lambda _, number: fetched.append(number)) == folder
    assert fetched == [0, 1, 2]
    assert ensure_local(StorageDir.of(small_shards)) == small_shards


def test_what_was_interrupted_is_continued(data: StorageDir, small_shards: Path) -> None:
    class Killed(Exception):
        pass

    def die(_: Manifest, number: int) -> None:
        if number == 1:
            raise Killed

    with pytest.raises(Killed):
        ensure_local(data, die)
    fetched: list[int] = []
    folder = ensure_local(data, lambda _, number: fetched.append(number))
    assert fetched == [1, 2]
    assert contents(folder) == contents(small_shards)
    shard = folder / "train/000001-000.arrow"
    shard.write_bytes(shard.read_bytes()[:-1])  # as a full disk leaves it
    ensure_local(data)
    assert contents(folder) == contents(small_shards)


def test_another_data_set_at_the_same_address_is_another_folder(
    data: StorageDir, make_shards: Callable[..., Path], tmp_path: Path
) -> None:
    before = ensure_local(data)
    kept = contents(before)
    other = make_shards(tmp_path / "other", seed=1)
    for path in other.rglob("*.*"):
        data.upload(path, path.relative_to(other).as_posix())
    after = ensure_local(data)
    assert after != before
    assert (contents(before), contents(after)) == (kept, contents(other))


def test_a_damaged_data_set_is_refused_and_described(
    data: StorageDir, s3: S3, small_shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = (small_shards / "train/000000-000.arrow").read_bytes()
    data.write("train/000000-000.arrow", whole[:-1] + b"?")
    with pytest.raises(UserError, match=r"train/000000-000\.arrow.* checksum"):
        ensure_local(data)
    data.remove(["train/000000-000.arrow"])
    with pytest.raises(UserError, match=r"train/000000-000\.arrow\S* is missing\. Run 'python -m pipeline\.tokenize"):
        ensure_local(data)
    assert not list(tmp_path.rglob("*.arrow")), "nothing of it is kept"
    data.write("train/000000-000.arrow", whole)
    values = json.loads(data.read(MANIFEST_FILE))
    for path in ("../../escaped", "train/000000-000.arrow/../../../../escaped"):
        values["shards"][0]["path"] = path
        data.write_json(MANIFEST_FILE, values)
        with pytest.raises(UserError, match=rf"damaged \(the manifest: Path '{path}'"):
            ensure_local(data)
    data.write(MANIFEST_FILE, b"<html>Please log in.</html>")
    with pytest.raises(UserError, match=r"manifest\.json\S* is damaged"):
        ensure_local(data)
    data.remove([MANIFEST_FILE])
    with pytest.raises(UserError, match=r"has no manifest\.json"):
        ensure_local(data)
    _, set_rate = s3
    set_rate(1.0)
    with pytest.raises(UserError, match=r"(?i)cannot (be )?(read|list)"):
        ensure_local(data)


def test_a_full_disk_leaves_no_half_shard(
    data: StorageDir, small_shards: Path, tmp_path: Path, set_scratch: Callable[[Path], None]
) -> None:
    assert read_manifest(data).shards
    scratch = tmp_path / "full"
    scratch.mkdir()
    set_scratch(scratch)
    old, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, most))
    try:
        with pytest.raises(UserError, match=r"000000-000\.arrow"):
            ensure_local(data)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (old, most))
    assert not list(scratch.rglob("*.arrow"))
    assert contents(ensure_local(data)) == contents(small_shards)
    shutil.rmtree(scratch)
