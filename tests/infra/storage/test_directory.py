"""A place means the same files, whether it is a folder or in object storage."""

import os
import shutil
from pathlib import Path

import pytest
import xxhash

from infra.errors import UserError
from infra.storage.directory import StorageDir, WorkingCopy, scratch


def test_files_are_written_listed_read_and_removed(place: StorageDir, tmp_path: Path) -> None:
    assert place.list_files() == {}
    assert not place.exists("train/a")
    with pytest.raises(FileNotFoundError):
        place.read("train/a")
    place.write("train/a", b"one")
    place.write("train/a", b"three")
    place.write("b", b"")
    assert place.list_files() == {"train/a": 5, "b": 0}
    assert place.list_files("train") == {"train/a": 5}
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
    with pytest.raises(UserError, match=r"shard\S* is damaged: its checksum"):
        place.download("shard", tmp_path / "shard", "0" * 32)
    assert not (tmp_path / "shard").exists()
    with pytest.raises(FileNotFoundError):
        place.download("none", tmp_path / "none")


def test_a_place_that_cannot_be_written_is_refused_by_its_flag(bucket: str, tmp_path: Path) -> None:
    StorageDir.of(tmp_path / "new").check_writable("--out")
    StorageDir.of(f"s3://places/new{bucket}").check_writable("--out")
    assert StorageDir.of(f"s3://places/new{bucket}").list_files() == {}
    with pytest.raises(UserError, match=r"^--out s3://nobodys/new\S* cannot be written \(The specified bucket"):
        StorageDir.of(f"s3://nobodys/new{bucket}").check_writable("--out")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"--out .*/file/new cannot be written"):
        StorageDir.of(tmp_path / "file/new").check_writable("--out")


def test_a_working_copy_begins_with_the_wanted_files_and_sends_what_it_is_told(place: StorageDir) -> None:
    place.write("config.json", b"{}")
    place.write("checkpoints/step-1/model", b"x" * 10)
    copy = WorkingCopy.of(place, empty=False, include=lambda name: not name.startswith("checkpoints/"))
    assert (copy.local_path / "config.json").read_bytes() == b"{}"
    assert (copy.local_path / "checkpoints").exists() is not place.is_remote
    (copy.local_path / "result.json").write_bytes(b"done")
    copy.push("result.json", "missing.png")
    assert place.read("result.json") == b"done"
    if place.is_remote:
        assert list(WorkingCopy.of(place, empty=True).local_path.iterdir()) == []


def test_scratch_is_private_and_never_another_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = scratch("data", "abc")
    assert folder.stat().st_mode & 0o077 == 0
    assert folder.is_relative_to(tmp_path)
    shutil.rmtree(folder.parents[1])
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / f"throughline-{os.getuid()}").symlink_to(elsewhere)
    with pytest.raises(UserError, match="belongs to another user: set TMPDIR"):
        scratch("data")


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o702])
def test_scratch_into_which_others_could_have_put_files_is_refused(
    mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    scratch("data").parent.chmod(mode)
    with pytest.raises(UserError, match="is open to other users: remove it, or set TMPDIR"):
        scratch("data")


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
