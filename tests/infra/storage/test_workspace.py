"""A workspace has the files of its location, whether it is that folder itself or a copy of object storage."""

from collections.abc import Callable
from pathlib import Path

import pytest

from infra.errors import UserError
from infra.storage.directory import StorageDir
from infra.storage.workspace import Workspace


@pytest.fixture(autouse=True)
def scratch_folder(set_scratch: Callable[[Path], None], tmp_path: Path) -> None:
    set_scratch(tmp_path)


def test_a_workspace_begins_with_the_wanted_files_and_pushes_what_it_is_given(place: StorageDir) -> None:
    place.write("config.json", b"{}")
    place.write("checkpoints/step-1/model", b"x" * 10)
    workspace = Workspace.of(place)
    assert workspace.location == place
    workspace.refresh(lambda name: not name.startswith("checkpoints/"))
    assert (workspace.path / "config.json").read_bytes() == b"{}"
    assert (workspace.path / "checkpoints").exists() is bool(place.local_path)
    (workspace.path / "result.json").write_bytes(b"done")
    workspace.push(workspace.path / "result.json", workspace.path / "missing.png")
    assert place.read("result.json") == b"done"
    workspace.discard_copy()
    assert place.list_files() == {"config.json": 2, "checkpoints/step-1/model": 10, "result.json": 4}
    workspace.remove()
    assert place.list_files() == {}


def test_files_that_are_here_are_not_downloaded_again(place: StorageDir) -> None:
    place.write("train/a", b"content")
    workspace = Workspace.of(place, "data", "fingerprint")
    with workspace.lock_copy("in use", 0.0):
        assert workspace.is_missing("train/a", 7) is not bool(place.local_path)
        workspace.pull("train/a")
        assert not workspace.is_missing("train/a", 7)
    assert (workspace.path / "train/a").read_bytes() == b"content"


def test_processes_with_copies_of_their_own_do_not_see_each_others_files(bucket: str, tmp_path: Path) -> None:
    location = StorageDir.of(f"s3://places/run{bucket}")
    driver, worker = Workspace.of(location), Workspace.of(location, "runs", "0")
    assert driver.path != worker.path
    driver.refresh()
    (driver.path / "marker").touch()
    assert worker.has_file_of(driver.path / "marker")
    assert Workspace(tmp_path).has_file_of(driver.path / "marker")
    assert not Workspace(tmp_path).has_file_of(tmp_path / "another disk")


def test_a_copy_in_use_is_waited_for(bucket: str) -> None:
    workspace = Workspace.of(f"s3://places/run{bucket}", "data", "fingerprint")
    with workspace.lock_copy("", 0.0), pytest.raises(UserError, match="in use"), workspace.lock_copy("in use", 0.1):
        pass
