"""A place means the same files, whether it is a folder or in object storage."""

from pathlib import Path

import pytest
import xxhash

from infra.errors import UserError
from infra.storage.directory import StorageDir


def test_files_are_written_listed_read_and_removed(place: StorageDir, tmp_path: Path) -> None:
    assert place.list_files() == {}
    assert not place.exists("train/a")
    with pytest.raises(FileNotFoundError):
        place.read("train/a")
    place.write("train/a", b"one")
    place.write("train/a", b"three")
    place.write("b", b"")
    assert place.list_files() == {"train/a": 5, "b": 0}
    assert place.list_files("train", "none") == {"train/a": 5}
    assert (place / "train").read("a") == b"three"
    assert place.checksum("train/a") == xxhash.xxh3_128_hexdigest(b"three")
    place.write_json("b", {"ö": 1})
    assert place.read("b") == b'{\n  "\xc3\xb6": 1\n}\n'
    (tmp_path / "here").write_bytes(b"two")
    place.upload(tmp_path / "here", "deep/er/c")
    place.download("deep/er/c", tmp_path / "back/c")
    assert (tmp_path / "back/c").read_bytes() == b"two"
    place.remove(["train/a", "never-there"])
    assert sorted(place.list_files()) == ["b", "deep/er/c"]
    assert place.exists("deep/er/c")
    assert not place.exists("deep")
    assert (place.name, (place / "x/y").name, (place / "x").parent) == ("place", "y", place)


def test_what_differs_from_its_checksum_is_not_fetched(place: StorageDir, tmp_path: Path) -> None:
    place.write("shard", b"other bytes")
    with pytest.raises(UserError, match=r"shard\S* is corrupt: its checksum"):
        place.download("shard", tmp_path / "shard", "0" * 32)
    assert not (tmp_path / "shard").exists()
    with pytest.raises(FileNotFoundError):
        place.download("none", tmp_path / "none")


def test_a_place_that_cannot_be_written_is_refused_by_its_flag(bucket: str, tmp_path: Path) -> None:
    StorageDir.of(tmp_path / "new").check_writable("--out")
    assert list(tmp_path.iterdir()) == []
    StorageDir.of(f"s3://places/new{bucket}").check_writable("--out")
    assert StorageDir.of(f"s3://places/new{bucket}").list_files() == {}
    with pytest.raises(UserError, match=r"--out s3://nobodys/new\S*: The specified bucket"):
        StorageDir.of(f"s3://nobodys/new{bucket}").check_writable("--out")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"--out .*/file/new: Not a directory"):
        StorageDir.of(tmp_path / "file/new").check_writable("--out")


def test_a_directory_is_created_once_and_held(place: StorageDir) -> None:
    new = place / "new"
    assert new.entries() is None
    with new.create("in use"):
        new.write("deep/er/file", b"content")
        with pytest.raises(UserError, match="in use"), new.exclusive_use("in use"):
            pass
    assert new.entries() == {"deep"} | ({StorageDir.LOCK_FILE} if new.local_path else set())
    with pytest.raises(UserError, match=r"new\S* already exists.*--name"), new.create("in use"):
        pass


def test_names_lead_from_a_location_as_paths_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for location, name, address in (
        ("runs", "", f"{tmp_path}/runs"),
        ("runs", "one", f"{tmp_path}/runs/one"),
        ("runs", "../two", f"{tmp_path}/two"),
        ("runs", "/three", "/three"),
        ("s3://bucket/runs/?region=a", "my run", "s3://bucket/runs/my%20run?region=a"),
        ("s3://bucket/runs", "/three", "/three"),
        ("runs", "gs://bucket/four/", "gs://bucket/four"),
        ("odd://runs", "", f"{tmp_path}/odd:/runs"),
    ):
        assert StorageDir.of(location, name).address == address
    directory = StorageDir.of("s3://bucket/runs?region=a", "my run")
    assert (directory.name, directory.parent / directory.name) == ("my run", directory)


def test_a_file_is_mapped_without_copying_it_where_it_can_be(place: StorageDir) -> None:
    place.write("file", b"content")
    view = memoryview(place.map("file"))
    assert (bytes(view), view.readonly) == (b"content", True)
    with pytest.raises(FileNotFoundError):
        place.map("none")


def test_names_in_a_bucket_that_lead_out_of_a_folder_are_refused(bucket: str, tmp_path: Path) -> None:
    """No client can be asked to store them, so the server's own storage is."""
    from moto.s3.models import s3_backends

    place = StorageDir.of(f"s3://places/run{bucket}")
    place.write("config.json", b"{}")
    (account,) = (backends["aws"] for backends in s3_backends.values() if "places" in backends["aws"].buckets)
    account.put_object("places", "run/", b"")  # as S3's own page makes a folder
    assert place.list_files() == {"config.json": 2}
    for name in ("..", "../../../evil", "./evil", "checkpoints/../../evil", "/evil", "a//evil"):
        account.put_object("places", f"run/{name}", b"evil")
        with pytest.raises(UserError, match="invalid path"):
            place.list_files()
        account.delete_object("places", f"run/{name}")


def test_a_link_to_itself_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "gone").symlink_to("nowhere")
    (tmp_path / "file").write_bytes(b"one")
    assert StorageDir.of(tmp_path).list_files() == {"file": 3}
