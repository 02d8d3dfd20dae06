"""Our files in an output folder are continued or replaced, and other files are kept."""

import json
import os
import shutil
import uuid
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from infra.errors import UserError
from infra.storage import local_directory
from infra.storage.directory import StorageDir
from pipeline.books.readers import DroppedBook
from pipeline.config import IDENTITY_SETTINGS, TokenizeConfig
from pipeline.inspect import find_damage
from pipeline.job import output, task
from pipeline.job.partition_result import PartitionResult, read_result
from pipeline.job.plan import Job
from pipeline.job.task import run_partition
from pipeline.shards import MANIFEST_FILE, SPLIT_HISTORY_FILE, Manifest, read_manifest
from pipeline.tokenize import main

FOREIGN = ("train/own.arrow", "train/0001.arrow", "val/sub/000000-000.arrow", "partitions/notes.json", "readme.txt")


@pytest.fixture
def small_partitions(
    tmp_path: Path, write_books: Callable[..., Path], limit_partitions: Callable[[int], None]
) -> TokenizeConfig:
    """Settings for 24 small books in six partitions, none of them done."""
    limit_partitions(4)
    books = write_books(tmp_path / "books", 24, words=100)
    return TokenizeConfig(sources=(str(books),), out=str(tmp_path / "out"))


@pytest.fixture
def config(small_partitions: TokenizeConfig, limit_partitions: Callable[[int], None]) -> TokenizeConfig:
    """Settings for the same books in three partitions, of which the first is done."""
    limit_partitions(8)
    job = Job(small_partitions)
    run_partition(job.partitions[0], job.out_dir, f"test-{uuid.uuid4()}")
    output.mark_unfinished(job, ())
    return small_partitions


def put(folder: Path, names: tuple[str, ...]) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("not ours")


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_clearing_removes_our_files_and_no_others(config: TokenizeConfig) -> None:
    out = Path(config.out)
    put(out, (*FOREIGN, "train/.partial-7-000001-000.arrow", MANIFEST_FILE, output.QUARANTINE_FILE))
    assert "train/000000-000.arrow" in files(out)
    output.clear(StorageDir.of(out))
    assert files(out) == {*FOREIGN, "partitions/settings.json"}
    for name in FOREIGN:
        (out / name).unlink()
    output.clear(StorageDir.of(out))
    assert not (out / "train").exists()


def test_strays_are_files_of_no_piece_and_temporary_files(config: TokenizeConfig) -> None:
    out = Path(config.out)
    result = read_result(out, "000000")
    assert result
    before = files(out)
    half_written = ("train/.partial-7-000001-000.arrow", "partitions/.partial-7-000001.json")
    put(out, (*FOREIGN, *half_written, "train/000009-000.arrow", "partitions/000009.json"))
    output.remove_strays(Job(config), {"000000": result})
    assert files(out) == before | set(FOREIGN)


def test_a_data_set_that_was_not_made_here_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    out = tmp_path / "fetched"
    put(out, (MANIFEST_FILE, "train/000000-000.arrow"))
    before = files(out)
    with pytest.raises(UserError, match=r"partitions/settings\.json.* --out.* --overwrite"):
        main(TokenizeConfig(out=str(out)))
    assert files(out) == before


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_run_keeps_its_key_in_mlflow(tmp_path: Path, overwrite: bool) -> None:
    """A data set keeps its own under the same name: the run would be continued as the data set's."""
    put(tmp_path, ("tracking.json", "config.json", "cycles.jsonl"))
    before = files(tmp_path)
    with pytest.raises(UserError, match=r"training run .* --out"):
        main(TokenizeConfig(out=str(tmp_path), overwrite=overwrite))
    assert files(tmp_path) == before


def test_overwriting_starts_over_once_and_continues_after_an_interruption(
    config: TokenizeConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(**settings) -> str:
        main(replace(config, dry_run=True, overwrite=True, **settings))
        return capsys.readouterr().out

    assert "finished: 1 partition; remaining: 2 not finished" in said()
    assert "finished: 0 partitions; remaining: 3 because settings changed" in said(min_chars=100)
    put(Path(config.out), (MANIFEST_FILE,))
    assert "finished: 0 partitions; remaining: 3 because of --overwrite" in said()


def test_other_sources_do_not_count_as_other_settings(config: TokenizeConfig, write_books: Callable[..., Path]) -> None:
    more = write_books(Path(config.out).parent / "more", 1)
    other = Job(replace(config, sources=(*config.sources, str(more))))
    assert output.changed_settings(other) == {}
    assert "000000" in output.compare_with_plan(other).done


def test_books_of_another_source_are_not_replaced_without_a_word(
    small_partitions: TokenizeConfig,
    write_books: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    books, other = tmp_path / "books", write_books(tmp_path / "other", 3, words=100)
    one, both = replace(small_partitions, sources=(str(other),)), (*small_partitions.sources, str(other))
    tokenize(small_partitions)
    tokenize(small_partitions, partitions=0)
    before = contents(Path(small_partitions.out))
    for sources in ((str(other),), (str(books / "book 0001.txt"),), (f"{books}/*1.txt", str(other))):
        with pytest.raises(UserError, match=rf"out contains books from {books}, .*--overwrite .* another --out"):
            main(replace(one, sources=sources))
        main(replace(one, sources=sources, dry_run=True))
        assert f"contains books from {books}" in capsys.readouterr().out
    assert contents(Path(small_partitions.out)) == before
    (tmp_path / "link").symlink_to(books)
    for sources in (
        both,
        (str(tmp_path / "link"),),
        (f"{books}/*.txt",),
        (f"{tmp_path}/b*",),
        (str(tmp_path / "other" / ".." / "books"),),
    ):
        assert output.missing_sources(Job(replace(one, sources=sources))) == [], "they are read from there"
    assert output.source_changes(Job(replace(one, sources=both)))[0] == f"new sources: {other}"
    (books / "book 0003.txt").unlink()
    assert output.missing_sources(Job(small_partitions)) == []
    assert output.source_changes(Job(small_partitions)) == ["previously created from 24 files, " + "0.0 MB"]
    output.mark_unfinished(Job(replace(small_partitions, sources=both)), ["000003"])  # and is killed
    assert output.missing_sources(Job(one)) == [str(books)]
    shutil.rmtree(books)
    assert output.missing_sources(Job(one)) == [str(books)], "gone from the disk, and not from the data set"
    output.clear(StorageDir.of(one.out))
    assert output.missing_sources(Job(one)) == []


def test_the_settings_in_a_data_sets_identity_have_not_changed() -> None:
    """Another name or value here would have every finished folder made again."""
    assert TokenizeConfig(languages=("fr", "en", "fr")).identity() == {
        "sources": ["sample"], "val_fraction": 0.01, "encoder": "gigatoken", "text_field": "text",
        "text_column": "text", "doc_separator": None, "languages": ["en", "fr"], "min_chars": 200, "join_lines": False,
        "duplicates": "drop", "shard_size": 16_000_000,
    }  # fmt: skip
    assert {field.name for field in fields(TokenizeConfig)} - set(IDENTITY_SETTINGS) == {
        "out", "workers", "mirror", "dry_run", "overwrite", "tracking_uri", "address", "tokenizer"
    }, "a new setting either decides the bytes of shards, as the tokenizer does by its hash, or does not"  # fmt: skip


def tokenize(config: TokenizeConfig, workers_out: Path | None = None, *, partitions: int = 1000) -> Manifest:
    """What the command does, without Ray: its workers write to ``workers_out``, and stop after so many
    ``partitions``."""
    job = Job(config)
    todo = output.compare_with_plan(job).todo
    with output.exclusive_writer(job.out_dir):
        output.mark_unfinished(job, todo)
        for each in [each for each in job.partitions if each.name in todo][:partitions]:
            run_partition(each, StorageDir.of(workers_out) if workers_out else job.out_dir, f"test-{uuid.uuid4()}")
        return output.finish(job)


def contents(folder: Path) -> dict[str, bytes]:
    """What a data set is made of: without the history of earlier ones."""
    names = {name for name in files(folder) if not name.endswith(StorageDir.LOCK_FILE)} - {SPLIT_HISTORY_FILE}
    return {name: (folder / name).read_bytes() for name in names}


def replace_book(folder: Path, number: int, text: str) -> None:
    """Put ``text`` in place of a book, a second later as far as its time tells."""
    path = folder / f"book {number:04d}.txt"
    later = path.stat().st_mtime_ns + 10**9
    path.write_text(text, encoding="utf-8")
    os.utime(path, ns=(later, later))


def test_a_record_counts_only_for_the_piece_whose_key_it_holds(
    small_partitions: TokenizeConfig, tmp_path: Path, prose: Callable[..., str]
) -> None:
    config, books = small_partitions, tmp_path / "books"
    tokenize(config)
    other_disk = shutil.copytree(config.out, tmp_path / "other disk")
    for number in range(6):
        replace_book(books, number, prose(100 + number, 100))
    job = Job(config)
    with pytest.raises(UserError, match=r"2 of 6 partitions .*partitions/000000\.json"):
        output.read_results(job)  # the records of the earlier texts are there
    with pytest.raises(UserError, match=r"2 of 6 partitions .* --out that all workers share"):
        tokenize(config, other_disk)
    for folder in (Path(config.out), other_disk):
        with pytest.raises(UserError, match=r"has no manifest\.json"):
            read_manifest(folder)
    assert output.compare_with_plan(job).todo == dict.fromkeys(("000000", "000001"), "not finished")
    again = tokenize(config)
    fresh = tokenize(replace(config, out=str(tmp_path / "fresh")))
    assert again == fresh
    assert contents(Path(config.out)) == contents(tmp_path / "fresh")


def test_a_piece_whose_shard_did_not_arrive_is_not_published(small_partitions: TokenizeConfig) -> None:
    tokenize(small_partitions)
    (Path(small_partitions.out) / "train/000003-000.arrow").unlink()
    with pytest.raises(UserError, match=r"1 of 6 partitions .*partitions/000003\.json"):
        tokenize(small_partitions, partitions=0)


def test_a_shard_that_was_cut_short_is_done_again(small_partitions: TokenizeConfig) -> None:
    before = tokenize(small_partitions)
    shard = Path(small_partitions.out) / "train/000003-000.arrow"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1])
    assert output.compare_with_plan(Job(small_partitions)).todo == {"000003": "with missing or truncated shards"}
    assert tokenize(small_partitions) == before
    assert shard.read_bytes() == content


def test_a_source_of_the_same_size_and_a_new_time_is_done_again(
    small_partitions: TokenizeConfig, tmp_path: Path
) -> None:
    before = tokenize(small_partitions)
    book = tmp_path / "books" / "book 0009.txt"
    replace_book(tmp_path / "books", 9, book.read_text(encoding="utf-8").replace("the", "and"))
    assert output.compare_with_plan(Job(small_partitions)).todo == {"000002": "with changed inputs or settings"}
    after = tokenize(small_partitions)
    assert after.inputs == before.inputs
    assert after.fingerprint != before.fingerprint


@pytest.mark.parametrize(("duplicates", "reason"), [("drop", "duplicate"), ("drop-near", "near duplicate")])
def test_a_duplicate_comes_back_when_its_original_changes_also_after_an_interruption(
    small_partitions: TokenizeConfig, tmp_path: Path, prose: Callable[..., str], duplicates: Any, reason: str
) -> None:
    books = tmp_path / "books"
    small_partitions = replace(small_partitions, duplicates=duplicates)
    replace_book(books, 20, prose(1, 100) + "THE END\n" * (duplicates == "drop-near"))
    assert tokenize(small_partitions).report["books_dropped"] == {reason: 1}
    replace_book(books, 1, prose(200, 100))
    with pytest.raises(UserError, match=r"1 of 6 partitions .*partitions/000005\.json"):
        tokenize(
            small_partitions, partitions=1
        )  # the partition with the changed original, and not the one with its duplicate
    assert tokenize(small_partitions).report["books_dropped"] == {}
    tokenize(replace(small_partitions, out=str(tmp_path / "fresh")))
    assert contents(Path(small_partitions.out)) == contents(tmp_path / "fresh")


def test_a_duplicate_comes_back_when_its_original_goes_with_the_last_piece(
    small_partitions: TokenizeConfig, tmp_path: Path, prose: Callable[..., str], limit_partitions: Callable[[int], None]
) -> None:
    limit_partitions(1)
    config = replace(small_partitions, sources=(f"{tmp_path}/shelf*",), val_fraction=0)
    with zipfile.ZipFile(tmp_path / "shelf.zip", "w") as archive:
        archive.writestr("copy.txt", prose(1))
    (tmp_path / "shelf.zip-1.txt").write_text(prose(1), encoding="utf-8")  # its file comes later, its book before
    assert tokenize(config).report["books_dropped"] == {"duplicate": 1}
    assert "shelf.zip/copy.txt" in (Path(config.out) / output.QUARANTINE_FILE).read_text(encoding="utf-8")
    (tmp_path / "shelf.zip-1.txt").unlink()
    assert tokenize(config).report["books_dropped"] == {}


def test_manifest_and_record_are_durably_removed_before_the_first_new_shard(
    small_partitions: TokenizeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenize(small_partitions)
    events: list[str] = []
    synced, written = local_directory.sync_folder, task.write_shard
    monkeypatch.setattr(local_directory, "sync_folder", lambda folder: events.append(folder.name) or synced(folder))
    monkeypatch.setattr(task, "write_shard", lambda *rest: events.append("shard") or written(*rest))
    run_partition(Job(small_partitions).partitions[2], StorageDir.of(small_partitions.out), f"test-{uuid.uuid4()}")
    assert events[:3] == ["out", "partitions", "shard"]


def test_killed_clearing_leaves_a_whole_data_set_or_nothing_that_looks_done(
    small_partitions: TokenizeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = tokenize(small_partitions)
    unlink = Path.unlink
    for removed in range(9):  # six record, the manifest, the quarantine, a shard
        out = shutil.copytree(small_partitions.out, tmp_path / f"cleared {removed}")
        left = iter(range(removed))

        def limited(path: Path, missing_ok: bool = False, left: Iterator[int] = left) -> None:
            if next(left, None) is None:
                raise KeyboardInterrupt
            unlink(path, missing_ok)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", limited)
            with pytest.raises(KeyboardInterrupt):
                output.clear(StorageDir.of(out))
        if (out / MANIFEST_FILE).exists():
            assert list(find_damage(StorageDir.of(out), manifest)) == []
        else:
            done = output.compare_with_plan(Job(replace(small_partitions, out=str(out)))).done
            assert done == {}, "the next --overwrite would keep it"


def test_a_record_with_another_type_or_name_is_no_record(config: TokenizeConfig) -> None:
    path = Path(config.out) / "partitions/000000.json"
    content = path.read_text(encoding="utf-8")
    for whole, damaged in (
        ('"split": "train"', '"split": "test"'),
        ('"rows"', '"lines"'),
        ('replaced": 0', 'replaced": "0"'),
    ):
        assert whole in content
        path.write_text(content.replace(whole, damaged), encoding="utf-8")
        assert read_result(Path(config.out), "000000") is None


def test_a_data_set_without_its_quarantine_is_not_finished(small_partitions: TokenizeConfig) -> None:
    tokenize(small_partitions)
    assert output.is_finished(Job(small_partitions))
    (Path(small_partitions.out) / output.QUARANTINE_FILE).unlink()
    assert not output.is_finished(Job(small_partitions)), "the same command writes it again"


def test_a_folder_has_one_writer(tmp_path: Path) -> None:
    with output.exclusive_writer(StorageDir.of(tmp_path)):
        with (
            pytest.raises(UserError, match=r"is writing to .* another --out"),
            output.exclusive_writer(StorageDir.of(tmp_path)),
        ):
            raise AssertionError
        with output.exclusive_writer(StorageDir.of(tmp_path / "other")):
            pass
    with output.exclusive_writer(StorageDir.of(tmp_path)):
        pass


def test_settings_are_kept_beside_the_partitions_and_compared(config: TokenizeConfig) -> None:
    values = json.loads((Path(config.out) / output.SETTINGS_FILE).read_text(encoding="utf-8"))
    assert values == Job(config).identity() | {"sources": list(config.sources), "languages": []}
    assert output.changed_settings(Job(config)) == {}
    assert output.changed_settings(Job(replace(config, min_chars=7))) == {"min_chars": (200, 7)}
    with pytest.raises(UserError, match=r"min_chars: 200 → 7.*--overwrite"):
        main(replace(config, min_chars=7))


def test_the_quarantine_is_one_line_per_book_sorted_by_id(tmp_path: Path) -> None:
    dropped = [DroppedBook("b", "empty", "a"), DroppedBook("é", "language", "de"), DroppedBook("a", "unreadable", "b")]
    written = [PartitionResult("", [], [], some, {}, {}, [], 0, 0, 0) for some in (dropped[:1], dropped[1:])]
    assert output.write_quarantine(StorageDir.of(tmp_path), written) == [dropped[2], dropped[0], dropped[1]]
    lines = (tmp_path / output.QUARANTINE_FILE).read_text(encoding="utf-8").splitlines()
    assert [DroppedBook(**json.loads(line)) for line in lines] == [dropped[2], dropped[0], dropped[1]]
