"""A ladder in object storage: begun by one machine, and continued by another from what was sent."""

from collections.abc import Callable
from pathlib import Path

import pyarrow.fs
import pytest

from infra.errors import UserError
from infra.place import Place
from infra.tracking.key import RunKey
from train.checkpoint.run_folder import new_place
from train.ladder import report
from train.ladder.folder import begin, kept, opened

KEY = RunKey("http://tracker", "1", "a")


@pytest.fixture
def out(s3: tuple[str, Callable[[float], None]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A folder in object storage, on a machine that has seen nothing of it."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    system, _ = pyarrow.fs.FileSystem.from_uri(f"s3://ladders{s3[0]}&allow_bucket_creation=true")
    system.create_dir("ladders")
    return f"s3://ladders/{tmp_path.name}{s3[0]}"


def test_a_ladder_is_continued_from_what_was_sent(out: str) -> None:
    place = new_place(out, "one")
    with opened(place, fresh=True) as copy:
        begin(copy, {"suite": "loop"}, KEY)
        (copy.folder / "control-00").mkdir()
        (copy.folder / "control-00/rung.json").write_text("{}")
        with pytest.raises(UserError, match=r"another command runs the ladder in s3://ladders/.*/one"):
            opened(place, fresh=False).__enter__()
        copy.send("control-00/rung.json")
        (copy.folder / "control-00/cycles.jsonl").write_text("")  # not sent before the machine was lost
    place.write("control-00/checkpoints/step-00000008/model.safetensors", b"a gigabyte")
    with opened(place, fresh=False) as copy:
        files = sorted(path.relative_to(copy.folder).as_posix() for path in copy.folder.rglob("*") if path.is_file())
        assert files == ["control-00/rung.json", "ladder.json"]
        assert kept(copy)["options"] == {"suite": "loop"}
        assert kept(copy)["key"].valid_in(place, "").store == "http://tracker"
        with pytest.raises(UserError, match=r"MLflow store sqlite:////gone\.db of .* is not on this machine"):
            RunKey("sqlite:////gone.db", "1", "a", place.address).valid_in(place, "begin a new ladder")
    with pytest.raises(UserError, match="exists already: continue it with --resume one"):
        new_place(out, "one")


def test_a_refused_ladder_leaves_its_name_free(out: str) -> None:
    place = new_place(out, "one")
    with opened(place, fresh=True) as copy:
        begin(copy, {}, KEY)
        copy.discard()
    assert not place.files()
    assert new_place(out, "one") == place


@pytest.mark.parametrize("name", ["a b", ".", "a/b", ""])
def test_a_name_that_object_storage_does_not_keep_is_refused(out: str, name: str) -> None:
    with pytest.raises(UserError, match="is not a name for object storage"):
        new_place(out, name)


def test_what_is_not_there_is_one_sentence(out: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--resume two: there is no ladder in s3://ladders/.*/two"):
        opened(Place.of(out) / "two", fresh=False).__enter__()
    (tmp_path / "first").mkdir()
    (tmp_path / "first/ladder.json").write_text("{")
    with pytest.raises(UserError, match=r"there is no ladder in .*/frist; did you mean first\?"):
        opened(Place.of(tmp_path) / "frist", fresh=False).__enter__()
    with opened(Place.of(tmp_path) / "first", fresh=False) as copy, pytest.raises(UserError, match="is damaged"):
        kept(copy)
    with pytest.raises(UserError, match=r"there is no finished ladder in s3://ladders/.*/two"):
        report.load("two", out)


def test_two_ladders_are_compared_wherever_they_are(out: str, tmp_path: Path) -> None:
    found = b'{"device": "cpu", "commit": "", "rows": [{"name": "baseline", "speed": 5}]}'
    (Place.of(out) / "one").write("standings.json", found)
    (tmp_path / "one").mkdir()
    (tmp_path / "one/standings.json").write_bytes(found)
    rows = [{"name": "baseline", "speed": 5.0}]
    for text, where in (("one", out), (str(Place.of(out) / "one"), "runs"), ("one", "runs"), ("one", str(tmp_path))):
        loaded = report.load(text, where)
        assert isinstance(loaded, dict)
        assert loaded["rows"] == rows
    (Place.of(tmp_path) / "others/one").write("standings.json", found.replace(b"5", b"6"))
    named = report.load("one", str(tmp_path / "others"))
    assert isinstance(named, dict)
    assert named["rows"] == [{"name": "baseline", "speed": 6.0}], "a name in --out comes before a folder of that name"
