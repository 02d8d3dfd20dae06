"""The output in object storage: the same bytes as in a folder, continued, redone and cleaned up in the same way."""

import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from infra.errors import UserError
from infra.storage.directory import StorageDir
from infra.storage.workspace import Workspace
from pipeline import inspect
from pipeline.config import TokenizeConfig
from pipeline.inspect import InspectConfig
from pipeline.job import output
from pipeline.job.plan import Job
from pipeline.job.task import run_partition
from pipeline.shards import SPLIT_HISTORY_FILE, read_manifest
from pipeline.tokenize import main

S3 = tuple[str, Callable[[float], None]]


@pytest.fixture
def config(
    tmp_path: Path,
    write_books: Callable[..., Path],
    prose: Callable[..., str],
    bucket: str,
    limit_partitions: Callable[[int], None],
) -> TokenizeConfig:
    """Settings for twelve small books in six partitions, two of which are copies, with an output in object storage."""
    limit_partitions(2)
    books = write_books(tmp_path / "books", 12, words=100)
    for number in (7, 11):  # one leaves its shard another book, one an empty shard
        (books / f"book {number:04d}.txt").write_text(prose(1, 100), encoding="utf-8")
    (books / "book 0010.txt").write_text(prose(2, 100), encoding="utf-8")
    return TokenizeConfig((str(books),), out=f"s3://places/{tmp_path.name}{bucket}", val_fraction=0.2)


def tokenize(config: TokenizeConfig) -> list[str]:
    """What the command does, without Ray; returns the partitions that it did."""
    job = Job(config)
    todo = output.compare_with_plan(job).todo
    with output.exclusive_writer(job.out_dir):
        output.mark_unfinished(job, todo)
        for partition in job.partitions:
            if partition.name in todo:
                run_partition(partition, job.out_dir, f"test-{uuid.uuid4()}")
        output.finish(job)
    return list(todo)


def contents(where: str) -> dict[str, bytes]:
    place = StorageDir.of(where)
    return {name: place.read(name) for name in place.list_files() if not name.endswith(StorageDir.LOCK_FILE)}


def test_every_file_is_the_same_as_in_a_folder_also_through_failing_storage(
    config: TokenizeConfig, tmp_path: Path, s3: S3, capsys: pytest.CaptureFixture[str]
) -> None:
    _, set_rate = s3
    local = replace(config, out=str(tmp_path / "local"))
    set_rate(0.2)
    assert len(tokenize(config)) == len(tokenize(local)) == 6
    set_rate(0)
    here, there = contents(local.out), contents(config.out)
    assert here.keys() == there.keys()
    assert here == there
    assert read_manifest(config.out).report["books_dropped"] == {"duplicate": 3}
    assert main(config) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert inspect.main(InspectConfig(config.out, verify=True, passages=1)) == 0
    assert "all match" in capsys.readouterr().out
    name = next(name for name in there if name.startswith("train/"))
    StorageDir.of(config.out).write(name, there[name][:-1] + b"?")
    assert inspect.main(InspectConfig(config.out, verify=True)) == 1
    assert "has checksum" in capsys.readouterr().err


@pytest.mark.parametrize("slash", ["", "/"])
def test_a_whole_bucket_holds_a_data_set(config: TokenizeConfig, tmp_path: Path, bucket: str, slash: str) -> None:
    root = replace(config, out=f"s3://places{slash}{bucket}")
    local = replace(config, out=str(tmp_path / "local"))
    assert tokenize(root) == tokenize(local)
    assert contents(root.out) == contents(local.out)
    assert output.is_finished(Job(root))
    assert output.compare_with_plan(Job(root)).todo == {}
    place = StorageDir.of(root.out)
    assert list(inspect.find_damage(place, read_manifest(place))) == []
    workspace = Workspace.of(place)
    workspace.refresh()
    assert contents(str(workspace.path)) == contents(local.out)
    output.clear(place)
    assert contents(root.out).keys() == {output.SETTINGS_FILE, SPLIT_HISTORY_FILE}


def test_what_is_missing_or_changed_is_redone_and_what_is_left_over_is_removed(
    config: TokenizeConfig, prose: Callable[..., str], tmp_path: Path
) -> None:
    tokenize(config)
    whole, place = contents(config.out), StorageDir.of(config.out)
    held = {"000000", "000003", "000005"}  # the partitions that gave up duplicates are done with any other
    shard = next(name for name in whole if "000001-" in name)
    foreign = {"train/own.arrow": b"not ours", "notes/partitions.txt": b"neither"}
    for name, content in {**foreign, "train/000009-000.arrow": b"?", "partitions/000009.json": b"{}"}.items():
        place.write(name, content)
    place.remove([shard, "partitions/000002.json"])
    place.write("partitions/000004.json", whole["partitions/000004.json"][:-9])
    assert set(tokenize(config)) == {"000001", "000002", "000004"} | held
    assert contents(config.out) == whole | foreign
    books = Path(config.sources[0])
    (books / "book 0000.txt").write_text(prose(50, 100), encoding="utf-8")
    assert set(tokenize(config)) == held
    tokenize(replace(config, out=str(tmp_path / "fresh")))
    fresh, history = contents(str(tmp_path / "fresh")) | foreign, place.read(SPLIT_HISTORY_FILE)
    assert contents(config.out) == fresh | {SPLIT_HISTORY_FILE: history}, "which knows the earlier text, too"
    output.clear(place)
    assert contents(config.out).keys() == foreign.keys() | {output.SETTINGS_FILE, SPLIT_HISTORY_FILE}


def test_an_unfinished_output_has_no_manifest_and_a_lost_shard_is_never_published(config: TokenizeConfig) -> None:
    tokenize(config)
    job = Job(config)
    output.mark_unfinished(job, ["000003"])
    with pytest.raises(UserError, match=r"has no manifest\.json"):
        read_manifest(job.out_dir)
    with pytest.raises(UserError, match=r"1 of 6 partitions .*partitions/000003\.json"):
        output.finish(job)
    with output.exclusive_writer(job.out_dir), pytest.raises(UserError, match="is writing to s3://places"):
        main(config)


def test_storage_that_does_not_answer_is_never_taken_for_an_empty_output(
    config: TokenizeConfig, s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenize(config)
    job, names = Job(replace(config, min_chars=7)), contents(config.out).keys()
    _, set_rate = s3
    set_rate(1.0)
    with ThreadPoolExecutor() as pool:  # Arrow itself tries for six seconds
        answers = [
            pool.submit(question, job)
            for question in (output.changed_settings, output.compare_with_plan, output.read_results)
        ]
    for answer in answers:
        with pytest.raises(UserError, match=r"(?i)cannot (be )?(read|list)"):
            answer.result()
    set_rate(0)
    assert output.changed_settings(job) == {"min_chars": (200, 7)}
    assert contents(config.out).keys() == names


def test_a_missing_bucket_is_refused(config: TokenizeConfig) -> None:
    missing = replace(config, out=config.out.replace("places", "nobodys"))
    with pytest.raises(UserError, match=r"--out s3://nobodys/\S*.*The specified bucket"):
        main(missing)
