"""A data set of an earlier version is read, verified and continued to the same bytes.

``fixtures/format_1`` was written at commit e44792d from ``books`` in pieces of two books. Interrupted after the second
piece, that version left the same files but those of the third piece, the manifest and the quarantine.
"""

import os
import shutil
from pathlib import Path

import pytest

from infra.errors import UserError
from pipeline import inspect
from pipeline.config import TokenizeConfig
from pipeline.inspect import InspectConfig
from pipeline.job import output, plan
from pipeline.job.plan import Job
from pipeline.job.record import read_record
from pipeline.job.task import do_piece
from pipeline.shards import MANIFEST, TokenShards
from pipeline.tokenize import main

FIXTURE = Path(__file__).parent / "fixtures" / "format_1"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TokenizeConfig:
    """The settings that the fixture was made with. Keys hold a source's path, which is the same on every machine."""
    monkeypatch.setattr(plan, "PARTS_PER_PIECE", 2)
    monkeypatch.chdir(tmp_path)
    for path in shutil.copytree(FIXTURE / "books", tmp_path / "books").iterdir():
        os.utime(path, (1_700_000_000, 1_700_000_000))
    return TokenizeConfig(("/proc/self/cwd/books",), out=str(tmp_path / "tokens"), val_fraction=0.2)


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != output.LOCK)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_it_is_read_verified_and_known_to_be_finished(
    config: TokenizeConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(FIXTURE / "tokens", config.out)
    assert inspect.main(InspectConfig(config.out, verify=True)) == 0
    assert "All 3 shards match their checksums" in capsys.readouterr().out
    assert sum(map(len, TokenShards(Path(config.out)).streams("train"))) == 247
    assert main(config) == 0
    assert "is finished; nothing to do" in capsys.readouterr().out
    assert contents(Path(config.out)) == contents(FIXTURE / "tokens")
    (Path(config.out) / output.QUARANTINE).unlink()
    assert not output.is_finished(Job(config)), "the same command writes it again"


def test_it_is_continued_to_the_same_bytes(config: TokenizeConfig) -> None:
    shutil.copytree(
        FIXTURE / "tokens", config.out, ignore=shutil.ignore_patterns("000002*", MANIFEST, output.QUARANTINE, "val")
    )
    job = Job(config)
    assert output.changed_settings(job) == {}
    todo = output.assess(job).todo
    assert todo == {"000002": "not done yet"}
    with output.sole_writer(job.place):
        output.begin(job, todo)
        do_piece(job.pieces[2], job.place, "test")
        output.finish(job)
    assert contents(Path(config.out)) == contents(FIXTURE / "tokens")


@pytest.mark.parametrize(
    ("old", "new"),
    [('"tokens": 182', '"tokens": "182"'), ('"split": "train"', '"split": "test"'), ('"rows"', '"lines"')],
)
def test_a_damaged_copy_of_it_is_refused(config: TokenizeConfig, old: str, new: str) -> None:
    shutil.copytree(FIXTURE / "tokens", config.out)
    for name in (MANIFEST, "pieces/000000.json"):
        path = Path(config.out) / name
        path.write_text(path.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")
    assert read_record(Path(config.out), "000000") is None
    with pytest.raises(UserError, match=r"manifest\.json is damaged \(it.*shards\.0\..*--overwrite"):
        TokenShards(Path(config.out))
